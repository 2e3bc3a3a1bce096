"""Runs the official compliance checker in a process of its own and reads its complaints.

The checker of mlperf-logging prints messages for people who know its source: record indices, expressions, dumps of
its state; on some logs it ends with a traceback. A `Complaint` is what can be learned from one message.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

TIMEOUT_S = 300
MAX_TEXT_CHARACTERS = 160


@dataclass(frozen=True)
class Complaint:
    """One message of the official checker.

    Attributes:
        text: the message in short.
        keys: the keys it is about; empty when it names none.
        record: index of the record among those of the log, from 0, where it names one.
        absent: it misses a record, or a record with a passing value.
        about_state: the failed condition is about what came before, not about the record itself.
    """

    text: str
    keys: frozenset[str] = frozenset()
    record: int | None = None
    absent: bool = False
    about_state: bool = False


def complaints(path: Path, ruleset: str) -> list[Complaint]:
    """Everything that the official checker has against the log at `path`, warnings included; empty when it passes.

    Raises:
        ValueError: mlperf-logging is not installed, or its checker did not end.
    """
    if find_spec("mlperf_logging") is None:
        raise ValueError("the package mlperf-logging is not installed: install the project's requirements")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training"]
        command += ["--ruleset", ruleset, "--werror", "--log_output", os.devnull, str(path.resolve())]
        try:
            run = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{path}: the official checker did not end within {TIMEOUT_S} s") from error
    if run.returncode == 0:
        return []
    return parse_messages(run.stderr)


def parse_messages(stderr: str) -> list[Complaint]:
    """The complaints in what a failed run of the checker printed; a traceback is one complaint too."""
    messages = re.search(r"^WARNING -  (.*)^ERROR - FAILED", stderr, re.DOTALL | re.MULTILINE)
    if messages is None:
        last_line = stderr.strip().rpartition("\n")[2]
        return [Complaint(_printable(f"the official checker ended with an error: {last_line}"))]
    return [_parse_message(message.strip()) for message in re.split(r"\n-{30}\n", messages.group(1))]


def _parse_message(message: str) -> Complaint:
    text = _printable(message.partition("\n")[0])
    if match := re.match(r"Required (?:EXACTLY_ONE|AT_LEAST\S*) occurrence of (.*?)(?: but found (\d+)|$)", text):
        return Complaint(text, frozenset(re.findall(r"'(\w+)'", match[1])), absent=match[2] in (None, "0"))
    if match := re.match(r"Failed checks for (\w+) :", text):
        return Complaint(text, frozenset({match[1]}), absent=True)
    if match := re.match(r"CHECK for '(\w+)' failed in line (\d+):", text):
        test = re.search(r"^failed test: (.*)$", message, re.MULTILINE)
        condition = test[1] if test else ""
        text = _printable(f"{match[1]} fails the condition {condition}")
        return Complaint(text, frozenset({match[1]}), record=int(match[2]), about_state="s[" in condition)
    if "initialized_tensors" in message:
        return Complaint("the list of initialised tensors is wrong", frozenset({"weights_initialization"}), absent=True)
    key = re.search(r'"key": "(\w+)"', message)
    return Complaint(text, frozenset({key[1]} if key else ()))


def _printable(text: str) -> str:
    """Log contents end up in these messages: nothing that steers a terminal, and not without end."""
    return "".join(character if character.isprintable() else "?" for character in text)[:MAX_TEXT_CHARACTERS]
