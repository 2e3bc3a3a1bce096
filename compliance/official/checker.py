"""Ask the official compliance checker for its verdict on a log, and parse its messages.

The checker's messages contain record indices, expressions and dumps of its state. Some logs crash the checker. Only lines
with records are passed to it, because it skips all other lines.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from compliance.log.findings import Outcome, Severity
from compliance.official.process import the_worker
from console.text import visible

MAX_TEXT_CHARACTERS = 160


@dataclass(frozen=True)
class Complaint:
    """A message of the official checker.

    Attributes:
        text: the message, shortened.
        keys: keys that the message names.
        line: line in the file of the record that the message names, if any.
        absent: whether the message says that there is no record of a key, or no record of it with a valid value.
        about_state: whether the failed condition is about earlier records and not about the record itself.
    """

    text: str
    keys: frozenset[str] = frozenset()
    line: int | None = None
    absent: bool = False
    about_state: bool = False
    severity: Severity = "error"


@dataclass(frozen=True)
class Opinion:
    """Verdict of the official checker on one log. Its warnings do not count as errors.

    If the checker was not run, crashed or timed out, the outcome is "fail" and the only complaint says why.
    """

    outcome: Outcome
    complaints: tuple[Complaint, ...] = ()


def opinion(lines: Sequence[tuple[int, bytes]], ruleset: str) -> Opinion:
    """Return the official checker's verdict on a log. Raises ``ValueError`` if mlperf-logging is not installed.

    `lines` has (line number from 1, bytes without the line end) of each line with the token.
    """
    worker = the_worker()
    path = worker.folder / "log.txt"
    path.write_bytes(b"\n".join(line for _, line in lines))
    answer = worker.answer("log", path, ruleset)
    if "crash" in answer:
        return Opinion("fail", (Complaint(visible(answer["crash"], MAX_TEXT_CHARACTERS)),))
    places = [number for number, _ in lines]
    complaints = [_parse_message(key, text, places, "error") for key, text in answer["errors"]]
    complaints += [_parse_message(key, text, places, "warning") for key, text in answer["warnings"]]
    return Opinion("pass" if answer["passed"] else "fail", tuple(complaints))


def _parse_message(key: str | None, message: str, places: Sequence[int], severity: Severity) -> Complaint:
    # Use only the first line. The record, the expression and a dump of the checker's state follow it.
    text = visible(message.partition("\n")[0], MAX_TEXT_CHARACTERS)
    keys = frozenset({key} if key else ())
    # The messages have no codes, so match their text as worded by mlperf-logging 4.1.68.
    if match := re.match(r"Required (?:EXACTLY_ONE|AT_LEAST\S*) occurrence of (.*?)(?: but found (\d+)|$)", text):
        named = frozenset(re.findall(r"'(\w+)'", match[1]))
        return Complaint(text, named, absent=match[2] in (None, "0"), severity=severity)
    if match := re.match(r"Failed checks for (\w+) :", text):
        return Complaint(text, frozenset({match[1]}), absent=True, severity=severity)
    if match := re.match(r"CHECK for '(\w+)' failed in line (\d+):", text):
        test = re.search(r"^failed test: (.*)$", message, re.MULTILINE)
        condition = test[1] if test else ""
        text = visible(f"{match[1]} fails the condition {condition}", MAX_TEXT_CHARACTERS)
        # The number that the message calls "line" is the record's index, from 0.
        line = places[int(match[2])]
        # In the conditions of rule files, s is the state after earlier records, so "s[" shows a condition about them.
        return Complaint(text, keys, line=line, about_state="s[" in condition, severity=severity)
    # A condition on the whole log names no key, so recognise it by its text.
    if "initialized_tensors" in message:
        text = "the list of initialised tensors is wrong"
        return Complaint(text, frozenset({"weights_initialization"}), absent=True, severity=severity)
    return Complaint(text, keys, severity=severity)
