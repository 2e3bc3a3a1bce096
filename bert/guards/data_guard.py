"""Data guard: ensures that no byte of the data sets is read before the clock starts.

The rules require the clock to start before any part of the system touches the data set (training_rules, section 11).
An audit hook checks every file that this process opens through Python, which is how the data format opens its shards.
Libraries such as h5py can open files without triggering the hook. Therefore the guard also checks the files that are open
or mapped just before the clock starts.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

METADATA = frozenset({"manifest.json", "lengths.npy"})
"""Files with only the number and the sizes of samples. They may be read early (training_rules, section 6.4)."""


class DataTouchedEarlyError(RuntimeError):
    """A data file was opened before ``run_start``."""


class DataGuard:
    """Guard that forbids opening files in the data folders, except metadata files, until ``release``.

    A file is recognised by its inode, which covers every path and link to it.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._inodes = {inode for folder in folders for inode in _inodes(folder)}
        self._armed = True
        self._violation = ""
        sys.addaudithook(self._hook)  # an audit hook cannot be removed; `release` disables it

    def require_untouched(self) -> None:
        """Raise ``DataTouchedEarlyError`` if a data file was opened from Python, or is open or mapped now."""
        for path in [self._violation] if self._violation else (path for path in _open_now() if self._is_data(path)):
            raise DataTouchedEarlyError(f"data were opened before run_start: {os.path.realpath(path)}")

    def release(self) -> None:
        """Allow data to be read, because the clock starts now.

        Raises ``DataTouchedEarlyError`` if data were opened before.
        """
        self._armed = False
        if self._violation:
            raise DataTouchedEarlyError(f"data were opened before run_start: {self._violation}")

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._armed or event != "open":
            return
        opened = arguments[0]
        if isinstance(opened, str | bytes | os.PathLike | int) and self._is_data(opened):
            path = f"/proc/self/fd/{opened}" if isinstance(opened, int) else os.fsdecode(opened)
            self._violation = os.path.realpath(path)
            raise DataTouchedEarlyError(f"{self._violation} was opened before run_start")

    def _is_data(self, opened: str | bytes | os.PathLike[str] | os.PathLike[bytes] | int) -> bool:
        with contextlib.suppress(OSError, ValueError):
            found = os.stat(opened)  # noqa: PTH116 faster than Path.stat, and accepts descriptors
            return (found.st_dev, found.st_ino) in self._inodes
        return False


def _inodes(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the device and inode of each data file in a folder and its subfolders. Links to files are followed."""
    # Ignore errors such as broken links, because the code that reads the data reports them.
    for path in folder.rglob("*"):
        if path.name not in METADATA:
            with contextlib.suppress(OSError):
                found = path.stat()
                yield found.st_dev, found.st_ino


def _open_now() -> Iterator[str]:
    """Yield the files that this process has open or mapped, if the system provides ``/proc``."""
    yield from map(str, Path("/proc/self/fd").glob("*"))
    maps = Path("/proc/self/maps")
    if maps.is_file():
        lines = maps.read_bytes().splitlines()
        yield from {os.fsdecode(line[line.index(b"/") :]) for line in lines if b"/" in line}
