# pyright: reportPrivateImportUsage=false
"""What the device reaches at best: matrix products in bf16 and FP8, and a copy."""

import torch

from benchmarks.gpu_scale import Context, large_copy, large_product
from benchmarks.gpu_timing import Row, measured, timed_row

_FP8 = torch.float8_e4m3fn


def ceilings(context: Context) -> None:
    """Large and at the model's own shapes."""
    scale, model = context.scale, context.scale.model
    tokens, hidden, wide = 128 * scale.sequences, model.hidden_size, model.intermediate_size
    shapes = [
        (scale.square, scale.square, scale.square),
        (tokens, hidden, 3 * hidden),
        (tokens, hidden, hidden),
        (tokens, hidden, wide),
        (tokens, wide, hidden),
    ]
    context.report.attempt("device copy", lambda: _copy(context))
    peak = large_product(context)[0]
    for shape in shapes:
        context.report.attempt(_name("bf16", shape), lambda shape=shape: _product(context, shape, peak))
    for shape in shapes:
        context.report.attempt(_name("FP8", shape), lambda shape=shape: _scaled_product(context, shape, peak))


def _copy(context: Context) -> Row:
    _, seconds = large_copy(context)
    return timed_row("device copy", seconds, 2 * context.scale.copied / 1e12, "TB/s", note="read and written")


def _product(context: Context, shape: tuple[int, int, int], peak: float) -> Row:
    rows, inner, columns = shape
    left = torch.randn(rows, inner, device=context.device, dtype=context.low_precision)
    weight = torch.randn(columns, inner, device=context.device, dtype=context.low_precision)
    seconds = measured(lambda: left @ weight.T, context.device, 3 * context.scale.repeats, cold=False)
    return _row("bf16", shape, seconds, peak)


def _scaled_product(context: Context, shape: tuple[int, int, int], peak: float) -> Row:
    rows, inner, columns = shape
    left = torch.randn(rows, inner, device=context.device).to(_FP8)
    weight = torch.randn(columns, inner, device=context.device).to(_FP8)
    one = torch.ones((), device=context.device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(left, weight.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return _row("FP8", shape, measured(product, context.device, 3 * context.scale.repeats, cold=False), peak)


def _row(kind: str, shape: tuple[int, int, int], seconds: list[float], peak: float) -> Row:
    rows, inner, columns = shape
    flop = 2 * rows * inner * columns
    return timed_row(
        _name(kind, shape), seconds, flop / 1e12, "TFLOP/s", flop / peak, "of the fastest large bf16 product"
    )


def _name(kind: str, shape: tuple[int, int, int]) -> str:
    return f"{kind} {' x '.join(map(str, shape))}"
