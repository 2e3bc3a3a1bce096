"""Reads the text log of a run: MLLOG records with their file lines, and the plain header lines.

A log is an untrusted file. Everything that the format forbids becomes a `Problem` with its line instead of an
exception, so that one reading reports all of them; only a file that cannot be read at all raises. The file is read
once, line by line: a long log of plain lines needs no memory, a long line no more than `MAX_LINE_BYTES`, and records no
more than some times `MAX_RECORD_LINES_BYTES`.

What the official parser takes for a record is one here too. It decodes latin-1, cuts a line at its last token, strips it,
and wants a JSON object with time_ms, key, value and metadata; whatever goes beyond that is a `Problem` beside the record.
"""

from __future__ import annotations

import codecs
import gc
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from sys import intern
from typing import IO, Any, NamedTuple

from compliance.artefact import MAX_FILE_BYTES
from compliance.log import rules
from compliance.log.digest import ChainCheck
from compliance.log.file import KEEP_APART, MAX_LOG_BYTES, open_log
from compliance.log.findings import Severity

TOKEN = ":::MLLOG "
EVENT_TYPES = ("POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END")

MAX_LINE_BYTES = 2**20
"""Longest line that is read as a record."""

MAX_RECORD_BYTES = 16 * 2**10
"""Longest sensible record: the official parser needs a tenth of a second for it, and quadratic time for longer ones."""

MAX_RECORD_LINES_BYTES = MAX_FILE_BYTES
"""Most bytes of lines with records that are read: more do not fit into a submission, and in memory they are larger."""

MAX_HEADER_LINES = 10_000
MAX_HEADER_BYTES = 2**16
"""Longest plain line that is read as one of the head."""

_TOKEN = TOKEN.encode()


class Record(NamedTuple):
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
        known = isinstance(file, str) and file.isprintable() and rules.is_integer(lineno)
        return f"{file}:{lineno}" if known else None


class Problem(NamedTuple):
    """Something wrong with a line that holds the token, beyond what the record says.

    Attributes:
        keys: the keys that the line names, as far as can be told.
        severity: "error" when a record is lost or no parser could read it.
    """

    line: int
    found: str
    expected: str
    keys: frozenset[str] = frozenset()
    severity: Severity = "error"


@dataclass(frozen=True)
class Log:
    """A parsed log.

    Attributes:
        size: of the log in bytes, unpacked.
        records: in file order.
        problems: what was wrong with the lines that hold the token.
        header: "key" to "value" of the plain lines "# key: value"; of a repeated key the first. Empty without records: then
            it may be any file, behind a link, whose lines are nobody's business.
        token_lines: number of lines that hold the token.
        evidence: (line, bytes) of what the official checker has to see: see `_Evidence`.
        left_out: how many records of each key `evidence` leaves out as more of the same.
        overlong: a line with the token was longer than `MAX_LINE_BYTES`.
        chain: what its digests say.
        packed: it was in gzip, which the official tools do not read.
        given_up: why the log was not read to its end, so that records are missing; "" when it was.
        remedy: what to do about `given_up`.
    """

    path: Path
    size: int
    records: tuple[Record, ...]
    problems: tuple[Problem, ...]
    header: dict[str, str]
    token_lines: int
    evidence: tuple[tuple[int, bytes], ...]
    left_out: dict[str, int]
    overlong: bool
    chain: ChainCheck
    packed: bool = False
    given_up: str = ""
    remedy: str = ""

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
    """Parse the log at `path`, plain or in gzip; "-" is standard input.

    Raises:
        ValueError: the file is missing, not a regular file, or unreadable; standard input is closed.
    """
    records: list[Record] = []
    problems: list[Problem] = []
    header: dict[str, str] = {}
    evidence, chain = _Evidence(), ChainCheck()
    token_lines = record_bytes = 0
    overlong = False
    try:
        with open_log(path) as source, _without_cycle_search():
            given_up, remedy = source.fault, source.remedy
            for number, line in enumerate(() if given_up else _lines(source.file), start=1):
                if number == 1:
                    chain.open(line)
                if chain.opened and chain.take(number, line):
                    continue
                if _TOKEN not in line:
                    if line.startswith(b"# ") and not (line.startswith(b"# digest") and chain.take(number, line)):
                        _take_header(line, header)
                    continue
                record_bytes += len(line)
                if record_bytes > MAX_RECORD_LINES_BYTES:
                    given_up = f"more than {MAX_RECORD_LINES_BYTES >> 20} MiB of records; expected those of one run"
                    remedy = KEEP_APART
                    break
                token_lines += 1
                if line is _OVERLONG:
                    overlong = True
                    found = f"a line of more than {MAX_LINE_BYTES} bytes"
                    problems.append(Problem(number, found, f"at most {MAX_RECORD_BYTES}"))
                    continue
                record, wrong = parse_line(line, number)
                problems += wrong
                if record:
                    records.append(record)
                evidence.add(number, line, record, bool(wrong))
            if not token_lines and not given_up and _is_utf_16(source.file):
                given_up, remedy = "the file is UTF-16 text; expected UTF-8", "convert it: `iconv -f UTF-16 -t UTF-8`"
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    return Log(
        path,
        source.size,
        tuple(records),
        tuple(problems),
        header if token_lines else {},
        token_lines,
        tuple(evidence.lines),
        dict(evidence.left_out),
        overlong,
        chain,
        source.packed,
        given_up,
        remedy,
    )


