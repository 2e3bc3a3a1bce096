"""The version that a program is of, in the line that `--version` prints."""

import functools
import importlib.metadata
import os
import re
import subprocess
from pathlib import Path

from console.text import visible

NAME = "mlperf-bert"
REPOSITORY = Path(__file__).resolve().parents[1]


def version_line() -> str:
    """Return "mlperf-bert 0.2.0 (commit abc1234)"; the commit where one is known.

    A checkout need not be installed, and what is installed may be another version: its own pyproject.toml counts.
    """
    try:
        settings = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return f"{NAME} {importlib.metadata.version(NAME)}"
    version = re.search(r'^version = "(.*)"$', settings, re.MULTILINE)
    assert version is not None
    revision, _, changes = commit().partition(" ")
    known = f" (commit {f'{revision[:7]} {changes}'.strip()})" if revision != "unknown" else ""
    return visible(f"{NAME} {version[1]}{known}")


@functools.cache
def commit() -> str:
    """The checkout's commit, marked when files differ from it; in an image, the one that it was built from, or "unknown"."""
    try:
        revision = _git("rev-parse", "HEAD")
        # Only files that git tracks: results and data lie beside the source.
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("MLPERF_BERT_COMMIT", "unknown")
    return f"{revision} with local changes" if changed else revision


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()
