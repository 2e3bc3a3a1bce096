"""The commit that a result names."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bert.reporting import provenance


@pytest.fixture
def commit_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], str]]:
    """``commit()`` of a program that lies in the given folder."""

    def commit(folder: Path) -> str:
        monkeypatch.setattr(provenance, "REPOSITORY", folder)
        provenance.commit.cache_clear()
        return provenance.commit()

    yield commit
    provenance.commit.cache_clear()


def test_outside_a_checkout_the_image_names_the_commit(
    commit_of: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLPERF_BERT_COMMIT", raising=False)
    assert commit_of(tmp_path) == "unknown"
    monkeypatch.setenv("MLPERF_BERT_COMMIT", "abc")
    assert commit_of(tmp_path) == "abc"


def test_a_checkout_names_its_own_commit_and_changes(
    commit_of: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.setenv("MLPERF_BERT_COMMIT", "abc")
    (tmp_path / "file").write_text("one")
    git("init", "--quiet")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    revision = git("rev-parse", "HEAD")
    assert commit_of(tmp_path) == revision
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{revision} with local changes"
