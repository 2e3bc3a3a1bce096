# pyright: reportPrivateImportUsage=false
"""Timing of calls on a device, and the highest rates that it reaches: matrix products in bf16 and FP8, and a copy."""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_parts.report import DeviceLostError, Figure, NotUsableError, first_line
from benchmarks.gpu_parts.scale import Context
from bert.execution.cuda_graphs import replay_of
from kernels.reference.fp8 import E4M3, capability_reasons
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
    """Return a row for calls that each do ``amount`` of work, for example in TFLOP, and take at least ``floor`` s."""
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
            torch.cuda.set_stream(torch.cuda.default_stream(device))  # leave the stream of a failed capture
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLostError(first_line(error)) from error
    release(device)


@dataclass(frozen=True)
class Ceilings:
    """Highest rates that the device reaches in this process. A rate that could not be measured is None."""

    flop_per_s: float | None
    """Rate of a large matrix product in bf16; a multiply-add counts as two operations."""
    fp8_flop_per_s: float | None
    bytes_per_s: float | None
    """Rate of a large copy; bytes read and bytes written count."""

    @classmethod
    def of(cls, context: Context) -> "Ceilings":
        """Measure the ceilings in the process of the part that uses them, and add a row for each."""
        makers = {"bf16 product": _large_product, "FP8 product": _large_fp8_product, "device copy": _large_copy}
        rates = []
        for what, make in makers.items():
            name = f"ceiling: {what}"
            row = context.report.attempt(name, partial(_best_row, context, name, make))
            # The rows' figures are in TFLOP/s or TB/s.
            rates.append(row.figure * 1e12 if row and row.figure else None)
        return cls(*rates)

    def floor(self, flop: float = 0.0, moved: float = 0.0, *, fp8: bool = False) -> tuple[float | None, str]:
        """Return the seconds that the work takes at the ceilings, and the name of the ceiling that limits it.

        The seconds are None if a ceiling that the work needs was not measured.
        """
        rate = self.fp8_flop_per_s if fp8 else self.flop_per_s
        # If only one of two needed ceilings is known, the floor would be too low.
        if (flop and not rate) or (moved and not self.bytes_per_s):
            return None, ""
        by_product, by_copy = flop / (rate or 1), moved / (self.bytes_per_s or 1)
        product = f"of the large {'FP8' if fp8 else 'bf16'} product"
        # The floor is the longer of the two times, because a kernel can overlap computation with memory traffic.
        return (by_product, product) if by_product > by_copy else (by_copy, "of the large copy")


def _large_product(context: Context) -> tuple[Callable[[], Tensor], int, str]:
    """Return a matrix product in low precision, its FLOP, and the unit of its rate."""
    n = context.scale.square
    left, right = (torch.randn(n, n, device=context.device, dtype=context.low_precision) for _ in range(2))
    return lambda: left @ right, 2 * n**3, "TFLOP/s"


def _large_fp8_product(context: Context) -> tuple[Callable[[], Tensor], int, str]:
    """Return a matrix product in E4M3 (the forward pass's format), its FLOP, and the unit of its rate."""
    n = context.scale.square
    if reasons := capability_reasons(context.device):
        raise NotUsableError("; ".join(reasons))
    drawn = (torch.randn(n, n, device=context.device, dtype=torch.bfloat16) for _ in range(2))
    left, right = (values.to(E4M3) for values in drawn)
    one = torch.ones((), device=context.device)  # the value of the scale does not affect the time
    product = partial(torch._scaled_mm, left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return product, 2 * n**3, "TFLOP/s"


def _large_copy(context: Context) -> tuple[Callable[[], Tensor], int, str]:
    """Return a copy of random bytes, the bytes it reads and writes, and the unit of its rate."""
    source = torch.randint(256, (context.scale.copied,), dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel(), "TB/s"


def _best_row(context: Context, name: str, make: Callable[[Context], tuple[Callable[[], Tensor], int, str]]) -> Figure:
    work, amount, unit = make(context)
    # The shortest time counts and the cache is warm, because a ceiling is the highest rate.
    seconds = measured(work, context.device, 3 * context.scale.repeats, cold=False)
    best, note = min(seconds), f"best of {len(seconds)}"
    return Figure(name, 1e3 * best, amount / best / 1e12, unit, note=note, page=True, seconds=seconds)
