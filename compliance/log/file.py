"""Open what holds a log: a file, plain or in gzip by its content, or standard input; bounded, however it is packed.

What cannot be read from any place in it, a pipe or packed data, is copied to a nameless file first: from then on all
logs are read alike, and the size is known.
"""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from compliance.artefact import open_regular

STDIN = Path("-")
"""In place of a path: the log comes on standard input."""

MAX_LOG_BYTES = 256 * 2**20
"""Largest log that is read at all, unpacked: five times what a submission may hold."""

KEEP_APART = "log one run a file, and keep telemetry and other programs' output in other files"
"""Remedy for a log that is too large."""

_GZIP = b"\x1f\x8b"
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class LogFile:
    """A log that is open for reading, at its beginning.

    Attributes:
        size: in bytes, unpacked.
        packed: it was in gzip.
        fault: why it is not to be read, "" when it is.
        remedy: what to do about `fault`.
    """

    file: IO[bytes]
    size: int
    packed: bool = False
    fault: str = ""
    remedy: str = ""


@contextmanager
def open_log(path: Path) -> Iterator[LogFile]:
    """Open the log at `path`, or that on standard input.

    Raises:
        ValueError: the file is missing, or not a regular file; standard input is closed.
        OSError: it cannot be read.
    """
    with tempfile.TemporaryFile() if path == STDIN else open_regular(path) as file:
        if path == STDIN:
            _copy_standard_input(file)
        size = os.fstat(file.fileno()).st_size
        # By its first bytes: names are changed, and logs are packed under their old ones.
        is_packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        # A finding of the log and no exception, so that the other paths of one command are still checked.
        if size > MAX_LOG_BYTES:
            amount = f"more than {MAX_LOG_BYTES >> 20} MiB on standard input"
            fault = _too_much(amount if path == STDIN else f"a file of {size / 2**20:,.1f} MiB")
            yield LogFile(file, size, is_packed, fault, KEEP_APART)
        elif is_packed:
            with tempfile.TemporaryFile() as unpacked:
                yield _unpack(file, unpacked)
        else:
            yield LogFile(file, size)


def _copy_standard_input(copy: IO[bytes]) -> None:
    # Python has no stdin object where descriptor 0 was closed at the start.
    if sys.stdin is None:
        raise ValueError("standard input is closed, expected a log: give its file, or pipe it in")
    _copy(sys.stdin.buffer, copy)


def _unpack(file: IO[bytes], unpacked: IO[bytes]) -> LogFile:
    try:
        # What it unpacks to is not asked of its trailer, which tells the size modulo 4 GiB and may lie: it is counted
        # on the way.
        with gzip.GzipFile(fileobj=file) as source:
            size = _copy(source, unpacked)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:  # EOFError: cut off
        fault = f"gzip data that are damaged or cut off ({error}); expected the whole log"
        return LogFile(unpacked, 0, True, fault, "look at it with `gzip --test`, and copy it again")
    if size > MAX_LOG_BYTES:
        amount = f"{os.fstat(file.fileno()).st_size:,} bytes of gzip, more than {MAX_LOG_BYTES >> 20} MiB when unpacked"
        return LogFile(unpacked, size, True, _too_much(amount), KEEP_APART)
    return LogFile(unpacked, size, True)


def _copy(source: BinaryIO | gzip.GzipFile, copy: IO[bytes]) -> int:
    """Copy a stream, at most one byte more than `MAX_LOG_BYTES` of it, and return how many bytes it were."""
    left = MAX_LOG_BYTES + 1
    while left and (piece := source.read(min(left, _PIECE_BYTES))):
        copy.write(piece)
        left -= len(piece)
    copy.seek(0)
    return MAX_LOG_BYTES + 1 - left


def _too_much(amount: str) -> str:
    return f"{amount}; expected at most {MAX_LOG_BYTES >> 20} MiB to be read at all"
