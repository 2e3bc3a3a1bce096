"""The process of the official tools (`compliance.official.worker`): started at the first question, kept for the others.

It is started again after it died, or had to be ended because it took too long.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

NAMES = {
    "log": "compliance checker",
    "package": "package checker",
    "system": "system description checker",
    "repository": "repository checker",
}
"""Official tools by the part of a submission that they judge; a whole program is called by its own name."""


def ask(tool: str, path: Path, ruleset: str, timeout_s: float) -> dict[str, Any]:
    """Ask an official tool what it says; one that dies over it twice, or does not end, gives {"crash": why}.

    Args:
        tool: see `compliance.official.worker.judge`.

    Raises:
        ValueError: mlperf-logging is not installed.
    """
    return the_worker().answer({"tool": tool, "path": str(path), "ruleset": ruleset}, timeout_s)


def ask_about(log: bytes, ruleset: str, timeout_s: float) -> dict[str, Any]:
    """Ask the official compliance checker about the lines of a log; raises as `ask` does."""
    # One file for all: the next log is written when the answer about this one is there.
    path = the_worker().folder / "log.txt"
    path.write_bytes(log)
    return ask("log", path, ruleset, timeout_s)


def run_program(program: str, arguments: Sequence[str], folder: Path, output: Path, timeout_s: float) -> int:
    """Exit status of an official program, run in a folder with its output in a file.

    Raises:
        ValueError: mlperf-logging is not installed, or the program does not end.
    """
    request = {"program": program, "arguments": arguments, "folder": str(folder), "output": str(output)}
    answer = the_worker().answer(request, timeout_s)
    if "crash" in answer:
        raise ValueError(f"{program}: {answer['crash']}")
    return answer["status"]


class Worker:
    """A process that answers one request after the other."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._temporary = tempfile.TemporaryDirectory(prefix="compliance-")
        self.folder = Path(self._temporary.name)
        atexit.register(self._close)

    def answer(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a request, {"crash": why} where there is none."""
        line = json.dumps(request).encode() + b"\n"
        name = NAMES.get(request.get("tool", ""), "tool")
        # A process that died before, or over what was asked last, leaves the question a second try.
        for _ in range(2):
            answer = self._exchange(self.process or self._start(), line, timeout_s)
            if answer is None:
                self.end()
                return {"crash": f"the official {name} did not end within {timeout_s} s"}
            # Without the line end the process died while it answered.
            if answer.endswith(b"\n"):
                return json.loads(answer)
            self.end()
        return {"crash": f"the official {name} ended without a verdict"}

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: bytes, timeout_s: float) -> bytes | None:
        """The line that answers a request: cut short if the process died, None if it takes too long."""
        requests, answers = _pipes(process)
        try:
            requests.write(request)
            requests.flush()
        # A process that is gone shows as a pipe without a reader: the caller starts another.
        except BrokenPipeError:
            return b""
        answer, deadline_s = b"", time.monotonic() + timeout_s
        # Read past the buffer, which select does not see: a process that stops within its line must not be waited for.
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([answers], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return None
            if not (part := os.read(answers.fileno(), 1 << 16)):
                return answer
            answer += part
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # Looked for without importing it: the worker imports it, and a program that asks nothing need not.
        if find_spec("mlperf_logging") is None:
            raise ValueError("the package mlperf-logging is not installed: install the project's requirements")
        # -P: the folder of the script holds modules named like others'.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The tools print for people; what counts comes back as an answer.
            stderr=subprocess.DEVNULL,
            cwd=self.folder,  # some tools leave files where they run
            # The tools open descriptions in the encoding of the locale, and those that are written here are UTF-8.
            env=os.environ | {"PYTHONUTF8": "1"},
            start_new_session=True,  # Ctrl-C is for the program that asks
        )
        return self.process

    def end(self) -> None:
        """End the process; the next question starts another."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with the program that it may have forked
            # Closing flushes what the process has not read, and fails where it is gone.
            for pipe in _pipes(self.process):
                with suppress(OSError):
                    pipe.close()
            self.process.wait()
            self.process = None

    def _close(self) -> None:
        self.end()
        self._temporary.cleanup()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


@cache
def the_worker() -> Worker:
    """The process of this program."""
    return Worker()
