"""Timing of calls on a device, and cleaning up after them."""

import gc
import statistics
from collections.abc import Callable

import torch

from benchmarks.gpu_parts.measuring.report import DeviceLostError, Figure, first_line
from bert.execution.cuda_graphs import replay_of
from kernels.tuning.autotune import Timer

# Compilation, allocation and the choice of an implementation are complete after three calls.
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

    On a GPU, CUDA events measure time. With ``cold``, a call is timed under the conditions of a captured step: its CUDA
    graph is replayed (if it is ``capturable``), its inputs are not in the L2 cache, and the host runs ahead of the device.
    ``before`` runs before each call and is not timed. Without ``cold``, calls run one after another as in a training loop.
    """
    on_gpu = device.type == "cuda"
    # One call is enough on a CPU, where nothing is compiled.
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
    # The host takes time to create events, so create them before the loop.
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    # The first measurement must not include work that was queued before.
    torch.cuda.synchronize()
    for start, stop in events:
        start.record()
        work()
        stop.record()
    # Synchronize only once, because the device would wait for the host after each synchronization.
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
    """Return a row for calls that each do ``amount`` of work, such as TFLOP, and take ``floor`` seconds at the ceiling."""
    median = statistics.median(seconds)
    share = None if floor is None else floor / median
    return Figure(name, 1e3 * median, amount / median, unit, share, note=note, page=page, seconds=seconds)


def release(device: torch.device) -> None:
    """Return unused device memory to the driver, including the memory of objects in reference cycles."""
    if device.type == "cuda":
        # Reference cycles keep tensors alive until the garbage collector runs.
        gc.collect()
        torch.cuda.empty_cache()


def settle(device: torch.device) -> None:
    """Clean up the device after a measurement. Raises ``DeviceLostError`` if it no longer responds to this process."""
    if device.type == "cuda":
        try:
            torch.cuda.set_stream(torch.cuda.default_stream(device))  # a failed capture leaves its stream current
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLostError(first_line(error)) from error
    release(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
