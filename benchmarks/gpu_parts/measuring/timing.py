"""Seconds on a device."""

import gc
import re
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu_parts.measuring.report import DeviceLostError, Figure, first_line
from bert.cuda_graphs import CudaCapturer
from kernels.tuning.contest import HEAD_START_CYCLES, flush_buffer

# Compilation, allocation and choice of an implementation are done by then.
_WARM_UP = 3


def measured(
    work: Callable[[], object],
    device: torch.device,
    repeats: int,
    *,
    cold: bool,
    capturable: bool = True,
    before: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return the seconds of each of ``repeats`` calls after a warm-up, without the time that ``before`` takes.

    On a GPU, events measure the time. With ``cold``, the call is timed as a part of a captured step: its CUDA graph is
    replayed (unless it is not ``capturable``), nothing that it reads is in the L2 cache, and the host is ahead of the
    device. Otherwise calls follow one another as they do in a training loop.
    """
    # One call on a CPU, where nothing is compiled.
    for _ in range(_WARM_UP if device.type == "cuda" else 1):
        before()
        work()
    if device.type == "cpu":
        return [_host_seconds(work, before) for _ in range(repeats)]
    if cold and capturable:
        work = _replay(work, device)
    cache = flush_buffer(device) if cold else None
    # Made before the loop: creating events costs time on the host.
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    # Whatever was queued must not be in the first time.
    torch.cuda.synchronize()
    for start, stop in events:
        before()
        if cache is not None:
            cache.zero_()
            # The host queues the work while the device waits, so that launches do not show.
            torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        work()
        stop.record()
    # Once, at the end: synchronizing in between would empty the queue each time.
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) / 1e3 for start, stop in events]


def _replay(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Capture ``work`` in a CUDA graph, as training does, and return its replay after running it once."""

    def captured() -> None:
        work()

    capturer = CudaCapturer(device)
    replay = capturer.prepare(captured)
    capturer.capture()
    replay()
    return replay


def timed_row(
    name: str,
    seconds: list[float],
    amount: float,
    unit: str,
    floor: float | None = None,
    note: str = "",
    *,
    page: bool = False,
) -> Figure:
    """A row for ``amount`` of work a call, such as TFLOP; ``floor`` are the seconds that it takes at the ceiling."""
    median = statistics.median(seconds)
    share = None if floor is None else floor / median
    return Figure(name, 1e3 * median, amount / median, unit, share, note=note, page=page, seconds=seconds)


def release(device: torch.device) -> None:
    """Give cached memory back, for the next to have it; what only cycles hold counts as free."""
    if device.type == "cuda":
        # Reference cycles hold tensors until the collector looks for them.
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
