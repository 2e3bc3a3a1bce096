"""The processes of one choice, started as ``run_and_time.sh`` would start them, that train some steps on demand."""

from __future__ import annotations

import json
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bert.configuration.config import REPOSITORY
from cluster.tuning.choice import TunedRun

# Variables by which a launcher says what a process is: inherited ones would make trials part of that launch.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_")
_LONGEST_ANSWER = 4096
_WINDOW_PATIENCE_S = 600.0


class TrialError(ValueError):
    """A choice that could not be started, or did not get on."""


@dataclass(frozen=True)
class Pace:
    """Steps in a row, of one process or of all together."""

    seconds: float
    tokens: int
    waited: float
    """Seconds of waiting for data; of several processes, in the mean."""

    @property
    def seconds_a_token(self) -> float:
        """Time by length of text, which differs from step to step."""
        return self.seconds / self.tokens


class Group:
    """The processes of a choice. Between windows they sleep, so that several groups can take turns on one machine."""

    def __init__(self, choice: TunedRun, recipe: str, settings: Sequence[str], deadline: float) -> None:
        """Start them and wait until they are warmed up, at the latest at ``deadline`` by ``time.monotonic``.

        Raises ``TrialError`` with what they complain about.
        """
        self.choice = choice
        # A file and not a pipe: one that nobody reads fills up and blocks its writers.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115, closed with the processes that write to it
        command = [sys.executable, "-m", "cluster.tuning.trial", recipe, *choice.arguments, *settings]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for environment in _environments(choice):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=REPOSITORY,
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=self._complaints,
                    )
                )
            self._answers(deadline)
        # BaseException: Ctrl-C during the start must leave no processes behind.
        except BaseException:
            self.close(patience=0.0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(patience=0.0 if error else 5.0)

    def pace(self, steps: int, untimed: int = 1) -> Pace:
        """Train ``steps`` steps after some that are not timed."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(b"%d %d\n" % (untimed, steps))
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failed("has ended") from None
        paces = [Pace(**answer) for answer in self._answers(time.monotonic() + _WINDOW_PATIENCE_S)]
        return Pace(
            # The window has ended when the slowest process has.
            max(pace.seconds for pace in paces),
            sum(pace.tokens for pace in paces),
            sum(pace.waited for pace in paces) / len(paces),
        )

    @property
    def memory(self) -> int:
        """The most bytes that its processes have taken, all together."""
        # VmHWM is the peak of a process.
        texts = [Path(f"/proc/{process.pid}/status").read_text() for process in self._processes]
        return sum(1024 * int(text.partition("VmHWM:")[2].split()[0]) for text in texts)

    def _answers(self, deadline: float) -> list[dict[str, Any]]:
        """Read a line from every process. One that ends leaves the others waiting for it, so all are listened to at once."""
        pending = {process.stdout.fileno(): rank for rank, process in enumerate(self._processes) if process.stdout}
        answers: list[dict[str, Any]] = [{} for _ in self._processes]
        while pending:
            # select over all: reading one pipe after another would wait for a rank whose partner has died.
            ready = select.select(list(pending), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise self._failed("was not ready in time")
            for pipe in ready:
                line = os.read(pipe, _LONGEST_ANSWER)  # one write of at most PIPE_BUF bytes comes whole
                if not line:
                    raise self._failed("has ended")
                answers[pending.pop(pipe)] = json.loads(line)
        return answers

    def _failed(self, what: str) -> TrialError:
        size = self._complaints.seek(0, os.SEEK_END)
        # The end of it is enough for a message.
        self._complaints.seek(max(0, size - 65536))
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return TrialError(f"{self.choice} {what}{': ' + complaint(lines) if lines else ''}")

    def close(self, patience: float = 5.0) -> None:
        """End them, after so many seconds by force."""
        deadline = time.monotonic() + patience
        # All inputs are closed first: a process that ends in order waits for the others.
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # at the end of its input a process ends in order
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._complaints.close()


def complaint(lines: Sequence[str]) -> str:
    """Pick what a program that failed complains about: its own line, "error: ...", or else the last one."""
    return next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")


def _environments(choice: TunedRun) -> list[dict[str, str]]:
    """The environment of each process; one alone is in no launcher's."""
    # This program may have been started by a launcher itself.
    own = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    own["OMP_NUM_THREADS"] = str(choice.threads)
    # One process initializes no process group, as a run without a launcher.
    if choice.processes == 1:
        return [own]
    size = str(choice.processes)
    # The loopback interface: all ranks are here.
    own |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return [own | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(choice.processes)]


def _free_port() -> int:
    """A port that nobody is given by chance before it is used: the system takes those of connections from 32,768 on."""
    while True:
        # Let go again before the ranks bind it, hence a range that the system gives nobody by itself.
        with socket.socket() as probe:
            try:
                probe.bind(("", random.SystemRandom().randrange(10_000, 32_000)))
            except OSError:
                continue
            return probe.getsockname()[1]
