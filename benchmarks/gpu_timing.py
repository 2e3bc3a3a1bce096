"""Seconds on a device, and the rows and files that figures go to."""

import importlib.metadata
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.conditions import write_figures

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "numpy")
_WARM_UP = 3
_HEAD_START_CYCLES = 2_000_000
"""About a millisecond in which the device waits and the host queues the work, so that the work is not waited for."""


class NotUsableError(Exception):
    """What is to be measured is not there, or cannot be used here."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    milliseconds: float | None = None
    """Median."""
    figure: float | None = None
    unit: str = ""
    share: float | None = None
    """Of the ceiling or floor that ``note`` names, measured in the same run."""
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    """Every single time, in order."""


@dataclass
class Report:
    """The rows of a part; every new one is written at once, so that a part that is cut short leaves what it has."""

    path: Path
    part: str
    device: torch.device
    rows: list[Row] = field(default_factory=list)
    error: str | None = None
    complete: bool = False

    def add(self, row: Row) -> None:
        """Take a row."""
        self.rows.append(row)
        self.write()

    def attempt(self, name: str, measure: Callable[[], Row | None]) -> None:
        """Add the row that ``measure`` gives, or one that says why there is none: others can still be measured."""
        try:
            row = measure()
        except (NotUsableError, ImportError) as error:
            row = Row(name, note=f"not usable here: {error}")
        except Exception as error:  # whatever one library raises must not take the others' figures along
            row = Row(name, note=f"failed: {first_line(error)}")
        if row is not None:
            self.add(row)
        release(self.device)

    def write(self) -> None:
        """Write the file anew."""
        figures = {
            "part": self.part,
            "device": device_name(self.device),
            "cuda": torch.version.cuda,
            "complete": self.complete,
            "error": self.error,
            "rows": [asdict(row) for row in self.rows],
        }
        write_figures(self.path, figures, tuple(name for name in PACKAGES if _is_installed(name)))


def measured(work: Callable[[], object], device: torch.device, repeats: int, *, cold: bool) -> list[float]:
    """Seconds of each of ``repeats`` calls after a warm-up.

    On a GPU by events. ``cold``: what the call reads is not in the L2 cache, and the host is ahead of the device, as inside
    a captured step; otherwise calls follow one another as they do in a training loop.
    """
    for _ in range(_WARM_UP):
        work()
    if device.type == "cpu":
        return [_host_seconds(work) for _ in range(repeats)]
    cache = torch.empty(2 * _cache_bytes(device), dtype=torch.int8, device=device) if cold else None
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, stop in events:
        if cache is not None:
            cache.zero_()
            torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) / 1e3 for start, stop in events]


def timed_row(
    name: str, seconds: list[float], amount: float, unit: str, floor: float | None = None, note: str = ""
) -> Row:
    """A row for ``amount`` of work a call, such as TFLOP; ``floor`` are the seconds that it takes at the ceiling."""
    median = statistics.median(seconds)
    share = None if floor is None else floor / median
    return Row(name, 1e3 * median, amount / median, unit, share, note, seconds)


def release(device: torch.device) -> None:
    """Give cached memory back, for the next to have it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """Such as ``NVIDIA H100 80GB HBM3``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def folder_name(device: torch.device) -> str:
    """The device's name as that of a folder."""
    return re.sub(r"[^a-z0-9]+", "_", device_name(device).lower()).strip("_")


def first_line(error: BaseException) -> str:
    """Type and start of an error's message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _host_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cache_bytes(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 128 * 2**20


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
