"""Writer of the result file: it flushes each line at once and adds a chain of digests over all lines."""

import os
from pathlib import Path

from compliance.log import digest


class LineFile:
    """Writer of the lines of a new result file. The file must not exist yet."""

    def __init__(self, path: Path) -> None:
        # Mode "x" is atomic: if several runs start at the same time, only one of them gets the number.
        self._file = path.open("xb")
        self._chain = digest.Chain()

    @property
    def next_line(self) -> int:
        """Number of the next line, from 1. Line 1 opens the digest chain."""
        return (self._chain.lines or 1) + 1

    def write(self, text: str) -> None:
        """Write one line, and a digest line if one is due."""
        # A file name that is not valid UTF-8 must not end the run that logs it.
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
        """Write the final digest, sync the file to the disk and close it. Does nothing if the file is closed already."""
        if self._file.closed:
            return
        try:
            if self._chain.lines:
                self.close_stretch(at_end=True)
            # Sync only at the end, because during the timed run each line would wait for the disk.
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _write(self, content: bytes) -> None:
        try:
            # Flush each line, so that the log of a running or killed run contains only whole lines.
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from None
