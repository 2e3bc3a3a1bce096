# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Parts of Triton kernels that cast to FP8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.fp8 import ALIGNMENT, E4M3, E5M2, LARGEST, capability_reasons, padded

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LARGEST_E4M3, _LARGEST_E5M2 = tl.constexpr(LARGEST[E4M3]), tl.constexpr(LARGEST[E5M2])

POINTERS = {E4M3: "*fp8e4nv", E5M2: "*fp8e5"}
"""Triton pointer type for each torch dtype."""
# ``scale`` and ``amax`` point to elements of vectors, so their alignment varies. Triton must not compile a kernel again
# for them, as it does by default if a pointer is aligned to 16 bytes.
SCALARS = ["scale", "amax"]


def fp8_pair(x_RC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate a cast [R, C] and its transpose [C, padded(R)]."""
    rows, columns = x_RC.shape
    return x_RC.new_empty((rows, columns), dtype=dtype), x_RC.new_empty((columns, padded(rows)), dtype=dtype)


def cast_reasons(x_RC: Tensor) -> list[str]:
    reasons = capability_reasons(x_RC.device)
    if x_RC.shape[1] % ALIGNMENT:
        reasons.append(f"{x_RC.shape[1]} columns, not a multiple of {ALIGNMENT}")
    return reasons


@triton.jit
def aligned(size):
    """Round ``size`` up to a multiple of 16. The compiler recognises this form, and accesses 16 bytes at a time."""
    return (size + 15) // 16 * 16


@triton.jit
def raise_amax(amax, largest):
    """Raise ``amax`` to ``largest`` if ``amax`` is lower. Both are magnitudes: the bits of fp32 numbers, as int32.

    As integers, the bits have the same order as the magnitudes, with infinity above all numbers and NaN above infinity.
    The load may return an outdated ``amax``, which can only be too small. The comparison with it skips the atomic
    operation in most programs, and never skips one that is needed.
    """
    tl.atomic_max(amax, largest, mask=largest > tl.load(amax), sem="relaxed")


@triton.jit
def cast_rows(
    value, scale, amax, q, transposed, sums, start, rows, stop, tokens,
    STRIDE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the cast, the transposed cast and the column sums of fp32 ``value`` [rows, SIZE], and raise ``amax``.

    ``rows`` are row numbers that count from row ``start``. Rows from ``stop`` on are ignored. ``q`` points to a column
    of [tokens, STRIDE], ``transposed`` to a row of [STRIDE, tokens rounded up to 16], and ``sums``, which may be None,
    to SIZE column sums.
    """
    live, column = rows < stop, tl.arange(0, SIZE)
    value = tl.where(live[:, None], value, 0.0)
    raise_amax(amax, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF))
    cast = quantized(value * tl.load(scale), q.dtype.element_ty)
    q += start.to(tl.int64) * STRIDE
    tl.store(q + (rows[:, None] * STRIDE + column[None, :]), cast, mask=live[:, None])
    places = transposed + start + (column[:, None] * aligned(tokens) + rows[None, :])
    tl.store(places, tl.trans(cast), mask=live[None, :])
    if sums is not None:
        tl.store(sums + column, tl.sum(value, axis=0))


@triton.jit
def cast_zeros(
    q, transposed, start, tokens, step, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write zeros to BLOCK rows at ``start``, at ``start + step`` and so on, and to the transpose with its padding."""
    padded, column = aligned(tokens), tl.arange(0, SIZE)
    for first in range(0, padded - start, step):
        rows = start + first + tl.arange(0, BLOCK).to(tl.int64)
        zeros = tl.zeros((BLOCK, SIZE), tl.uint8).to(q.dtype.element_ty, bitcast=True)
        tl.store(q + (rows[:, None] * STRIDE + column[None, :]), zeros, mask=(rows < tokens)[:, None])
        tl.store(
            transposed + (column[:, None] * padded + rows[None, :]), tl.trans(zeros), mask=(rows < padded)[None, :]
        )


@triton.jit
def quantized(value, DTYPE: tl.constexpr):
    """Quantize ``value`` to FP8: rounded to nearest even, saturated; NaN stays NaN."""
    # Triton compiles the conversion to ``cvt.rn.satfinite``, which does all of this. The interpreter's own conversion
    # does not round to even, does not saturate, and converts NaN to a number.
    return _fp8_bits(value, DTYPE).to(DTYPE, bitcast=True) if _INTERPRETED else value.to(DTYPE)


@triton.jit
def _fp8_bits(value, DTYPE: tl.constexpr):
    """Convert fp32 numbers to the bits of an FP8 type, uint8, as ``cvt.rn.satfinite`` does on a GPU."""
    LARGEST: tl.constexpr = _LARGEST_E5M2 if DTYPE.is_fp8e5() else _LARGEST_E4M3
    value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    MANTISSA: tl.constexpr = DTYPE.fp_mantissa_width
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Adding 2^23 times the distance between neighbouring FP8 numbers rounds the sum to a multiple of this distance.
    smallest = 128 - DTYPE.exponent_bias  # fp32 exponent field of the smallest normal FP8 number
    exponent = tl.maximum(magnitude >> 23, smallest)
    large = (exponent + (23 - MANTISSA)) << 23
    rounded = magnitude.to(tl.float32, bitcast=True) + large.to(tl.float32, bitcast=True)
    steps = rounded.to(tl.int32, bitcast=True) - large
    found = ((exponent - smallest) << MANTISSA) + steps
    found = tl.where(magnitude > 0x7F800000, 0x7F, found)  # 0x7F is NaN in both FP8 types
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)
