"""Version and commit of this program."""

import functools
import importlib.metadata
import os
import re
from pathlib import Path

from console.processes import run
from console.text import visible

NAME = "mlperf-bert"
REPOSITORY = Path(__file__).resolve().parents[1]


def version_line() -> str:
    """Return "mlperf-bert 0.2.0 (commit abc1234)", without the commit if it is unknown.

    A checkout takes the version from its pyproject.toml, because another version may be installed.
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
    """Return the checkout's commit, marked if tracked files differ; in an image, the commit of its source or "unknown"."""
    # Untracked files do not count, because results and data lie beside the source. Tags are excluded to get the hash.
    described = ("describe", "--always", "--abbrev=64", "--exclude=*", "--dirty= with local changes")
    found = run(["git", "-C", str(REPOSITORY), *described], timeout_s=30).answer.strip()
    return found or os.environ.get("MLPERF_BERT_COMMIT", "unknown")
