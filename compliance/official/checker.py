"""Asks the official compliance checker for its verdict, in a process of its own, and reads its complaints.

The checker of mlperf-logging prints messages for people who know its source: record indices, expressions, dumps of
its state; on some logs it ends with a traceback. A `Complaint` is what can be learned from one message. One process
serves many logs (`compliance.official.checker_worker`); it gets the lines that hold a record and nothing else, because it
skips the others anyway.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from compliance.log.findings import Outcome, Severity
from console.text import visible

TIMEOUT_S = 120
"""Longest wait for the verdict on one log."""

MAX_TEXT_CHARACTERS = 160


@dataclass(frozen=True)
class Complaint:
    """One message of the official checker.

    Attributes:
        text: the message in short.
        keys: the keys it is about; empty when it names none.
        line: line in the file of the record it names, where it names one.
        absent: it misses a record, or a record with a passing value.
        about_state: the failed condition is about what came before, not about the record itself.
        severity: what it is to the checker itself.
    """

    text: str
    keys: frozenset[str] = frozenset()
    line: int | None = None
    absent: bool = False
    about_state: bool = False
    severity: Severity = "error"


@dataclass(frozen=True)
class Opinion:
    """The verdict of the official checker on one log, its warnings not counted as errors."""

    outcome: Outcome
    complaints: tuple[Complaint, ...] = ()


def opinion(lines: Sequence[tuple[int, bytes]], ruleset: str) -> Opinion:
    """What the official checker says about a log.

    Args:
        lines: (line in the file, from 1; its bytes without the end) of each line that holds the token.

    Raises:
        ValueError: mlperf-logging is not installed.
    """
    answer = _worker().ask(b"\n".join(line for _, line in lines), ruleset)
    if "crash" in answer:
        return Opinion("fail", (Complaint(visible(answer["crash"], MAX_TEXT_CHARACTERS)),))
    places = [number for number, _ in lines]
    complaints = [_parse_message(key, text, places, "error") for key, text in answer["errors"]]
    complaints += [_parse_message(key, text, places, "warning") for key, text in answer["warnings"]]
    return Opinion("pass" if answer["passed"] else "fail", tuple(complaints))


class _Worker:
    """The process of the official checker; started at the first question, and again after it had to be ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="compliance-")
        self._path = Path(self._folder.name) / "log.txt"
        atexit.register(self.close)

    def ask(self, content: bytes, ruleset: str) -> dict[str, Any]:
        """The answer to one request; a checker that dies over it twice, or does not end, is a crash."""
        self._path.write_bytes(content)
        request = json.dumps({"path": str(self._path), "ruleset": ruleset}).encode() + b"\n"
        for _ in range(2):
            answer = self._exchange(self._process or self._start(), request)
            if answer is None:
                self._end()
                return {"crash": f"the official checker did not end within {TIMEOUT_S} s"}
            if answer.endswith(b"\n"):
                return json.loads(answer)
            self._end()
        return {"crash": "the official checker ended without a verdict"}

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
        """The line that answers a request: cut short if the process died, None if it takes too long."""
        requests, answers = _pipes(process)
        try:
            requests.write(request)
            requests.flush()
        except BrokenPipeError:
            return b""
        ready, _, _ = select.select([answers], [], [], TIMEOUT_S)
        return answers.readline() if ready else None

    def _start(self) -> subprocess.Popen[bytes]:
        if find_spec("mlperf_logging") is None:
            raise ValueError("the package mlperf-logging is not installed: install the project's requirements")
        # -P: the folder of the script holds modules named like others'.
        command = [sys.executable, "-P", str(Path(__file__).with_name("checker_worker.py"))]
        environment = os.environ | {"PYTHONUTF8": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder.name,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the program that asks
        )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            for pipe in _pipes(self._process):
                with suppress(OSError):
                    pipe.close()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the process and remove its folder."""
        self._end()
        self._folder.cleanup()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


@cache
def _worker() -> _Worker:
    return _Worker()


def _parse_message(key: str | None, message: str, places: Sequence[int], severity: Severity) -> Complaint:
    text = visible(message.partition("\n")[0], MAX_TEXT_CHARACTERS)
    keys = frozenset({key} if key else ())
    if match := re.match(r"Required (?:EXACTLY_ONE|AT_LEAST\S*) occurrence of (.*?)(?: but found (\d+)|$)", text):
        named = frozenset(re.findall(r"'(\w+)'", match[1]))
        return Complaint(text, named, absent=match[2] in (None, "0"), severity=severity)
    if match := re.match(r"Failed checks for (\w+) :", text):
        return Complaint(text, frozenset({match[1]}), absent=True, severity=severity)
    if match := re.match(r"CHECK for '(\w+)' failed in line (\d+):", text):
        test = re.search(r"^failed test: (.*)$", message, re.MULTILINE)
        condition = test[1] if test else ""
        text = visible(f"{match[1]} fails the condition {condition}", MAX_TEXT_CHARACTERS)
        line = places[int(match[2])]
        return Complaint(text, keys, line=line, about_state="s[" in condition, severity=severity)
    if "initialized_tensors" in message:
        text = "the list of initialised tensors is wrong"
        return Complaint(text, frozenset({"weights_initialization"}), absent=True, severity=severity)
    return Complaint(text, keys, severity=severity)
