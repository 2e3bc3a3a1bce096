"""The result file: whole lines, flushed at once, with the chain of digests over all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from compliance.log import digest


class ResultExists(ValueError):  # noqa: N818 - it names what was found
    """The result file exists already. It was not touched."""


class LineFile:
    """Writer of the lines of a result file, which must not be there yet."""

    def __init__(self, path: Path) -> None:
        self._file = _create(path)
        self._chain = digest.Chain()

    @property
    def next_line(self) -> int:
        """Number of the next line, from 1. The first line of the file opens the chain."""
        return (self._chain.lines or 1) + 1

    def write(self, text: str) -> None:
        """Write one line, and a digest when one is due."""
        # A file name that is no UTF-8 must not end the run that logs it.
        line = text.encode("utf-8", "backslashreplace")
        lines = [line] if self._chain.lines else [digest.OPENING.encode(), line]
        for each in lines:
            self._chain.add(each)
        self._write(b"".join(each + b"\n" for each in lines))
        if self._chain.pending >= digest.LINES_A_DIGEST:
            self.close_stretch()

    def close_stretch(self, *, at_end: bool = False) -> None:
        """Write the digest over all lines so far."""
        self._write(self._chain.close_stretch(at_end) + b"\n")

    def close(self) -> None:
        """Write the digest at the end, write the file to the disk and close it, unless it is closed."""
        if self._file.closed:
            return
        try:
            if self._chain.lines:
                self.close_stretch(at_end=True)
            # Only at the end: during the timed run each line would wait for the disk.
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _write(self, content: bytes) -> None:
        try:
            # Flushed at once, so that readers of a growing log, or of a killed run's log, find whole lines.
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from None


def _create(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Atomic: of runs that start at the same time, one gets the number.
        return path.open("xb")
    except OSError as error:
        if isinstance(error, FileExistsError) and path.parent.is_dir():
            raise ResultExists(
                f"{path} is already there and a result is never overwritten: choose another run number, or move it away"
            ) from None
        raise ValueError(f"{path} cannot be created: {error.strerror}; choose another results folder") from error
