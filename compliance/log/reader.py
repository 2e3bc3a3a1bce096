"""Read the text log of a run: MLLOG records with their line numbers, and the plain header lines.

A log is an untrusted file. A format error becomes a `Problem` with its line and not an exception, so that one pass reports
all errors. Only an unreadable file raises an exception. The file is read line by line to limit the memory: plain lines are
not stored, a long line takes at most `MAX_LINE_BYTES`, and all records take a multiple of `MAX_RECORD_LINES_BYTES`.
"""

import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from compliance.artefact import MAX_FILE_BYTES, open_regular
from compliance.log import rules
from compliance.log.digest import ChainCheck
from compliance.log.logged_run import LoggedRun
from compliance.log.record import MAX_RECORD_BYTES, TOKEN, Problem, Record, parse_line

STDIN = Path("-")
"""Path that stands for standard input."""

STDIN_NAME = Path("<stdin>")
"""Name in verdicts of a log that was read from standard input."""

MAX_LOG_BYTES = 256 * 2**20
"""Maximum size of a log that is read, before and after unpacking. It is five times the maximum in a submission."""

MAX_LINE_BYTES = 2**20
"""Maximum length of a line that is parsed as a record."""

MAX_RECORD_LINES_BYTES = MAX_FILE_BYTES
"""Maximum total size of record lines. It limits the memory for records. No larger file is allowed in a submission."""

HEAD_BYTES = 64 * 2**10
"""Number of leading bytes from which the format of a file without records is recognised."""

_OTHER_MARKER = re.compile(r":::ML\w{1,20}[-.\w]{0,20}")

MAX_HEADER_LINES = 2_000
MAX_HEADER_BYTES = 2**14
"""Maximum length of a plain line that is parsed as a header line."""


@dataclass
class Log:
    """A parsed log.

    Attributes:
        size: in bytes, after unpacking.
        problems: faults of the lines with the token :::MLLOG.
        header: values by key of the plain lines "# key: value". The first line of a repeated key counts. Empty if the
            log has no records, because such a file may be a link to an arbitrary file, whose lines must not be shown.
        token_lines: number of lines with the token.
        evidence: (line number, bytes) of each line for the official checker. These are the lines with a broken record
            or with a record whose key is in the checker's rule files.
        overlong: whether a line with the token was longer than `MAX_LINE_BYTES`.
        given_up: why the log was not read to its end; "" if it was read completely.
        hint: what a file without records probably is, and what to do; None if unknown.
    """

    path: Path
    size: int = 0
    records: list[Record] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    header: dict[str, str] = field(default_factory=dict)
    token_lines: int = 0
    evidence: list[tuple[int, bytes]] = field(default_factory=list)
    overlong: bool = False
    chain: ChainCheck = field(default_factory=ChainCheck)
    given_up: str = ""
    hint: tuple[str, str] | None = None

    @cached_property
    def by_key(self) -> dict[str, list[Record]]:
        groups: dict[str, list[Record]] = {}
        for record in self.records:
            groups.setdefault(record.key, []).append(record)
        return groups

    def all(self, key: str) -> list[Record]:
        """Return the records of `key` in file order."""
        return self.by_key.get(key, [])

    def missing(self, ruleset: str) -> list[str]:
        """Return the keys without a record that a ruleset requires."""
        # Another finding reports unreadable records, so their keys do not count as missing.
        present = {*self.by_key}.union(*(problem.keys for problem in self.problems))
        return [key for key, rule in rules.KEYS.items() if key not in present and self._is_due(rule, ruleset, present)]

    def _is_due(self, rule: rules.KeyRule, ruleset: str, present: set[str]) -> bool:
        name, _, end = rule.key.partition("_")
        if name == "eval" and end in ("start", "stop"):
            # The rule files accept blocks in place of evaluations, but a log that has only epochs needs evaluation records.
            return not {f"block_{end}", f"eval_{end}"} & present and f"epoch_{end}" in present
        # A log may contain epochs in place of blocks.
        return rule.required_in(ruleset, self.run.division) and rule.key.replace("block", "epoch") not in present

    @cached_property
    def run(self) -> LoggedRun:
        run = LoggedRun(self.header)
        for record in self.records:
            run.add(record)
        return run


def read_log(path: Path) -> Log:
    """Parse a log, which may be `STDIN`, or compressed by gzip if its name ends in .gz.

    Like the official tools, read a file with any other name as plain text. Raises ``ValueError`` if the file is
    missing, not a regular file, or unreadable, or if standard input is a terminal.
    """
    is_piped = path == STDIN
    if is_piped and (sys.stdin is None or sys.stdin.isatty()):
        example = "`zcat result_0.txt.gz | python -m compliance check -`"
        raise ValueError(f"{STDIN}: standard input is a terminal or closed, expected a log, as in {example}")
    log = Log(STDIN_NAME if is_piped else path)
    try:
        with _copied(sys.stdin.buffer) if is_piped else open_regular(path) as file:
            _read(log, file, unpack=is_piped or path.suffix == ".gz")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        log.hint = f"it is compressed by gzip, but damaged ({error})", "copy the file again, or compress the log again"
    except OSError as error:
        raise ValueError(f"{log.path}: cannot be read: {error.strerror}") from error
    if not log.token_lines:
        log.header = {}
    return log


