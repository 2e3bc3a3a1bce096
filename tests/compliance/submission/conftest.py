"""A valid submission that tests may damage."""

import shutil
from pathlib import Path

import pytest

from tests.compliance.result_folders import benchmark_folder, without_chain, write_submission


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid closed submission whose logs have no digest chains."""
    root = write_submission(tmp_path_factory.mktemp("submission") / "example")
    for log in benchmark_folder(root).iterdir():
        without_chain(log)
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy of the submission."""
    return shutil.copytree(original, tmp_path / "example")
