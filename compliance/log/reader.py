"""Read the text log of a run: MLLOG records with their file lines, and the plain header lines.

A log is an untrusted file. Everything that the format forbids becomes a `Problem` with its line instead of an
exception, so that one reading reports all of them; only a file that cannot be read at all raises. The file is read
once, line by line: a long log of plain lines needs no memory, a long line no more than `MAX_LINE_BYTES`, and records no
more than some times `MAX_RECORD_LINES_BYTES`.
"""

from __future__ import annotations

import codecs
import gc
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

from compliance.artefact import MAX_FILE_BYTES
from compliance.log import rules
from compliance.log.digest import ChainCheck
from compliance.log.file import KEEP_APART, MAX_LOG_BYTES, open_log
from compliance.log.record import MAX_RECORD_BYTES, TOKEN, TOKEN_BYTES, Problem, Record, parse_line
from compliance.log.run import LoggedRun

MAX_LINE_BYTES = 2**20
"""Longest line that is read as a record."""

MAX_RECORD_LINES_BYTES = MAX_FILE_BYTES
"""Maximum bytes of lines with records: more do not fit into a submission, and in memory they are larger."""

MAX_HEADER_LINES = 10_000
MAX_HEADER_BYTES = 2**16
"""Longest plain line that is read as one of the head."""


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

    @cached_property
    def run(self) -> LoggedRun:
        """The run as the log tells it."""
        run = LoggedRun(self.header)
        for record in self.records:
            run.add(record)
        return run


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
                if TOKEN_BYTES not in line:
                    if line.startswith(b"# ") and not (line.startswith(b"# digest") and chain.take(number, line)):
                        _take_header(line, header)
                    continue
                record_bytes += len(line)
                if record_bytes > MAX_RECORD_LINES_BYTES:
                    given_up = f"more than {MAX_RECORD_LINES_BYTES >> 20} MiB of records; expected those of one run"
                    remedy = KEEP_APART
                    break
                token_lines += 1
                if line is _OVERLONG:  # by identity: a line may spell the same
                    overlong = True
                    found = f"a line of more than {MAX_LINE_BYTES} bytes"
                    problems.append(Problem(number, found, f"at most {MAX_RECORD_BYTES}"))
                    # Not into the evidence: the official checker is not asked about such a log at all.
                    continue
                record, wrong = parse_line(line, number)
                problems += wrong
                if record:
                    records.append(record)
                evidence.add(number, line, record, bool(wrong))
            # Letters of UTF-16 have a zero byte beside them, so the token is in none of its lines.
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
    """Tell whether a file without a record that can be read holds one in UTF-16, or opens as such text does."""
    file.seek(0)
    begin = file.read(MAX_LINE_BYTES)
    return begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or any(
        TOKEN.encode(encoding) in begin for encoding in ("utf-16-le", "utf-16-be")
    )


@contextmanager
def _without_cycle_search() -> Iterator[None]:
    """Stop the search for reference cycles: records hold none, but set it off by their number, for a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _take_header(line: bytes, header: dict[str, str]) -> None:
    # Somebody's text, which may be as much as a log may hold.
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
    # readline() with a bound: a file without line ends would otherwise come as a single line.
    while left > 0 and (piece := file.readline(MAX_LINE_BYTES)):
        left -= len(piece)
        # The fast way for nearly every line, without a copy and a search for other line ends.
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
            has_token = bool(has_token) or TOKEN_BYTES in begun
            begun = begun[1 - len(TOKEN_BYTES) :]  # the token may lie across two pieces
        if held:
            begun += b"\r"
    if begun or has_token is not None:
        line = begun.removesuffix(b"\r")
        yield line if has_token is None and len(line) <= MAX_LINE_BYTES else _left_out(line, has_token)


def _left_out(end: bytes, has_token: bool | None) -> bytes:
    return _OVERLONG if has_token or TOKEN_BYTES in end else b""


_OVERLONG = TOKEN_BYTES + b"..."
_LINE_END = re.compile(rb"\r\n|\n|\r")
# Begins with 1 to 9, so that a zero stays a zero.
_NUMBER = re.compile(rb"[1-9][0-9]*")


class _Evidence:
    """The lines that decide the official checker's verdict.

    It skips records with keys that no rule file names. Of the others it gets all, up to a number that no run logs; of
    further ones that repeat inside the run, one of each kind: its time is some tens of microseconds a record, and its
    conditions tell apart which fields there are, signs, zeros, and whether an accuracy reaches the target.
    """

    MAX_REPEATS = 5000
    # The names in weights_initialization count one by one, so none of those is left out.
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
            # Lines that differ in numbers alone are of one kind; zeros and signs are told apart.
            kind = (_NUMBER.sub(b"1", line), reached, self._counts["run_start"] > 0)
            if kind in self._kinds:
                self.left_out[key] += 1
                return
            self._kinds.add(kind)
        self.lines.append((number, line))
