"""The file of a result: whole lines, written at once, and among them the chain of digests over all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from compliance.log import digest


class ResultExists(ValueError):  # noqa: N818 - it names what was found
    """The result file is there already, and was not touched."""


class LineFile:
    """Writer of the lines of a result file, which must not be there yet."""

    def __init__(self, path: Path) -> None:
        self._file = _create(path)
        self._chain = digest.Chain()

    @property
    def next_line(self) -> int:
        """Number of the line that is written next, from 1; the first line of the file opens the chain."""
        return (self._chain.lines or 1) + 1

    def write(self, text: str) -> None:
        """Write one line, and a digest when one is due."""
        # A name that is no UTF-8 must not end the run that logs it.
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
        """Write the digest at the end, bring the file to the disk and close it; again does nothing."""
        if self._file.closed:
            return
        try:
            if self._chain.lines:
                self.close_stretch(at_end=True)
            # At the end alone: on the clock it would wait for the disk at every line.
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _write(self, content: bytes) -> None:
        try:
            # Flushed at once: who reads along, or finds the log of a killed run, has whole lines.
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from None


def _create(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Made or refused in one step: of runs that start at once, one gets the number.
        return path.open("xb")
    except OSError as error:
        if isinstance(error, FileExistsError) and path.parent.is_dir():
            raise ResultExists(
                f"{path} is already there and a result is never overwritten: choose another run number, or move it away"
            ) from None
        raise ValueError(f"{path} cannot be created: {error.strerror}; choose another results folder") from error
