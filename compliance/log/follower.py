"""Read the lines of a file that a run writes, as far as they are complete."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from compliance.artefact import open_regular

CHUNK_BYTES = 2**20
MAX_LINE_BYTES = 64 * 2**10
"""Maximum length of a line. Longer lines are skipped."""


class Follower:
    """Reader of the lines added to a file since the last call, up to `limit` bytes. The file need not exist yet."""

    def __init__(self, path: Path, limit: int = sys.maxsize) -> None:
        self.path, self._limit = path, limit
        self._bytes_read = 0
        self._partial = b""
        self._is_overlong = False

    def lines(self) -> Iterator[bytes]:
        """Yield the new complete lines, without line ends. An unreadable file has no new lines."""
        # ValueError: the file is missing, or not a regular file.
        with suppress(OSError, ValueError), open_regular(self.path) as file:
            file.seek(self._bytes_read)
            while chunk := file.read(min(CHUNK_BYTES, self._limit - self._bytes_read)):
                self._bytes_read += len(chunk)
                yield from self._split(chunk)

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
