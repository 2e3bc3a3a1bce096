"""Fixtures that run commands of ``python -m cluster`` in the tests' own process."""

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from cluster.__main__ import main

Command = Callable[..., CompletedProcess[str]]
Refused = Callable[..., str]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command and returns its exit status and output."""

    def run(*arguments: object) -> CompletedProcess[str]:
        monkeypatch.setattr("sys.argv", ["cluster", *map(str, arguments)])
        status, shown = main(), capsys.readouterr()
        return CompletedProcess([*map(str, arguments)], status, shown.out, shown.err)

    return run


@pytest.fixture
def refused(cluster: Command) -> Refused:
    """Return a function that runs an invalid command, checks for a one-line error, and returns that line."""

    def run(*arguments: object) -> str:
        done = cluster(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done
        [line] = done.stderr.splitlines()
        assert line.startswith("error: ")
        return line

    return run
