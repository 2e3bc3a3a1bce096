"""A record of a log: what stands on a line that holds the token, and what is wrong with the line.

What the official parser takes for a record is one here too. It decodes latin-1, cuts a line at its last token, strips it,
and wants a JSON object with time_ms, key, value and metadata; whatever goes beyond that is a `Problem` beside the record.
"""

from __future__ import annotations

import json
import re
from sys import intern
from typing import Any, NamedTuple

from compliance.log import rules
from compliance.log.findings import Severity, shown

TOKEN = ":::MLLOG "
TOKEN_BYTES = TOKEN.encode()
EVENT_TYPES = ("POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END")

MAX_RECORD_BYTES = 16 * 2**10
"""Longest sensible record: the official parser needs a tenth of a second for it, and quadratic time for longer ones."""

MAX_SHOWN = 60
"""Maximum characters of a wrong field in a message."""


class Record(NamedTuple):
    """An MLLOG record.

    Attributes:
        line: line in the file, from 1.
        time_ms: milliseconds since the Unix epoch.
    """

    line: int
    time_ms: int
    event_type: str
    key: str
    value: Any
    metadata: dict[str, Any]

    @property
    def logged_at(self) -> str | None:
        """Source position "file:lineno" of the call that logged the record, where it is known."""
        file, lineno = self.metadata.get("file"), self.metadata.get("lineno")
        known = isinstance(file, str) and file.isprintable() and rules.is_integer(lineno)
        return f"{file}:{lineno}" if known else None


class Problem(NamedTuple):
    """Fault of a line that holds the token, beyond what the record says.

    Attributes:
        keys: the keys that the line names, as far as can be told.
        severity: "error" when a record is lost or no parser could read it.
    """

    line: int
    found: str
    expected: str
    keys: frozenset[str] = frozenset()
    severity: Severity = "error"


class _RecordError(Exception):
    """A line that is not a record: (found, expected)."""


def parse_line(line: bytes, number: int) -> tuple[Record | None, list[Problem]]:
    """Parse a line that holds the token into its record and what is wrong with the line.

    Args:
        line: without its end.
        number: line in the file, from 1.
    """
    problems: list[Problem] = []
    # The last token, as the official parser: of several records on a line it keeps that one.
    start = line.rindex(TOKEN_BYTES)
    if line.find(TOKEN_BYTES) != start:
        keys = _keys_in(line[:start])
        count = line.count(TOKEN_BYTES)
        lost = f": a parser loses the first{' (' + ', '.join(sorted(keys)) + ')' if keys else ''}"
        expected = "one record a line: write each with one write()"
        problems.append(Problem(number, f"{count} records on one line{lost}", expected, keys))
    # A warning only: it is slow to parse for the official tools, and yet a record to them.
    if len(line) > MAX_RECORD_BYTES:
        found = f"a record of {len(line)} bytes: the official parser needs time quadratic in its length"
        problems.append(Problem(number, found, f"at most {MAX_RECORD_BYTES}", severity="warning"))
    try:
        return _parse_record(line[start + len(TOKEN_BYTES) :], number, problems), problems
    except _RecordError as error:
        found, expected = error.args
        # When the last record cannot be read either, its key is lost with the others.
        glued = [problem._replace(keys=_keys_in(line)) for problem in problems if problem.severity == "error"]
        return None, glued or [Problem(number, found, expected, _keys_in(line))]


