"""Follow a growing file: read each byte once and return only complete lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from compliance.artefact import MAX_FILE_BYTES, open_regular

CHUNK_BYTES = 2**20
MAX_BYTES_A_LOOK = MAX_FILE_BYTES
MAX_LINE_BYTES = 64 * 2**10
"""Maximum length of a line. Longer lines are skipped."""


class Follower(AbstractContextManager["Follower"]):
    """Reader of the lines added to a file since the last call. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self.has_more = False  # whether the last call stopped at `MAX_BYTES_A_LOOK`
        self._file: BinaryIO | None = None
        self._partial = b""
        self._is_overlong = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self) -> Iterator[bytes]:
        """Yield the new complete lines, without line ends. An unreadable file has no new lines."""
        left, self.has_more = MAX_BYTES_A_LOOK, False
        try:
            self._file = self._file or open_regular(self.path)
            while left > 0 and (chunk := self._file.read(CHUNK_BYTES)):
                self.bytes_read += len(chunk)
                left -= len(chunk)
                yield from self._split(chunk)
            self.has_more = left <= 0
        except (OSError, ValueError):  # ValueError: missing, or not a regular file
            return

    def _split(self, chunk: bytes) -> Iterator[bytes]:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            if not self._is_overlong and len(self._partial) + len(line) <= MAX_LINE_BYTES:
                yield (self._partial + line).rstrip(b"\r")
            self._partial, self._is_overlong = b"", False
        self._partial += rest
        if self._is_overlong or len(self._partial) > MAX_LINE_BYTES:
            # Also skip the rest of the overlong line.
            self._partial, self._is_overlong = b"", True
