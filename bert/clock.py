"""Keeping the clock honest: no byte of the data sets is touched before it runs.

The rules start the clock before any part of the system touches the data set (training_rules, section 11). An audit hook
watches every file that this process opens; the data format opens its shards through Python so that the hook sees them.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

METADATA = frozenset({"manifest.json", "lengths.npy"})
"""Numbers of samples and their sizes, which may be read before the clock starts (training_rules, section 6.4)."""


class DataTouchedEarlyError(RuntimeError):
    """Data were opened before ``run_start``."""


class DataGuard:
    """Forbids opening files in the data folders, except for their metadata, until ``release``."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._roots = tuple(os.path.realpath(folder) + os.sep for folder in folders)
        self._armed = True
        self._violations: list[str] = []
        sys.addaudithook(self._hook)  # for the life of the process: hooks cannot be taken back, so this one goes idle

    def release(self) -> None:
        """Let data be read, as the clock starts now. Raises if any were read before."""
        self._armed = False
        if self._violations:
            raise DataTouchedEarlyError(f"data were opened before run_start: {self._violations[0]}")

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._armed or event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path.startswith(self._roots) and os.path.basename(path) not in METADATA:  # noqa: PTH119 on a hot path
            self._violations.append(path)
            raise DataTouchedEarlyError(f"{path} was opened before run_start")
