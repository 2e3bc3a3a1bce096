"""Reads the text log of a run: MLLOG records with their file lines, and the plain header lines.

A log is an untrusted file. Everything that the format forbids becomes a `Problem` with its line instead of an
exception, so that one reading reports all of them; only a file that cannot be read as a log at all raises.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from compliance.artefact import read_bounded
from compliance.rules import is_integer

TOKEN = ":::MLLOG "
FIELDS = ("time_ms", "event_type", "key", "value", "metadata")
EVENT_TYPES = ("POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END")

MAX_RECORD_CHARACTERS = 16 * 2**10
"""Longest line with a record; the official parser needs quadratic time in it."""


@dataclass(frozen=True)
class Record:
    """One MLLOG record.

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
        known = isinstance(file, str) and file.isprintable() and is_integer(lineno)
        return f"{file}:{lineno}" if known else None


@dataclass(frozen=True)
class Problem:
    """A line that is not a proper record.

    Attributes:
        keys: the keys that the line names, as far as can be told.
    """

    line: int
    found: str
    expected: str
    keys: frozenset[str]


@dataclass(frozen=True)
class Log:
    """A parsed log.

    Attributes:
        records: the well-formed records in file order.
        problems: what was wrong with the other lines that hold the token.
        header: "key" to "value" of the plain lines "# key: value"; of a repeated key the first.
        token_lines: file lines that hold the token, well-formed or not: the official checker counts these, from 0.
    """

    path: Path
    records: tuple[Record, ...]
    problems: tuple[Problem, ...]
    header: dict[str, str]
    token_lines: tuple[int, ...]

    @cached_property
    def by_key(self) -> dict[str, list[Record]]:
        """The records of each key that the log holds, in file order."""
        groups: dict[str, list[Record]] = {}
        for record in self.records:
            groups.setdefault(record.key, []).append(record)
        return groups

    def all(self, key: str) -> list[Record]:
        """The records of `key` in file order."""
        return self.by_key.get(key, [])

    def first(self, key: str) -> Record | None:
        """The first record of `key`."""
        return next(iter(self.all(key)), None)

    def last(self, key: str) -> Record | None:
        """The last record of `key`."""
        return next(reversed(self.all(key)), None)


class _RecordError(Exception):
    """A line that is not a record: (found, expected)."""


def read_log(path: Path) -> Log:
    """Parse the log at `path`.

    Raises:
        ValueError: the file is missing, not a regular file, unreadable, or larger than a submission may hold.
    """
    records: list[Record] = []
    problems: list[Problem] = []
    header: dict[str, str] = {}
    token_lines: list[int] = []
    for number, line in enumerate(_lines(path), start=1):
        if TOKEN not in line:
            if line.startswith("# ") and ": " in line:
                key, _, value = line[2:].partition(": ")
                header.setdefault(key.strip(), value.strip())
            continue
        token_lines.append(number)
        try:
            records.append(_parse_record(line, number))
        except _RecordError as error:
            keys = re.findall(r'"key": *"(\w+)"', line)
            problems.append(Problem(number, *error.args, keys=frozenset(keys)))
    return Log(path, tuple(records), tuple(problems), header, tuple(token_lines))


def _lines(path: Path) -> Iterator[str]:
    r"""Lines without their ends; \n, \r\n and \r end a line, as for the official parser, and nothing else does."""
    with io.TextIOWrapper(io.BytesIO(read_bounded(path)), encoding="utf-8", errors="replace") as text:
        for line in text:
            yield line.rstrip("\n")


def _parse_record(line: str, number: int) -> Record:
    if len(line) > MAX_RECORD_CHARACTERS:
        raise _RecordError(f"a line of {len(line)} characters", f"at most {MAX_RECORD_CHARACTERS}")
    if line.count(TOKEN) > 1:
        raise _RecordError(f"{line.count(TOKEN)} records on one line", "one record a line: write each with one write()")
    fields = _decode(line[line.index(TOKEN) + len(TOKEN) :].lstrip())
    missing = [name for name in FIELDS if name not in fields]
    if missing:
        raise _RecordError(f"a record without {', '.join(missing)}", "a record with " + ", ".join(FIELDS))
    if not is_integer(fields["time_ms"]):
        raise _RecordError(f"time_ms {fields['time_ms']!r}", "an integer: milliseconds since the Unix epoch")
    if fields["event_type"] not in EVENT_TYPES:
        raise _RecordError(f"event_type {fields['event_type']!r}", " or ".join(EVENT_TYPES))
    if not isinstance(fields["key"], str):
        raise _RecordError(f"key {fields['key']!r}", "text")
    if not isinstance(fields["metadata"], dict):
        raise _RecordError(f"metadata {fields['metadata']!r}", "an object")
    return Record(number, *(fields[name] for name in FIELDS))


def _decode(text: str) -> dict[str, Any]:
    def reject_constant(name: str) -> NoReturn:
        raise _RecordError(f"the value {name}", "a finite number: JSON has no NaN and no infinity")

    try:
        fields, end = json.JSONDecoder(parse_constant=reject_constant).raw_decode(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise _RecordError(f"broken JSON after {TOKEN.strip()} ({reason})", "one JSON object") from error
    if text[end:].strip():
        raise _RecordError(f"text after the record: {_shorten(text[end:].strip())!r}", "nothing after the JSON object")
    if not isinstance(fields, dict):
        raise _RecordError(f"a JSON {type(fields).__name__}", "one JSON object")
    return fields


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
