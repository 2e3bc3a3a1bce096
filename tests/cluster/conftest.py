"""Fixtures that run commands of ``python -m cluster`` in the tests' own process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cluster.__main__ import main


@dataclass(frozen=True)
class Done:
    """Output and exit status of a command."""

    status: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command with the given arguments."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr("sys.argv", ["cluster", *map(str, arguments)])
        status, shown = main(), capsys.readouterr()
        return Done(status, shown.out, shown.err)

    return run


@pytest.fixture
def refused(cluster: Command) -> Callable[..., str]:
    """Return a function that runs an invalid command, checks for a one-line error, and returns that line."""

    def run(*arguments: object) -> str:
        done = cluster(*arguments)
        assert (done.status, done.out) == (2, ""), done
        [line] = done.err.splitlines()
        assert line.startswith("error: ")
        return line

    return run
