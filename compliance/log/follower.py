"""Read the complete lines of a file while a run is still writing it."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from compliance.artefact import open_regular

MAX_LINE_BYTES = 64 * 2**10
"""Maximum length of a line. Longer lines are skipped."""


class Follower:
    """Reader of a growing file, up to its first `limit` bytes. The file need not exist yet."""

    def __init__(self, path: Path, limit: int = sys.maxsize) -> None:
        self.path, self._limit = path, limit
        self._bytes_read = 0
        self._is_inside = False  # whether the next byte continues an overlong line

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines added since the last call, without line ends. An unreadable file has no new lines."""
        # open_regular() raises ValueError if the file is missing or not a regular file.
        with suppress(OSError, ValueError), open_regular(self.path) as file:
            file.seek(self._bytes_read)
            # Limit the length of a read, because a file without line ends would be read whole, as a single line.
            while self._bytes_read < self._limit and (piece := file.readline(MAX_LINE_BYTES)):
                is_end = piece.endswith(b"\n")
                if not is_end and len(piece) < MAX_LINE_BYTES:
                    return  # the line is still being written: read it again at the next call
                self._bytes_read += len(piece)
                if is_end and not self._is_inside:
                    yield piece[:-1].rstrip(b"\r")
                self._is_inside = not is_end