def _parse_record(content: bytes, number: int, problems: list[Problem]) -> Record:
    """The record in what follows the token; adds the problems that leave it readable."""
    # Decoded and stripped as by the official parser; what is UTF-8 is then read as that.
    # As text, because bytes.rstrip() leaves the latin-1 spaces 0x85 and 0xA0 that str.rstrip() takes away.
    text = content.decode("latin-1").rstrip()
    if not text.isascii():
        try:
            text = text.encode("latin-1").decode("utf-8")
        except UnicodeDecodeError:
            problems.append(Problem(number, "bytes that are no UTF-8", "UTF-8 text", severity="warning"))
    fields = _decode(text)
    if _constants:
        expected = "finite numbers: JSON has no NaN and no infinity"
        problems.append(Problem(number, f"the value {_constants[0]}", expected, severity="warning"))
    try:
        time_ms, key, value, metadata = fields["time_ms"], fields["key"], fields["value"], fields["metadata"]
    except KeyError:
        missing = ", ".join(name for name in ("time_ms", "key", "value", "metadata") if name not in fields)
        expected = "time_ms, event_type, key, value and metadata"
        raise _RecordError(f"a record without {missing}", expected) from None
    # The official parser does not need this field, so that its absence loses no record.
    event_type = fields.get("event_type")
    if not isinstance(key, str):
        raise _RecordError(f"key {shown(key, MAX_SHOWN)}", "text")
    if metadata.__class__ is dict:
        # One string for all records: names and source files repeat, and copies would double what a log takes.
        metadata = {
            intern(name): intern(value) if value.__class__ is str else value for name, value in metadata.items()
        }
    # One test for what nearly all records are. type() tells an integer from true, which isinstance() does not.
    is_plain = type(time_ms) is int and 0 <= time_ms < 2**63 and type(metadata) is dict
    if not is_plain or event_type not in EVENT_TYPES:
        time_ms, event_type, metadata = _corrected_fields(time_ms, event_type, metadata, number, problems)
    return Record(number, time_ms, intern(event_type), intern(key), value, metadata)


def _corrected_fields(
    time_ms: Any, event_type: Any, metadata: Any, number: int, problems: list[Problem]
) -> tuple[int, str, dict[str, Any]]:
    """The fields as they are meant, where others' loggers write them differently; adds what is wrong with them."""

    def note(name: str, value: Any, expected: str) -> None:
        problems.append(Problem(number, f"{name} {shown(value, MAX_SHOWN)}", expected, severity="warning"))

    expected = "an integer: milliseconds since the Unix epoch"
    if not rules.is_number(time_ms):
        raise _RecordError(f"time_ms {shown(time_ms, MAX_SHOWN)}", expected)
    if not isinstance(time_ms, int):
        note("time_ms", time_ms, expected)
    if event_type not in EVENT_TYPES:
        note("event_type", event_type, " or ".join(EVENT_TYPES))
        event_type = ""  # empty has been reported, and is passed over by the grading
    if metadata is None:
        note("metadata", metadata, "an object")
        metadata = {}
    if not isinstance(metadata, dict):
        raise _RecordError(f"metadata {shown(metadata, MAX_SHOWN)}", "an object")
    return int(time_ms), event_type, metadata


_constants: list[str] = []  # what the decoder met in the last record that is no number


def _take_constant(name: str) -> float:
    _constants.append(name)
    return float(name)


# Made once: json.loads() builds a new decoder for each call that names parse_constant.
_decoder = json.JSONDecoder(parse_constant=_take_constant)


def _decode(text: str) -> dict[str, Any]:
    """The JSON object that `text` is; fills `_constants`."""
    _constants.clear()
    try:
        # raw_decode() tells where the object ends, so that text after it is named; but it skips no leading space.
        fields, end = _decoder.raw_decode(text, 0 if text.startswith("{") else len(text) - len(text.lstrip(" \t")))
    # ValueError also for integers of thousands of digits, RecursionError for deep nesting.
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(":")[0]
        raise _RecordError(f"broken JSON after {TOKEN.strip()} ({reason})", "one JSON object") from error
    if end != len(text):
        rest = shown(text[end:].strip(), MAX_SHOWN)
        raise _RecordError(f"text after the record: {rest}", "nothing after the object")
    if not isinstance(fields, dict):
        raise _RecordError(f"a JSON {type(fields).__name__}", "one JSON object")
    return fields


def _keys_in(line: bytes) -> frozenset[str]:
    # A guess for the message, of a line that no parser reads: bounded in names and in length.
    return frozenset(key.decode() for key in re.findall(rb'"key": ?"([A-Za-z0-9_]{1,80})"', line[:MAX_RECORD_BYTES]))
