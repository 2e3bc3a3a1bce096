"""Seconds on a device."""

import gc
import re
import statistics
from collections.abc import Callable

import torch

from benchmarks.gpu_parts.measuring.report import DeviceLostError, Figure, first_line
from bert.execution.cuda_graphs import replay_of
from kernels.tuning.contest import Timer

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
    """Return the seconds of each of ``repeats`` calls after a warm-up.

    On a GPU, events measure the time. With ``cold``, a call is timed as a part of a captured step: its CUDA graph is
    replayed (unless it is not ``capturable``), nothing that it reads is in the L2 cache, and the host is ahead of the
    device; ``before`` runs ahead of each call and is not timed. Otherwise calls follow one another as in a training loop.
    """
    on_gpu = device.type == "cuda"
    # One call on a CPU, where nothing is compiled.
    for _ in range(_WARM_UP if on_gpu else 1):
        before()
        work()
    if on_gpu and not cold:
        return _in_a_row(work, repeats)

    def run() -> None:
        work()

    repeated = replay_of(device, run) if on_gpu and capturable else run
    timed, seconds = Timer(device), []
    for _ in range(repeats):
        before()
        seconds.append(timed(repeated))
    return seconds


def _in_a_row(work: Callable[[], object], repeats: int) -> list[float]:
    # Made before the loop: creating events costs time on the host.
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    # Whatever was queued must not be in the first time.
    torch.cuda.synchronize()
    for start, stop in events:
        start.record()
        work()
        stop.record()
    # Once, at the end: synchronizing in between would empty the queue each time.
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
) -> Figure:
    """Return a row for ``amount`` of work a call, such as TFLOP, which takes ``floor`` seconds at the ceiling."""
    median = statistics.median(seconds)
    share = None if floor is None else floor / median
    return Figure(name, 1e3 * median, amount / median, unit, share, note=note, page=page, seconds=seconds)


def release(device: torch.device) -> None:
    """Return unused device memory to the driver, also that of objects in reference cycles."""
    if device.type == "cuda":
        # Reference cycles hold tensors until the collector looks for them.
        gc.collect()
        torch.cuda.empty_cache()


def settle(device: torch.device) -> None:
    """Clean up the device after a measurement.

    Raises:
        DeviceLostError: the device no longer answers this process.
    """
    if device.type == "cuda":
        try:
            torch.cuda.set_stream(torch.cuda.default_stream(device))  # a step's capture that fails leaves its own
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLostError(first_line(error)) from error
    release(device)


def device_name(device: torch.device) -> str:
    """Return the device's name, such as ``NVIDIA H100 80GB HBM3``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def folder_name(device: torch.device) -> str:
    """Return the device's name in a form that suits a folder."""
    return re.sub(r"[^a-z0-9]+", "_", device_name(device).lower()).strip("_")
