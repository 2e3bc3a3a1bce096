"""Source tree of a submission: all files of this repository that git tracks, without results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from compliance.artefact import MAX_FILE_BYTES
from console.processes import run
from console.text import visible
from console.version import REPOSITORY

TIMEOUT_S = 60
INDISPENSABLE = ("README.md", "Dockerfile", "LICENSE", "run_and_time.sh")


@dataclass(frozen=True)
class SourceTree:
    """Files of a source tree, as sorted paths below its root.

    Left out are links, hidden files, files of more than 50 MiB, and names with spaces or unprintable characters, which a
    submission must not contain.

    Attributes:
        commit: the commit that is checked out.
        modified: files that differ from the commit.
    """

    root: Path
    files: tuple[str, ...]
    commit: str
    modified: tuple[str, ...]


def tracked_source(root: Path = REPOSITORY) -> SourceTree:
    """Return the source below `root`, which must be a git checkout.

    Raises:
        ValueError: `root` is not a git checkout, or lacks README.md, Dockerfile, LICENSE or run_and_time.sh.
    """
    # Require .git, because in a folder inside another checkout git would list the other repository's files.
    commit = run(["git", "rev-parse", "HEAD"], folder=root, timeout_s=TIMEOUT_S)
    if not (root / ".git").exists() or commit.trouble:
        raise ValueError(f"{root} is not a git checkout, which defines the source: package from a checkout")
    # Files may be missing, because git also lists files whose deletion is not committed.
    names = [name for name in _git(root, "ls-files") if not name.startswith("results/")]
    names = [name for name in names if (root / name).exists() or (root / name).is_symlink()]
    files = [name for name in names if _may_be_submitted(root / name, name)]
    for name in INDISPENSABLE:
        if name not in files:
            raise ValueError(f"{root} holds no {name}: package from a checkout of this repository")
    modified = [name for name in _git(root, "diff", "--name-only", "HEAD") if name in files]
    return SourceTree(root, tuple(files), commit.answer.strip(), tuple(modified))


def _may_be_submitted(path: Path, name: str) -> bool:
    parts = PurePosixPath(name).parts
    named = visible(name) == name and not any(part.startswith(".") or " " in part for part in parts)
    return named and path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE_BYTES


def _git(root: Path, *arguments: str) -> list[str]:
    """Return the names that a git command prints."""
    output = run(["git", *arguments, "-z"], folder=root, timeout_s=TIMEOUT_S)
    if output.trouble:
        raise ValueError(f"{root}: {output.complaint}")
    return sorted(filter(None, output.answer.split("\0")))
