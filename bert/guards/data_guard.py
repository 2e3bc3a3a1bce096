"""Guard of an honest clock: no byte of the data sets is touched before it runs.

The rules start the clock before any part of the system touches the data set (training_rules, section 11). An audit hook
looks at every file that this process opens through Python; the data format opens its shards so, for the hook to see them.
What a library opens by itself raises no event, h5py's own files among them: of that, what is still open or mapped when the
clock starts is found then.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

METADATA = frozenset({"manifest.json", "lengths.npy"})
"""Numbers of samples and their sizes, which may be read before the clock starts (training_rules, section 6.4)."""


class DataTouchedEarlyError(RuntimeError):
    """Data were opened before ``run_start``."""


class DataGuard:
    """Guard that forbids opening files in the data folders, except for their metadata, until ``release``.

    A file is known by its place and by its inode, so that links from elsewhere lead to it as well, and those in a folder to
    data elsewhere.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        folders = list(folders)
        self._roots = tuple(os.path.realpath(folder) + os.sep for folder in folders)
        found = [each for folder in folders for each in _data_files(folder)]
        self._names = {name for name, _, _ in found}
        self._inodes = {(device, inode) for _, device, inode in found}
        self._armed = True
        self._violations: list[str] = []
        sys.addaudithook(self._hook)  # for the life of the process: hooks cannot be taken back, so this one goes idle

    def require_untouched(self) -> None:
        """Raise if data were opened, or are open or mapped now through whatever library. Takes some milliseconds."""
        for path in self._violations or (path for path in _open_now() if self._is_data(path)):
            raise DataTouchedEarlyError(f"data were opened before run_start: {os.path.realpath(path)}")

    def release(self) -> None:
        """Let data be read, as the clock starts now. Raises if any were read before."""
        self._armed = False
        if self._violations:
            raise DataTouchedEarlyError(f"data were opened before run_start: {self._violations[0]}")

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._armed or event != "open":
            return
        opened = arguments[0]
        if isinstance(opened, str | bytes | os.PathLike | int) and self._is_data(opened):
            path = f"/proc/self/fd/{opened}" if isinstance(opened, int) else os.fsdecode(opened)
            self._violations.append(os.path.realpath(path))
            raise DataTouchedEarlyError(f"{self._violations[-1]} was opened before run_start")

    def _is_data(self, opened: str | bytes | os.PathLike[str] | os.PathLike[bytes] | int) -> bool:
        try:
            found = os.stat(opened)  # noqa: PTH116 on a hot path, and of descriptors
            if (found.st_dev, found.st_ino) in self._inodes:
                return True
        except (OSError, ValueError):
            # A name may count from a folder that is open, of which the event does not tell.
            if not isinstance(opened, int) and os.path.basename(os.fsdecode(opened)) in self._names:  # noqa: PTH119
                return True
        if isinstance(opened, int):
            return False
        path = os.path.realpath(os.fsdecode(opened))
        return path.startswith(self._roots) and os.path.basename(path) not in METADATA  # noqa: PTH119 on a hot path


def _data_files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Name, device and inode of each file in a folder of data; asks for no more than the folder, and where links lead."""
    try:
        with os.scandir(folder) as entries:
            device = folder.stat().st_dev
            for entry in entries:
                if entry.name in METADATA:
                    continue
                if not entry.is_symlink():
                    yield entry.name, device, entry.inode()
                    continue
                with contextlib.suppress(OSError):  # it leads nowhere
                    target = entry.stat()
                    yield entry.name, target.st_dev, target.st_ino
    except OSError:
        return  # who reads the data says what is wrong with them


def _open_now() -> Iterator[str]:
    """Files that this process has open or mapped, where the system tells."""
    descriptors, maps = Path("/proc/self/fd"), Path("/proc/self/maps")
    if descriptors.is_dir():
        yield from map(str, descriptors.iterdir())
    if maps.is_file():
        lines = maps.read_bytes().splitlines()
        yield from {os.fsdecode(line[line.index(b"/") :]) for line in lines if b"/" in line}
