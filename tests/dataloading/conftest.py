"""Fixtures that run dataloading commands and check for files that a test must not leave behind."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataloading.__main__ import main
from tests.dataloading.made_up import TEXT, TOKENS

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command, and returns its output. With ``fails``, it expects a one-line error."""

    def run_command(*arguments: object, fails: bool = False, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["dataloading", *map(str, arguments)])
        capsys.readouterr()
        found = main()
        out, err = capsys.readouterr()
        assert found == (2 if fails else status), out + err
        assert not fails or (err.startswith("error: ") and err.count("\n") == 1)
        return out + err

    return run_command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(TOKENS))
    return path


_opened: list[str] = []
sys.addaudithook(lambda event, arguments: _opened.append(str(arguments[0])) if event == "open" else None)


@pytest.fixture
def opened() -> list[str]:
    """List to which every file is added that this process opens during the test."""
    _opened.clear()
    return _opened


@pytest.fixture
def no_partial_files(tmp_path: Path) -> Iterator[None]:
    yield
    assert list(tmp_path.rglob("*.partial")) == []
