"""The source that a submission carries."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from compliance.artefact import MAX_FILE_BYTES
from compliance.package.source import tracked_source
from tests.conftest import REPOSITORY

WANTED = ["Dockerfile", "LICENSE", "README.md", "bert/train.py", "run_and_time.sh"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in [*WANTED, "results/x/bert/result_0.txt", ".ci/run", "a name.py", "data/train", "bert/cache.pyc"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.py").symlink_to("bert/train.py")
    (tmp_path / ".gitignore").write_text("*.pyc\n/data/\n/results/*\n!/results/x\n# note\n")
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    return tmp_path


def test_without_git_what_is_not_ignored(tree: Path) -> None:
    found = tracked_source(tree)
    assert list(found.files) == WANTED
    assert list(found.left_out) == [".ci/run", ".gitignore", "a name.py", "large.bin", "link.py"]
    assert (found.commit, found.modified) == (None, ())


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_with_git_what_it_tracks(tree: Path) -> None:
    def git(*arguments: str) -> str:
        identity = {
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@b",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@b",
        }
        done = subprocess.run(
            ["git", *arguments], cwd=tree, env=os.environ | identity, check=True, capture_output=True, text=True
        )
        return done.stdout

    git("init", "--quiet")
    git("add", "--force", ".", ":!large.bin")
    git("commit", "--quiet", "-m", "all")
    (tree / "bert/untracked.py").write_text("")
    (tree / "run_and_time.sh").write_text("changed")
    found = tracked_source(tree)
    assert list(found.files) == [
        "Dockerfile",
        "LICENSE",
        "README.md",
        "bert/cache.pyc",
        "bert/train.py",
        "data/train",
        "run_and_time.sh",
    ]
    assert list(found.left_out) == [".ci/run", ".gitignore", "a name.py", "link.py"]
    assert found.commit == git("rev-parse", "HEAD").strip()
    assert found.modified == ("run_and_time.sh",)
    (tree / "bert/train.py").unlink()
    without = tracked_source(tree)
    assert "bert/train.py" not in (*without.files, *without.left_out)


def test_an_installation_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no README\.md: package from a checkout"):
        tracked_source(tmp_path)


def test_this_repository() -> None:
    found = tracked_source()
    assert found.root == REPOSITORY
    assert {"README.md", "Dockerfile", "bert/train.py", "compliance/log/rules.py", "launch/slurm.sub"} <= set(
        found.files
    )
    assert not [name for name in found.files if name.startswith(("results/", ".")) or "/." in name or " " in name]
