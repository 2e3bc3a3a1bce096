"""Seconds on a device."""

import gc
import re
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu_parts.measuring.report import DeviceLostError, Row, first_line

_WARM_UP = 3
_HEAD_START_CYCLES = 2_000_000
"""About a millisecond in which the device waits and the host queues the work, so that the work is not waited for."""


def measured(
    work: Callable[[], object],
    device: torch.device,
    repeats: int,
    *,
    cold: bool,
    before: Callable[[], object] = lambda: None,
) -> list[float]:
    """Seconds of each of ``repeats`` calls after a warm-up, without what ``before`` does ahead of each.

    On a GPU by events. ``cold``: what the call reads is not in the L2 cache, and the host is ahead of the device, as inside
    a captured step; otherwise calls follow one another as they do in a training loop.
    """
    for _ in range(_WARM_UP if device.type == "cuda" else 1):
        before()
        work()
    if device.type == "cpu":
        return [_host_seconds(work, before) for _ in range(repeats)]
    cache = torch.empty(2 * _cache_bytes(device), dtype=torch.int8, device=device) if cold else None
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, stop in events:
        before()
        if cache is not None:
            cache.zero_()
            torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) / 1e3 for start, stop in events]


def timed_row(
    name: str,
    seconds: list[float],
    amount: float,
    unit: str,
    floor: float | None = None,
    note: str = "",
    *,
    page: bool = False,
) -> Row:
    """A row for ``amount`` of work a call, such as TFLOP; ``floor`` are the seconds that it takes at the ceiling."""
    median = statistics.median(seconds)
    share = None if floor is None else floor / median
    return Row(name, 1e3 * median, amount / median, unit, share, note=note, page=page, seconds=seconds)


def release(device: torch.device) -> None:
    """Give cached memory back, for the next to have it; what only cycles hold counts as free."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def settle(device: torch.device) -> None:
    """Leave the device to the next measurement as the first one found it.

    Raises:
        DeviceLostError: the device answers this process no more.
    """
    if device.type == "cuda":
        try:
            torch.cuda.set_stream(torch.cuda.default_stream(device))  # a capture that fails leaves its own
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLostError(first_line(error)) from error
    release(device)


def device_name(device: torch.device) -> str:
    """Name of the device, such as ``NVIDIA H100 80GB HBM3``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def folder_name(device: torch.device) -> str:
    """The device's name as that of a folder."""
    return re.sub(r"[^a-z0-9]+", "_", device_name(device).lower()).strip("_")


def _host_seconds(work: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cache_bytes(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 128 * 2**20
