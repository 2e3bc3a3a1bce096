"""The source of this repository that a submission carries: what git tracks, or, without git, what is not ignored."""

from __future__ import annotations

import fnmatch
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from compliance.artefact import MAX_FILE_BYTES
from console.text import visible
from console.version import REPOSITORY

TIMEOUT_S = 60


@dataclass(frozen=True)
class SourceTree:
    """Files of a source tree, as paths below its root, sorted.

    Attributes:
        left_out: files that a submission may not hold: hidden ones, names with spaces or unprintable, links, more than
            50 MiB.
        commit: what is checked out; None without git.
        modified: tracked files that differ from it.
    """

    root: Path
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    commit: str | None
    modified: tuple[str, ...]


def tracked_source(root: Path = REPOSITORY) -> SourceTree:
    """The source below `root`; logs of other runs, under results/, do not belong to it.

    Raises:
        ValueError: the source has no README.md, Dockerfile or run_and_time.sh.
    """
    # Only of a checkout of its own: in a folder inside another repository git would list that one's files.
    listing = _git(root, "ls-files", "-z") if (root / ".git").exists() else None
    names = sorted(filter(None, listing.split("\0"))) if listing is not None else sorted(_not_ignored(root))
    # git also lists what has been deleted and not committed; a link counts, even one that leads nowhere, to be named as
    # left out.
    names = [name for name in names if not name.startswith("results/") and os.path.lexists(root / name)]
    files = [name for name in names if _may_be_submitted(root / name, name)]
    for name in ("README.md", "Dockerfile", "LICENSE", "run_and_time.sh"):
        if name not in files:
            # What a reader needs to build and run it; an installed package lacks them.
            raise ValueError(
                f"{root} holds no {name}: package from a checkout of the repository, not from an installation"
            )
    commit = _git(root, "rev-parse", "HEAD") if listing is not None else None
    # Against HEAD, so that changes count whether or not they are staged.
    changes = _git(root, "diff", "--name-only", "-z", "HEAD") if listing is not None else None
    modified = [name for name in (changes or "").split("\0") if name in files]  # what is not packaged may differ
    left_out = sorted(set(names) - set(files))
    return SourceTree(root, tuple(files), tuple(left_out), commit.strip() if commit else None, tuple(modified))


def _may_be_submitted(path: Path, name: str) -> bool:
    """Tell whether the repository checker takes a file (name, size) that is no link; links it misreads."""
    parts = PurePosixPath(name).parts
    named = visible(name) == name and not any(part.startswith(".") or " " in part for part in parts)
    return named and path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE_BYTES


def _git(root: Path, *arguments: str) -> str | None:
    """Return what a git command prints; None where it fails or is not there."""
    try:
        command = ["git", *arguments]
        # With -z and this, names that are no UTF-8 come through and can be opened.
        done = subprocess.run(
            command, cwd=root, capture_output=True, errors="surrogateescape", timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _not_ignored(root: Path) -> list[str]:
    """Files below `root` that no pattern of .gitignore names; of its language, what this repository uses."""
    ignore = root / ".gitignore"
    lines = ignore.read_text(encoding="utf-8").splitlines() if ignore.is_file() else []
    patterns = [line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith(("#", "!"))]
    anchored = [pattern.lstrip("/") for pattern in patterns if "/" in pattern]
    anywhere = [pattern for pattern in patterns if "/" not in pattern]

    def ignored(name: str) -> bool:
        last = name.rpartition("/")[2]
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in anchored) or any(
            fnmatch.fnmatchcase(last, pattern) for pattern in anywhere
        )

    found: list[str] = []
    for folder, folders, files in os.walk(root):
        below = Path(folder).relative_to(root)
        # In place, so that os.walk() does not go into folders that are ignored.
        folders[:] = [name for name in folders if name != ".git" and not ignored((below / name).as_posix())]
        found += [name for name in ((below / file).as_posix() for file in files) if not ignored(name)]
    return found
