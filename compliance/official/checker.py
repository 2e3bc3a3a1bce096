"""Ask the official compliance checker for its verdict on a log, and parse its messages.

The checker's messages hold record indices, expressions and dumps of its state; on some logs it ends with a traceback. It
gets only the lines that hold a record, because it skips the others anyway.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from compliance.log.findings import Outcome, Severity
from compliance.official import process
from console.text import visible

TIMEOUT_S = 120
"""Longest wait for the verdict on one log."""

MAX_TEXT_CHARACTERS = 160


@dataclass(frozen=True)
class Complaint:
    """A message of the official checker.

    Attributes:
        text: the message, shortened.
        keys: the keys that it names.
        line: line in the file of the record that it names, if any.
        absent: it misses a record, or a record with a passing value.
        about_state: the failed condition is about earlier records, not about the record itself.
    """

    text: str
    keys: frozenset[str] = frozenset()
    line: int | None = None
    absent: bool = False
    about_state: bool = False
    severity: Severity = "error"


@dataclass(frozen=True)
class Opinion:
    """Verdict of the official checker on one log, its warnings not counted as errors.

    Attributes:
        judged: False if the checker was not asked, crashed or did not end.
    """

    outcome: Outcome
    complaints: tuple[Complaint, ...] = ()
    judged: bool = True

    @property
    def errors(self) -> int:
        """Number of the complaints that fail the log."""
        return sum(complaint.severity == "error" for complaint in self.complaints)


def opinion(lines: Sequence[tuple[int, bytes]], ruleset: str) -> Opinion:
    """Return the official checker's verdict on a log.

    Args:
        lines: (line in the file, from 1; its bytes without the end) of each line with the token.

    Raises:
        ValueError: mlperf-logging is not installed.
    """
    answer = process.ask_about(b"\n".join(line for _, line in lines), ruleset, TIMEOUT_S)
    if "crash" in answer:
        return Opinion("fail", (Complaint(visible(answer["crash"], MAX_TEXT_CHARACTERS)),), judged=False)
    places = [number for number, _ in lines]
    complaints = [_parse_message(key, text, places, "error") for key, text in answer["errors"]]
    complaints += [_parse_message(key, text, places, "warning") for key, text in answer["warnings"]]
    return Opinion("pass" if answer["passed"] else "fail", tuple(complaints))


def _parse_message(key: str | None, message: str, places: Sequence[int], severity: Severity) -> Complaint:
    # The record, the expression, and a dump of the checker's state follow the first line.
    text = visible(message.partition("\n")[0], MAX_TEXT_CHARACTERS)
    keys = frozenset({key} if key else ())
    # The checker has no codes for its messages, so their English is matched, as mlperf-logging 4.1.68 words it.
    if match := re.match(r"Required (?:EXACTLY_ONE|AT_LEAST\S*) occurrence of (.*?)(?: but found (\d+)|$)", text):
        named = frozenset(re.findall(r"'(\w+)'", match[1]))
        return Complaint(text, named, absent=match[2] in (None, "0"), severity=severity)
    if match := re.match(r"Failed checks for (\w+) :", text):
        return Complaint(text, frozenset({match[1]}), absent=True, severity=severity)
    if match := re.match(r"CHECK for '(\w+)' failed in line (\d+):", text):
        test = re.search(r"^failed test: (.*)$", message, re.MULTILINE)
        condition = test[1] if test else ""
        text = visible(f"{match[1]} fails the condition {condition}", MAX_TEXT_CHARACTERS)
        # The "line" is the record's index, from 0.
        line = places[int(match[2])]
        # In the rule files' conditions s is the state after earlier records.
        return Complaint(text, keys, line=line, about_state="s[" in condition, severity=severity)
    # A condition on the whole log names no key.
    if "initialized_tensors" in message:
        text = "the list of initialised tensors is wrong"
        return Complaint(text, frozenset({"weights_initialization"}), absent=True, severity=severity)
    return Complaint(text, keys, severity=severity)
