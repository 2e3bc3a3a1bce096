"""The version that programs print, and the commit that is recorded in results."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from console import version
from tests.conftest import REPOSITORY
from tests.programs import git

CommitOf = Callable[[Path], str]


@pytest.fixture
def commit_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[CommitOf]:
    """Return a function that returns the commit that a program finds if ``folder`` is its repository."""

    def commit(folder: Path) -> str:
        monkeypatch.setattr(version, "REPOSITORY", folder)
        version.commit.cache_clear()
        return version.commit()

    yield commit
    version.commit.cache_clear()


def test_the_version_of_a_git_checkout_states_its_commit_and_local_changes(
    commit_of: CommitOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("one")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "file")
    monkeypatch.setenv("MLPERF_BERT_COMMIT", "abc")
    assert commit_of(tmp_path) == "abc", "a folder without a commit, or the container's"
    git(tmp_path, "commit", "--quiet", "--message", "one")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == revision
    (tmp_path / "file").write_text("two")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    assert commit_of(tmp_path) == f"{revision} with local changes"
    assert version.version_line() == f"mlperf-bert 1.2.3 (commit {revision[:7]} with local changes)"


def test_the_version_in_a_container_image_states_its_commit(
    commit_of: CommitOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launch").mkdir()
    for name in ("pyproject.toml", "launch/environment.sh"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for revision, known in ((None, ""), ("unknown", ""), ("0123456789abcdef", " (commit 0123456)")):
        if revision is None:
            monkeypatch.delenv("MLPERF_BERT_COMMIT", raising=False)
        else:
            monkeypatch.setenv("MLPERF_BERT_COMMIT", revision)
        assert commit_of(tmp_path) == (revision or "unknown")
        line = version.version_line()
        assert re.fullmatch(r"mlperf-bert \d+\.\d+\.\d+" + re.escape(known), line)
        shell = "source launch/environment.sh; usage any --version"
        done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == f"{line}\n"
