"""Reads a file that is being written: each byte once, whole lines only, through truncation and rotation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

CHUNK_BYTES = 2**20
MAX_LINE_BYTES = 2**20
"""What is longer is no line that anybody wrote on purpose; it is left out."""


class Follower:
    """The lines that a file has gained since the last look.

    The file may not be there yet, may be cut short and begun again, and may be replaced by another one; `restarts` counts
    the times after which what was read before no longer stands in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self.bytes_read = 0
        self._file: BinaryIO | None = None
        self._partial = b""
        self._is_overlong = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def is_there(self) -> bool:
        """Whether the file has been opened."""
        return self._file is not None

    @property
    def unfinished(self) -> bytes:
        """What stands after the last line end: a line that is being written, or the last of a file without one."""
        return b"" if self._is_overlong else self._partial

    def lines(self) -> Iterator[bytes]:
        """The whole lines that have come, without their ends. A file that cannot be read now has gained none."""
        try:
            if self._file is None and not self._open():
                return
            assert self._file is not None
            status = os.fstat(self._file.fileno())
            if status.st_size < self._file.tell():
                self._forget()
                self._file.seek(0)
            yield from self._rest()
            if self._was_replaced(status):
                yield from self._rest()  # what came before it was replaced
                self.close()
                self._forget()
                if self._open():
                    yield from self._rest()
        except OSError:
            return

    def _open(self) -> bool:
        if not self.path.is_file():  # a pipe or a device would hold the reader up
            return False
        self._file = self.path.open("rb", buffering=0)
        return True

    def _was_replaced(self, status: os.stat_result) -> bool:
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return False  # it may come back
        return (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino)

    def _forget(self) -> None:
        self.restarts += 1
        self._partial, self._is_overlong = b"", False

    def _rest(self) -> Iterator[bytes]:
        assert self._file is not None
        while chunk := self._file.read(CHUNK_BYTES):
            self.bytes_read += len(chunk)
            *whole, rest = chunk.split(b"\n")
            for line in whole:
                if not self._is_overlong and len(self._partial) + len(line) <= MAX_LINE_BYTES:
                    yield (self._partial + line).rstrip(b"\r")
                self._partial, self._is_overlong = b"", False
            if self._is_overlong or len(self._partial) + len(rest) > MAX_LINE_BYTES:
                self._partial, self._is_overlong = b"", True
            else:
                self._partial += rest
