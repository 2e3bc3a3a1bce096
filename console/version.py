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

    In a checkout, the version comes from its pyproject.toml, because the installed package may have another version.
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
    """Return the commit of this checkout, or of the source of this image, or "unknown". Local changes are marked."""
    # Untracked files are no changes, because results and data lie beside the source. Without tags, git prints the hash.
    described = ("describe", "--always", "--abbrev=64", "--exclude=*", "--dirty= with local changes")
    found = run(["git", "-C", str(REPOSITORY), *described], timeout_s=30).answer.strip()
    return found or os.environ.get("MLPERF_BERT_COMMIT", "unknown")