def _is_utf_16(file: IO[bytes]) -> bool:
    """Whether a file without a record that can be read holds one in UTF-16, or opens as such text does."""
    file.seek(0)
    begin = file.read(MAX_LINE_BYTES)
    return begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or any(
        TOKEN.encode(encoding) in begin for encoding in ("utf-16-le", "utf-16-be")
    )


@contextmanager
def _without_cycle_search() -> Iterator[None]:
    """Records hold no reference cycles; the search for them, set off by their number, takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_line(line: bytes, number: int) -> tuple[Record | None, list[Problem]]:
    """The record on a line that holds the token, and what is wrong with the line.

    Args:
        line: without its end.
        number: line in the file, from 1.
    """
    problems: list[Problem] = []
    start = line.rindex(_TOKEN)
    if line.find(_TOKEN) != start:
        keys = _keys_in(line[:start])
        count = line.count(_TOKEN)
        lost = f": a parser loses the first{' (' + ', '.join(sorted(keys)) + ')' if keys else ''}"
        expected = "one record a line: write each with one write()"
        problems.append(Problem(number, f"{count} records on one line{lost}", expected, keys))
    if len(line) > MAX_RECORD_BYTES:
        found = f"a record of {len(line)} bytes: the official parser needs time quadratic in its length"
        problems.append(Problem(number, found, f"at most {MAX_RECORD_BYTES}", severity="warning"))
    try:
        return _parse_record(line[start + len(_TOKEN) :], number, problems), problems
    except _RecordError as error:
        found, expected = error.args
        glued = [problem._replace(keys=_keys_in(line)) for problem in problems if problem.severity == "error"]
        return None, glued or [Problem(number, found, expected, _keys_in(line))]


def _parse_record(content: bytes, number: int, problems: list[Problem]) -> Record:
    """The record in what follows the token; adds the problems that leave it readable."""
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
    event_type = fields.get("event_type")
    if not isinstance(key, str):
        raise _RecordError(f"key {_shorten(ascii(key))}", "text")
    if metadata.__class__ is dict:
        metadata = {
            intern(name): intern(value) if value.__class__ is str else value for name, value in metadata.items()
        }
    is_plain = type(time_ms) is int and 0 <= time_ms < 2**63 and type(metadata) is dict
    if not is_plain or event_type not in EVENT_TYPES:
        time_ms, event_type, metadata = _corrected_fields(time_ms, event_type, metadata, number, problems)
    return Record(number, time_ms, intern(event_type), intern(key), value, metadata)


def _corrected_fields(
    time_ms: Any, event_type: Any, metadata: Any, number: int, problems: list[Problem]
) -> tuple[int, str, dict[str, Any]]:
    """The fields as they are meant, where others' loggers write them differently; adds what is wrong with them."""

    def note(name: str, value: Any, expected: str) -> None:
        problems.append(Problem(number, f"{name} {_shorten(ascii(value))}", expected, severity="warning"))

    expected = "an integer: milliseconds since the Unix epoch"
    if not rules.is_number(time_ms):
        raise _RecordError(f"time_ms {_shorten(ascii(time_ms))}", expected)
    if not isinstance(time_ms, int):
        note("time_ms", time_ms, expected)
    if event_type not in EVENT_TYPES:
        note("event_type", event_type, " or ".join(EVENT_TYPES))
        event_type = ""
    if metadata is None:
        note("metadata", metadata, "an object")
        metadata = {}
    if not isinstance(metadata, dict):
        raise _RecordError(f"metadata {_shorten(ascii(metadata))}", "an object")
    return int(time_ms), event_type, metadata


_constants: list[str] = []  # what the decoder met in the last record that is no number


