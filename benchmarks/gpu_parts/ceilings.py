# pyright: reportPrivateImportUsage=false
"""Measure the best that the device reaches: matrix products in bf16 and FP8, and a copy."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_parts.measuring.report import Figure, NotUsableError
from benchmarks.gpu_parts.measuring.scale import Context
from benchmarks.gpu_parts.measuring.timing import measured, timed_row
from kernels.reference.fp8 import E4M3, E5M2, capability_reasons


@dataclass(frozen=True)
class Ceilings:
    """Best rates that the device reaches in this process; None if a rate could not be measured."""

    flop_per_s: float | None
    """Rate of a large matrix product in bf16; a multiply-add counts as 2."""
    fp8_flop_per_s: float | None
    bytes_per_s: float | None
    """Rate of a large copy; bytes read and bytes written count."""

    @classmethod
    def of(cls, context: Context, *, page: bool = False) -> "Ceilings":
        """Measure the ceilings, once in each part, as its first rows."""
        # The same rows in every part: shares are of what this very process reached.
        makers = {"bf16 product": _large_product, "FP8 product": _large_fp8_product, "device copy": _large_copy}
        rates = []
        for what, make in makers.items():
            name = f"ceiling: {what}"
            row = context.report.attempt(name, partial(_best_row, context, name, make, page))
            # Figures of rows are in units of 10^12 a second.
            rates.append(row.figure * 1e12 if row and row.figure else None)
        return cls(*rates)

    def floor(self, flop: float = 0.0, moved: float = 0.0, *, fp8: bool = False) -> tuple[float | None, str]:
        """Return the seconds that the work takes at the ceilings, and the name of the ceiling that limits it."""
        rate = self.fp8_flop_per_s if fp8 else self.flop_per_s
        # No ceiling, no share: a floor of one of the two alone would be too low.
        if (flop and not rate) or (moved and not self.bytes_per_s):
            return None, ""
        by_product, by_copy = flop / (rate or 1), moved / (self.bytes_per_s or 1)
        product = f"of the large {'FP8' if fp8 else 'bf16'} product"
        # The slower of both: a kernel can overlap one with the other.
        return (by_product, product) if by_product > by_copy else (by_copy, "of the large copy")


KINDS = ("forward", "input gradient", "weight gradient")


@dataclass(frozen=True)
class _Shape:
    """Shape of one matrix product of an encoder layer: [rows, inner] by [inner, columns]."""

    kind: str
    rows: int
    inner: int
    columns: int

    @property
    def flop(self) -> int:
        """Multiply-add = 2."""
        return 2 * self.rows * self.inner * self.columns

    def __str__(self) -> str:
        return f"{self.kind} {self.rows} x {self.inner} x {self.columns}"


def ceilings(context: Context) -> None:
    """Measure the ceilings, and the products of an encoder layer: forward, input gradients and weight gradients."""
    ceilings = Ceilings.of(context, page=True)
    for precision, operands in (("bf16", _operands), ("FP8", _fp8_operands)):
        if precision == "FP8" and ceilings.fp8_flop_per_s is None:
            continue  # the ceiling's own row says why
        for kind in KINDS:
            shapes = [_Shape(kind, *sizes) for sizes in _sizes_of_a_layer(context, kind)]
            for shape in shapes:
                name = f"{precision} {shape}"
                context.report.attempt(name, partial(_product_row, context, name, shape, operands, ceilings))
            name = f"{precision} {kind}, the {len(shapes)} products of a layer"
            # From the medians of its rows, once all of them are there.
            context.report.attempt(name, partial(_layer_row, context, name, precision, shapes, ceilings))


def _sizes_of_a_layer(context: Context, kind: str) -> list[tuple[int, int, int]]:
    """Return the sizes of QKV, attention output, FC1 and FC2. A weight gradient contracts over the tokens."""
    model, tokens = context.scale.model, 128 * context.scale.sequences
    hidden, wide = model.hidden_size, model.intermediate_size
    denses = [(hidden, 3 * hidden), (hidden, hidden), (hidden, wide), (wide, hidden)]
    if kind == "forward":
        return [(tokens, inputs, outputs) for inputs, outputs in denses]
    if kind == "input gradient":
        return [(tokens, outputs, inputs) for inputs, outputs in denses]
    return [(outputs, tokens, inputs) for inputs, outputs in denses]


def _operands(context: Context, shape: _Shape) -> Callable[[], Tensor]:
    """Build a product in low precision on operands with the strides that autograd gives them."""

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=context.device, dtype=context.low_precision)

    if shape.kind == "weight gradient":
        left, right = normal(shape.inner, shape.rows).t(), normal(shape.inner, shape.columns)
    elif shape.kind == "input gradient":
        left, right = normal(shape.rows, shape.inner), normal(shape.inner, shape.columns)
    else:
        left, right = normal(shape.rows, shape.inner), normal(shape.columns, shape.inner).t()
    return lambda: left @ right


def _fp8_operands(context: Context, shape: _Shape) -> Callable[[], Tensor]:
    """Build a product as in ``bert.products.fp8``: gradients in E5M2, weight gradients accumulated in fp32."""
    left = _fp8_operand(context, shape.rows, shape.inner, E4M3 if shape.kind == "forward" else E5M2)
    right = _fp8_operand(context, shape.columns, shape.inner, E4M3)
    of_a_weight = shape.kind == "weight gradient"
    # As in the model, which sums and keeps weight gradients in fp32.
    dtype = torch.float32 if of_a_weight else torch.bfloat16
    return _scaled_product(left, right, dtype, fast=not of_a_weight)


def _product_row(
    context: Context,
    name: str,
    shape: _Shape,
    operands: Callable[[Context, _Shape], Callable[[], Tensor]],
    ceilings: Ceilings,
) -> Figure:
    floor, ceiling = ceilings.floor(shape.flop, fp8=operands is _fp8_operands)
    # Cold, as in a step: other tensors have replaced the operands in the cache.
    seconds = measured(operands(context, shape), context.device, 3 * context.scale.repeats, cold=True)
    return timed_row(name, seconds, shape.flop / 1e12, "TFLOP/s", floor, ceiling)


def _layer_row(context: Context, name: str, precision: str, shapes: list[_Shape], ceilings: Ceilings) -> Figure:
    """Return the row of all products of one kind in a layer, from the median of each product."""
    rows = [context.report.row(f"{precision} {shape}") for shape in shapes]
    milliseconds = [row.milliseconds for row in rows if row and row.milliseconds]
    if len(milliseconds) < len(shapes):
        raise NotUsableError("not all of them were measured")
    flop = sum(shape.flop for shape in shapes)
    floor, ceiling = ceilings.floor(flop, fp8=precision == "FP8")
    return timed_row(name, [sum(milliseconds) / 1e3], flop / 1e12, "TFLOP/s", floor, ceiling, page=True)


def _large_product(context: Context) -> tuple[Callable[[], Tensor], int, str]:
    """Return a matrix product in low precision, its FLOP, and the unit of its rate."""
    n = context.scale.square
    left, right = (torch.randn(n, n, device=context.device, dtype=context.low_precision) for _ in range(2))
    return lambda: left @ right, 2 * n**3, "TFLOP/s"


def _large_fp8_product(context: Context) -> tuple[Callable[[], Tensor], int, str]:
    """Return a matrix product in E4M3, the format of the forward pass, its FLOP, and the unit of its rate."""
    n = context.scale.square
    left, right = (_fp8_operand(context, n, n, E4M3) for _ in range(2))
    return _scaled_product(left, right, torch.bfloat16), 2 * n**3, "TFLOP/s"


def _large_copy(context: Context) -> tuple[Callable[[], Tensor], int, str]:
    """Return a copy of random bytes, the bytes it reads and writes, and the unit of its rate."""
    source = torch.randint(256, (context.scale.copied,), dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel(), "TB/s"


def _fp8_operand(context: Context, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Draw normal numbers in FP8, [rows, columns]."""
    if reasons := capability_reasons(context.device):
        raise NotUsableError("; ".join(reasons))
    return torch.randn(rows, columns, device=context.device, dtype=torch.bfloat16).to(dtype)


def _scaled_product(
    left_MK: Tensor, right_NK: Tensor, out_dtype: torch.dtype, *, fast: bool = True
) -> Callable[[], Tensor]:
    """Build ``left @ right.T`` in FP8. With ``fast``, the tensor cores alone accumulate."""
    # Scales of 1: their values do not change the time.
    one = torch.ones((), device=left_MK.device)
    operands = left_MK, right_NK.t(), one, one
    return partial(torch._scaled_mm, *operands, out_dtype=out_dtype, use_fast_accum=fast)


def _best_row(
    context: Context, name: str, make: Callable[[Context], tuple[Callable[[], Tensor], int, str]], page: bool
) -> Figure:
    work, amount, unit = make(context)
    # Warm, and the best time: a ceiling is what the device can reach.
    seconds = measured(work, context.device, 3 * context.scale.repeats, cold=False)
    best = min(seconds)
    return Figure(
        name, 1e3 * best, amount / best / 1e12, unit, note=f"best of {len(seconds)}", page=page, seconds=seconds
    )
