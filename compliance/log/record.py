"""Parse a log line with the token :::MLLOG into a record and the faults of the line.

Every line that the official parser accepts becomes a `Record`. The official parser decodes latin-1, cuts a line at its
last token, strips it, and requires a JSON object with time_ms, key, value and metadata. Every fault becomes a `Problem`.
"""

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
"""Maximum length of a record. The official parser takes 0.1 s for it. Twice the length takes four times as long."""

MAX_SHOWN = 60
"""Maximum number of characters that a message shows of a wrong field."""


class Record(NamedTuple):
    """An MLLOG record. `line` counts the lines of the file from 1, and `time_ms` milliseconds since the Unix epoch."""

    line: int
    time_ms: int
    event_type: str
    key: str
    value: Any
    metadata: dict[str, Any]

    @property
    def logged_at(self) -> str | None:
        """Source position "file:lineno" of the call that logged the record, if it is known."""
        file, lineno = self.metadata.get("file"), self.metadata.get("lineno")
        known = isinstance(file, str) and file.isprintable() and rules.is_integer(lineno)
        return f"{file}:{lineno}" if known else None


class Problem(NamedTuple):
    """Fault in a log line that contains the token ``:::MLLOG``.

    `keys` has the keys in the line, as far as they can be recognised. `severity` is "error" if a record of the line is
    lost or unreadable, and "warning" otherwise.
    """

    line: int
    found: str
    expected: str
    keys: frozenset[str] = frozenset()
    severity: Severity = "error"


class _RecordError(Exception):
    """Raised for a line that is not a record. Its two arguments describe what was found and what was expected."""


def parse_line(line: bytes, number: int) -> tuple[Record | None, list[Problem]]:
    """Parse a line that contains the token ":::MLLOG". Return its record, if it has a readable one, and its faults.

    `line` is given without its line end, and `number` counts lines from 1.
    """
    problems: list[Problem] = []
    # If a line has several records, the official parser reads only the last one.
    start = line.rindex(TOKEN_BYTES)
    if line.find(TOKEN_BYTES) != start:
        keys = _keys_in(line[:start])
        lost = f": a parser loses the first{' (' + ', '.join(sorted(keys)) + ')' if keys else ''}"
        found = f"{line.count(TOKEN_BYTES)} records on one line{lost}"
        problems.append(Problem(number, found, "one record a line: write each with one write()", keys))
    if len(line) > MAX_RECORD_BYTES:
        found = f"a record of {len(line)} bytes: the official parser needs time quadratic in its length"
        problems.append(Problem(number, found, f"at most {MAX_RECORD_BYTES}", severity="warning"))
    try:
        return _parse_record(line[start + len(TOKEN_BYTES) :], number, problems), problems
    except _RecordError as error:
        found, expected = error.args
        # If even the last record is unreadable, the keys of all records in the line are lost.
        glued = [problem._replace(keys=_keys_in(line)) for problem in problems if problem.severity == "error"]
        return None, glued or [Problem(number, found, expected, _keys_in(line))]


def _parse_record(content: bytes, number: int, problems: list[Problem]) -> Record:
    """Return the record in the bytes after the token. Append the faults of a readable record to `problems`."""

    def warn(found: str, expected: str) -> None:
        problems.append(Problem(number, found, expected, severity="warning"))

    # Decode and strip as the official parser does. str.rstrip() also strips the latin-1 spaces 0x85 and 0xA0.
    text = content.decode("latin-1").rstrip()
    if not text.isascii():
        try:
            text = text.encode("latin-1").decode("utf-8")
        except UnicodeDecodeError:
            warn("bytes that are not UTF-8", "UTF-8 text")
    fields = _decode(text)
    if _constants:
        warn(f"the value {_constants[0]}", "finite numbers: JSON has no NaN and no infinity")
    if missing := [name for name in ("time_ms", "key", "value", "metadata") if name not in fields]:
        expected = "time_ms, event_type, key, value and metadata"
        raise _RecordError(f"a record without {', '.join(missing)}", expected)
    time_ms, key, metadata = fields["time_ms"], fields["key"], fields["metadata"]
    # Only warn of a wrong event_type, because the official parser ignores it.
    event_type = fields.get("event_type")
    if not isinstance(key, str):
        raise _RecordError(f"key {shown(key, MAX_SHOWN)}", "text")
    expected = "an integer: milliseconds since the Unix epoch"
    if not rules.is_number(time_ms):
        raise _RecordError(f"time_ms {shown(time_ms, MAX_SHOWN)}", expected)
    if not isinstance(time_ms, int):
        warn(f"time_ms {shown(time_ms, MAX_SHOWN)}", expected)
    if event_type not in EVENT_TYPES:
        warn(f"event_type {shown(event_type, MAX_SHOWN)}", " or ".join(EVENT_TYPES))
        event_type = ""  # `_grade` in compliance/check/grades.py skips an empty event_type, as it is reported here
    if metadata is None:
        warn("metadata null", "an object")
        metadata = {}
    if not isinstance(metadata, dict):
        raise _RecordError(f"metadata {shown(metadata, MAX_SHOWN)}", "an object")
    # Intern strings to save memory, because names and source files repeat in every record.
    metadata = {intern(name): intern(value) if type(value) is str else value for name, value in metadata.items()}
    return Record(number, int(time_ms), intern(event_type), intern(key), fields["value"], metadata)


_constants: list[str] = []  # NaN and infinities in the record decoded last


def _take_constant(name: str) -> float:
    _constants.append(name)
    return float(name)


# Build the decoder once: json.loads() with parse_constant would build a new one for each call.
_decoder = json.JSONDecoder(parse_constant=_take_constant)


def _decode(text: str) -> dict[str, Any]:
    """Decode `text` as a JSON object. NaN and infinities in it are collected in `_constants`."""
    _constants.clear()
    try:
        # raw_decode() returns the end of the object, so that text after it can be reported. Begin after the leading space.
        fields, end = _decoder.raw_decode(text, len(text) - len(text.lstrip(" \t")))
    # Integers of thousands of digits raise ValueError, and deep nesting raises RecursionError.
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(":")[0]
        broken = f"broken JSON after {TOKEN.strip()} ({reason})", "one JSON object"
        raise _RecordError(*_foreign_record(text.lstrip()) or broken) from error
    if end != len(text):
        rest = shown(text[end:].strip(), MAX_SHOWN)
        raise _RecordError(f"text after the record: {rest}", "nothing after the object")
    if not isinstance(fields, dict):
        raise _RecordError(f"a JSON {type(fields).__name__}", "one JSON object")
    return fields


def _foreign_record(text: str) -> tuple[str, str] | None:
    """Return what was found and what was expected if `text` is a known format other than JSON; None for other text."""
    if text.startswith('{\\"'):
        return "a record inside a JSON string", "the line as the run printed it: container logs need `jq -r .log`"
    if text.startswith("{'"):
        return "a Python dictionary", "JSON: write records with json.dumps or the logger of mlperf-logging"
    return None


# Matches a key in JSON, in a Python dictionary, or in JSON inside a JSON string.
_KEY = re.compile(rb"""\\?["']key\\?["']: ?\\?["']([A-Za-z0-9_]{1,80})\\?["']""")


def _keys_in(line: bytes) -> frozenset[str]:
    # Find keys for the message about an unparsable line. The names and the searched length are bounded.
    return frozenset(key.decode() for key in _KEY.findall(line[:MAX_RECORD_BYTES]))