def _take_constant(name: str) -> float:
    _constants.append(name)
    return float(name)


_decoder = json.JSONDecoder(parse_constant=_take_constant)


def _decode(text: str) -> dict[str, Any]:
    """The JSON object that `text` is; fills `_constants`."""
    _constants.clear()
    try:
        fields, end = _decoder.raw_decode(text, 0 if text.startswith("{") else len(text) - len(text.lstrip(" \t")))
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(":")[0]
        raise _RecordError(f"broken JSON after {TOKEN.strip()} ({reason})", "one JSON object") from error
    if end != len(text):
        raise _RecordError(f"text after the record: {_shorten(ascii(text[end:].strip()))}", "nothing after the object")
    if not isinstance(fields, dict):
        raise _RecordError(f"a JSON {type(fields).__name__}", "one JSON object")
    return fields


def _keys_in(line: bytes) -> frozenset[str]:
    return frozenset(key.decode() for key in re.findall(rb'"key": ?"([A-Za-z0-9_]{1,80})"', line[:MAX_RECORD_BYTES]))


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _take_header(line: bytes, header: dict[str, str]) -> None:
    if len(header) >= MAX_HEADER_LINES or len(line) > MAX_HEADER_BYTES:
        return
    key, colon, value = line[2:].decode("utf-8", "replace").partition(": ")
    if colon:
        header.setdefault(key.strip(), value.strip())


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    r"""Lines without their ends; \n, \r\n and \r end a line, as for the official parser, and nothing else does.

    A line longer than `MAX_LINE_BYTES` comes as `_OVERLONG` if it holds the token, and otherwise empty.
    """
    begun = b""  # of a line that goes on in the next piece
    has_token: bool | None = None  # in what had to be left out of `begun`; None when nothing had to
    left = MAX_LOG_BYTES  # of a log that grows meanwhile
    while left > 0 and (piece := file.readline(MAX_LINE_BYTES)):
        left -= len(piece)
        if piece.endswith(b"\n") and b"\r" not in piece and not begun and has_token is None:
            yield piece[:-1]
            continue
        text = begun + piece
        held = text.endswith(b"\r")  # its \n may follow
        *whole, begun = _LINE_END.split(text[:-1] if held else text)
        for line in whole:
            yield line if has_token is None and len(line) <= MAX_LINE_BYTES else _left_out(line, has_token)
            has_token = None
        if len(begun) > MAX_LINE_BYTES:
            has_token = bool(has_token) or _TOKEN in begun
            begun = begun[1 - len(_TOKEN) :]  # the token may lie across two pieces
        if held:
            begun += b"\r"
    if begun or has_token is not None:
        line = begun.removesuffix(b"\r")
        yield line if has_token is None and len(line) <= MAX_LINE_BYTES else _left_out(line, has_token)


def _left_out(end: bytes, has_token: bool | None) -> bytes:
    return _OVERLONG if has_token or _TOKEN in end else b""


_OVERLONG = TOKEN.encode() + b"..."
_LINE_END = re.compile(rb"\r\n|\n|\r")
_NUMBER = re.compile(rb"[1-9][0-9]*")


class _Evidence:
    """The lines that decide the official checker's verdict.

    It skips records with keys that no rule file names. Of the others it gets all, up to a number that no run logs; of
    further ones that repeat inside the run, one of each kind: its time is some tens of microseconds a record, and its
    conditions tell apart which fields there are, signs, zeros, and whether an accuracy reaches the target.
    """

    MAX_REPEATS = 5000
    THINNED = frozenset(
        {"cache_clear", "eval_accuracy"}
        | {f"{name}_{end}" for name in ("epoch", "block", "eval") for end in ("start", "stop")}
    )

    def __init__(self) -> None:
        self.lines: list[tuple[int, bytes]] = []
        self.left_out: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._kinds: set[object] = set()

    def add(self, number: int, line: bytes, record: Record | None, is_odd: bool) -> None:
        """Take in a line with the token and the record read from it."""
        key = record.key if record else ""
        if record and key not in rules.KEYS:
            return
        self._counts[key] += 1
        if record and key in self.THINNED and not is_odd and self._counts[key] > self.MAX_REPEATS:
            value = record.value
            reached = value >= rules.QUALITY_TARGET if rules.is_number(value) else None
            kind = (_NUMBER.sub(b"1", line), reached, self._counts["run_start"] > 0)
            if kind in self._kinds:
                self.left_out[key] += 1
                return
            self._kinds.add(kind)
        self.lines.append((number, line))
