import sys

import pytest

from tests.programs import write_forked_python


@pytest.fixture
def forked_python(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this interpreter start programs as forks, which need not import PyTorch."""
    folder = tmp_path_factory.mktemp("forked")
    write_forked_python(folder)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
