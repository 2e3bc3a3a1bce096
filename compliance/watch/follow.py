"""Read a file that is being written: each byte once, whole lines only, through truncation and rotation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from compliance.artefact import MAX_FILE_BYTES, open_regular

CHUNK_BYTES = 2**20
MAX_BYTES_A_LOOK = MAX_FILE_BYTES
MAX_LINE_BYTES = 2**20
"""Longest line that is read; a longer one was not written on purpose, and is left out."""


class Follower(AbstractContextManager["Follower"]):
    """The lines that a file has gained since the last look.

    The file may not be there yet, may be cut short and begun again, and may be replaced by another one; `restarts` counts
    the times after which what was read before no longer stands in it. A look reads at most `MAX_BYTES_A_LOOK`, and
    `has_more` says whether it ended there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self.bytes_read = 0
        self.has_more = False
        self._file: BinaryIO | None = None
        self._partial = b""
        self._is_overlong = False
        self._left = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def unfinished(self) -> bytes:
        """Return what stands after the last line end: a line that is being written, or the last of a file without one."""
        return b"" if self._is_overlong else self._partial

    def lines(self) -> Iterator[bytes]:
        """The whole lines that have come, without their ends. A file that cannot be read now has gained none."""
        self._left, self.has_more = MAX_BYTES_A_LOOK, False
        try:
            if self._file is None and not self._open():
                return
            assert self._file is not None
            status = os.fstat(self._file.fileno())
            # Cut short, and begun again in place.
            if status.st_size < self._file.tell():
                self._forget()
                self._file.seek(0)
            yield from self._rest()
            # What is behind the bound of this look still belongs to the file that is open.
            if not self.has_more and self._was_replaced(status):
                yield from self._rest()  # what came before it was replaced
                self.close()
                self._forget()
                if self._open():
                    yield from self._rest()
        except OSError:
            return

    def _open(self) -> bool:
        try:
            self._file = open_regular(self.path)
        except ValueError:  # not there, or a pipe or a device, which would hold the reader up
            return False
        return True

    def _was_replaced(self, status: os.stat_result) -> bool:
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return False  # it may come back
        # By device and inode: the name stays when a log is rotated.
        return (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino)

    def _forget(self) -> None:
        self.restarts += 1
        self._partial, self._is_overlong = b"", False

    def _rest(self) -> Iterator[bytes]:
        assert self._file is not None
        while self._left > 0 and (chunk := self._file.read(CHUNK_BYTES)):
            self.bytes_read += len(chunk)
            self._left -= len(chunk)
            *whole, rest = chunk.split(b"\n")
            for line in whole:
                if not self._is_overlong and len(self._partial) + len(line) <= MAX_LINE_BYTES:
                    yield (self._partial + line).rstrip(b"\r")  # with the line ends of another system
                self._partial, self._is_overlong = b"", False
            if self._is_overlong or len(self._partial) + len(rest) > MAX_LINE_BYTES:
                # Remembered, so that what follows up to the next line end is left out as well.
                self._partial, self._is_overlong = b"", True
            else:
                self._partial += rest
        self.has_more = self._left <= 0
