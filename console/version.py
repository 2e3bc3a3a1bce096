"""Version and commit of this program."""

import functools
import importlib.metadata
import os
import re
from pathlib import Path

from console.processes import Output, run
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
    revision = _git("rev-parse", "HEAD")
    # Untracked files do not count, because results and data lie beside the source.
    changed = _git("status", "--porcelain", "--untracked-files=no")
    if revision.trouble or changed.trouble:
        return os.environ.get("MLPERF_BERT_COMMIT", "unknown")
    return revision.text.strip() + (" with local changes" if changed.text.strip() else "")


def _git(*arguments: str) -> Output:
    return run(["git", "-C", str(REPOSITORY), *arguments], timeout_s=30)