@contextmanager
def _copied(source: IO[bytes] | gzip.GzipFile) -> Iterator[IO[bytes]]:
    """Yield an unnamed file with a copy of a stream, cut a little above `MAX_LOG_BYTES`. No signal leaves it behind."""
    with TemporaryFile() as copy:
        while copy.tell() <= MAX_LOG_BYTES and (piece := source.read(2**20)):
            copy.write(piece)
        copy.seek(0)
        yield copy


def _read(log: Log, file: IO[bytes], *, unpack: bool) -> None:
    log.size = os.fstat(file.fileno()).st_size
    if log.size > MAX_LOG_BYTES:
        log.given_up = f"a file of more than {MAX_LOG_BYTES >> 20} MiB; expected at most {MAX_FILE_BYTES >> 20} MiB"
        return
    head = file.read(HEAD_BYTES)
    file.seek(0)
    if unpack and head.startswith(_GZIP):
        with gzip.GzipFile(fileobj=file) as packed, _copied(packed) as plain:
            _read(log, plain, unpack=False)
        log.given_up = log.given_up and f"after unpacking, {log.given_up}"
        log.hint = log.hint and (f"after unpacking, {log.hint[0]}", log.hint[1])
    elif head[257:262] == b"ustar":  # a tar archive contains plain text, so its files would be read as one log
        log.hint = "it is a tar archive", "unpack it"
    else:
        _read_lines(log, file)
        log.hint = log.hint or (None if log.token_lines else _recognise(head))


def _read_lines(log: Log, file: IO[bytes]) -> None:
    record_bytes = 0
    for number, line in enumerate(_lines(file), start=1):
        if line is None:
            log.token_lines += 1
            log.overlong = True
            found = f"a line of more than {MAX_LINE_BYTES} bytes"
            log.problems.append(Problem(number, found, f"at most {MAX_RECORD_BYTES}"))
            log.chain.take(number, b"")
            continue
        content = line.encode("latin-1")
        if log.chain.take(number, content):
            continue
        if TOKEN not in line:
            take_header(content, log.header)
            if log.hint is None and (marker := _OTHER_MARKER.search(line)):
                found = f"line {number} has the marker {marker[0]}, which the official parser does not read"
                log.hint = found, f"log with mlperf-logging, whose marker is {TOKEN.strip()} with a space after it"
            continue
        record_bytes += len(line)
        if record_bytes > MAX_RECORD_LINES_BYTES:
            log.given_up = f"more than {MAX_RECORD_LINES_BYTES >> 20} MiB of records; expected the records of one run"
            return
        log.token_lines += 1
        record, problems = parse_line(content, number)
        log.problems += problems
        if record:
            log.records.append(record)
        # Leave out records whose keys are not in the rule files, because the official checker ignores them.
        if record is None or record.key in rules.KEYS:
            log.evidence.append((number, content))


def _lines(file: IO[bytes]) -> Iterator[str | None]:
    r"""Yield lines without their ends, decoded and split at \n, \r\n and \r as the official parser does.

    For a line longer than `MAX_LINE_BYTES`, yield None if it contains the token, and otherwise an empty line.
    """
    text = io.TextIOWrapper(file, "latin-1")  # type: ignore[type-var]
    # Limit the length of a read, because a file without line ends would be read whole, as a single line.
    while piece := text.readline(MAX_LINE_BYTES + 1):
        if piece.endswith("\n") or len(piece) <= MAX_LINE_BYTES:
            yield piece.removesuffix("\n")
            continue
        has_token = TOKEN in piece
        while not piece.endswith("\n") and (following := text.readline(MAX_LINE_BYTES)):
            # The token may begin in one piece and end in the next.
            has_token = has_token or TOKEN in piece[-len(TOKEN) :] + following
            piece = following
        yield None if has_token else ""


_GZIP = b"\x1f\x8b"
_COMPRESSED = {
    _GZIP: "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}


def _recognise(head: bytes) -> tuple[str, str] | None:
    """Return what a file without records probably is, judged by its first bytes, and what to do; None if unknown."""
    if not head.strip():
        return "it is empty", "wait for the run, or copy the log again"
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            return f"it is compressed by {name}", "unpack it"
    # Text in UTF-16 begins with a mark. Without it, many zeros show it: every second byte of English text is zero.
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head.count(0) > len(head) // 3:
        return "it is text in UTF-16, as PowerShell writes it", "convert it to UTF-8: `iconv -f UTF-16 -t UTF-8`"
    if head.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{"):
        if re.search(rb'"(submitter|system_name)"\s*:', head):
            remedy = "check the folder that contains systems/: a description is checked with the logs of its system"
            return "it is a system description", remedy
        if b'"event":' in head:
            return "it is a metrics file of a run", "check the result_<n>.txt beside it"
    return None


def take_header(line: bytes, header: dict[str, str]) -> None:
    """Add a plain line "# key: value" to a header of bounded size. Ignore other lines and repeated keys."""
    if not line.startswith(b"# ") or len(header) >= MAX_HEADER_LINES or len(line) > MAX_HEADER_BYTES:
        return
    key, colon, value = line[2:].decode("utf-8", "replace").partition(": ")
    if colon:
        header.setdefault(key.strip(), value.strip())
