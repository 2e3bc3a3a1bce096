# pyright: reportPrivateImportUsage=false
"""Highest rates that a device reaches: matrix products in bf16 and FP8, and a copy."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_parts.measuring.report import Figure, NotUsableError
from benchmarks.gpu_parts.measuring.scale import Context
from benchmarks.gpu_parts.measuring.timing import measured
from kernels.reference.fp8 import E4M3, capability_reasons


@dataclass(frozen=True)
class Ceilings:
    """Highest rates that the device reaches in this process. A rate that could not be measured is None."""

    flop_per_s: float | None
    """Rate of a large matrix product in bf16; a multiply-add counts as 2."""
    fp8_flop_per_s: float | None
    bytes_per_s: float | None
    """Rate of a large copy; bytes read and bytes written count."""

    @classmethod
    def of(cls, context: Context, *, page: bool = False) -> "Ceilings":
        """Measure the ceilings, and add a row for each.

        Every part does this itself, so that its figures are compared with rates of the same process.
        """
        makers = {"bf16 product": _large_product, "FP8 product": _large_fp8_product, "device copy": _large_copy}
        rates = []
        for what, make in makers.items():
            name = f"ceiling: {what}"
            row = context.report.attempt(name, partial(_best_row, context, name, make, page))
            # The rows' figures are in TFLOP/s or TB/s.
            rates.append(row.figure * 1e12 if row and row.figure else None)
        return cls(*rates)

    def floor(self, flop: float = 0.0, moved: float = 0.0, *, fp8: bool = False) -> tuple[float | None, str]:
        """Return the seconds that the work takes at the ceilings, and the name of the ceiling that limits it.

        The seconds are None if a ceiling that the work needs was not measured.
        """
        rate = self.fp8_flop_per_s if fp8 else self.flop_per_s
        # One of two needed ceilings alone would give too low a floor.
        if (flop and not rate) or (moved and not self.bytes_per_s):
            return None, ""
        by_product, by_copy = flop / (rate or 1), moved / (self.bytes_per_s or 1)
        product = f"of the large {'FP8' if fp8 else 'bf16'} product"
        # The floor is the longer of the two times, because a kernel can overlap computation with memory traffic.
        return (by_product, product) if by_product > by_copy else (by_copy, "of the large copy")


def ceilings(context: Context) -> None:
    Ceilings.of(context, page=True)


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


def _best_row(
    context: Context, name: str, make: Callable[[Context], tuple[Callable[[], Tensor], int, str]], page: bool
) -> Figure:
    work, amount, unit = make(context)
    # The shortest time counts and the cache is warm, because a ceiling is the highest rate.
    seconds = measured(work, context.device, 3 * context.scale.repeats, cold=False)
    best = min(seconds)
    return Figure(
        name, 1e3 * best, amount / best / 1e12, unit, note=f"best of {len(seconds)}", page=page, seconds=seconds
    )
