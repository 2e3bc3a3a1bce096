"""Fixtures of the GPU benchmark's tests."""

import sys
from pathlib import Path

import pytest

from tests.programs import write_forked_python


@pytest.fixture
def forked_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``sys.executable`` a program that forks a server in which PyTorch is already imported."""
    (folder := tmp_path / "bin").mkdir()
    write_forked_python(folder)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
