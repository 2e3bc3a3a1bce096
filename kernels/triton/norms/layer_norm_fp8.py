"""Dropout, residual and layer norm between products in FP8: the passes of ``layer_norm`` with FP8 casts.

The forward pass also writes the output in FP8 and its transpose. The backward pass takes two gradients of the output,
from the next residual connection and from the next products. It writes the gradient of x only in FP8. For each token,
the two passes together move as many bytes as 10 rows of D bf16 elements. Separate casts and a separate sum of the
gradients would move 16 rows more.

A program processes 32 rows, one tile at a time, like the kernels of ``layer_norm``. Then it reads its FP8 results from
the cache and writes them transposed, 32 bytes per column, which is a whole sector of memory. Registers therefore need
not hold 32 rows.

The ops are defined in ``kernels.reference.fp8``. The shape legend is in ``kernels/__init__.py``.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configuration import Configuration
from kernels.reference.fp8 import E4M3, E5M2
from kernels.reference.random import Dropout
from kernels.triton.dropout import dropout_scalars
from kernels.triton.inputs import mixed_reasons
from kernels.triton.norms import layer_norm
from kernels.triton.norms.layer_norm import PREFETCH, add_norm_row_gradients, add_norm_rows
from kernels.triton.norms.rows import (
    PLACES,
    VARYING,
    Layout,
    backward_programs,
    columns_of,
    load_fp32,
    load_state,
    norm_configurations,
    places_of,
    store_statistics,
    store_vectors,
    sums_over_programs,
)
from kernels.triton.quantize import POINTERS, SCALARS, cast_reasons, fp8_pair, quantized, raise_amax

WARPS = 16
"""Warps of the backward kernel per multiprocessor. The kernel of ``layer_norm`` has more, because it loads one row less."""

_TILE = {"GROUP": 32, "COLUMNS": 32}
"""Rows that a program processes at a time, and columns that it transposes at a time."""


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SCALARS)
def _add_norm_cast_forward(
    x, bias, residual, weight, norm_bias, y, statistics, scale, amax, q, transposed,
    state, tokens, eps, threshold, kept_scale, stream,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Process GROUP rows like ``layer_norm``. Unless ``q`` is None, also write their FP8 cast and its transpose."""
    columns, state = columns_of(BLOCK), load_state(state)
    inside = columns < D
    offset, gain = load_fp32(bias + columns, inside), load_fp32(weight + columns, inside)
    shift = load_fp32(norm_bias + columns, inside)
    largest = tl.zeros([ROWS, BLOCK // PLACES], tl.int32)
    if q is not None:
        multiplier = tl.load(scale)
    first = tl.program_id(0) * GROUP
    for row in tl.range(0, GROUP, ROWS, num_stages=PREFETCH):
        rows, live, places = places_of(first + row, tokens, columns, D, ROWS)
        output, mean, rstd = add_norm_rows(
            x, offset, residual, gain, shift, rows, places, live, inside,
            state, eps, threshold, kept_scale, stream, D, BLOCK, DROPOUT,
        )  # fmt: skip
        # Values outside of the tensor become 0, because amax must ignore them. Rounding to the output's type comes
        # before the cast, so that the FP8 result equals a cast of the stored output.
        output = tl.where(live & inside, output, 0.0).to(y.dtype.element_ty)
        tl.store(y + places, output, mask=live & inside)
        store_statistics(statistics, mean, rstd, rows, tokens)
        if q is not None:
            largest = _cast(output.to(tl.float32), multiplier, largest, q, places, live & inside)
    if q is not None:
        raise_amax(amax, tl.max(largest))
        _transpose_rows(q, transposed, first, tokens, D, GROUP, COLUMNS)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SCALARS)
def _add_norm_cast_backward(
    dy, shortcut_dy, x, bias, residual, weight, statistics, scale, amax, q, transposed, dresidual, partials,
    state, tokens, threshold, kept_scale, stream,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the FP8 cast of x's gradient, the transpose of the cast, and the gradient of residual.

    Each program writes its sums of the gradients of bias, weight and norm_bias to ``partials`` [programs, 3, D].
    ``shortcut_dy`` may be None.
    """
    columns, state = columns_of(BLOCK), load_state(state)
    inside = columns < D
    offset, gain = load_fp32(bias + columns, inside), load_fp32(weight + columns, inside)
    dbias = tl.zeros([ROWS, BLOCK // PLACES, PLACES], tl.float32)
    dweight = tl.zeros_like(dbias)
    dnorm_bias = tl.zeros_like(dbias)
    largest = tl.zeros([ROWS, BLOCK // PLACES], tl.int32)
    multiplier = tl.load(scale)
    STAGES: tl.constexpr = PREFETCH if ROWS == 1 else 1
    # A program processes whole groups of GROUP rows. It transposes only rows that it has written itself, because it
    # would have to wait for other programs' rows.
    for group in range(tl.program_id(0), tl.cdiv(tokens, GROUP), tl.num_programs(0)):
        for row in tl.range(0, GROUP, ROWS, num_stages=STAGES):
            rows, live, places = places_of(group * GROUP + row, tokens, columns, D, ROWS)
            upstream = load_fp32(dy + places, live & inside)
            if shortcut_dy is not None:  # like PyTorch, round the sum to the type of dy
                upstream += load_fp32(shortcut_dy + places, live & inside)
                upstream = upstream.to(dy.dtype.element_ty).to(tl.float32)
            gradient, product_gradient, normalised = add_norm_row_gradients(
                upstream, x, offset, residual, gain, statistics, rows, places, live, inside, tokens,
                state, threshold, kept_scale, stream, D, BLOCK, DROPOUT,
            )  # fmt: skip
            dweight += upstream * normalised
            dnorm_bias += upstream
            dbias += product_gradient
            tl.store(dresidual + places, gradient, mask=live & inside)
            product_gradient = tl.where(live & inside, product_gradient, 0.0)
            value = product_gradient.to(x.dtype.element_ty).to(tl.float32)
            largest = _cast(value, multiplier, largest, q, places, live & inside)
        _transpose_rows(q, transposed, group * GROUP, tokens, D, GROUP, COLUMNS)
    raise_amax(amax, tl.max(largest))
    store_vectors(partials, dbias, dweight, dnorm_bias, columns, inside, D)


@triton.jit
def _cast(value, multiplier, largest, q, places, mask):
    """Write the cast of ``value`` to ``q``. Return the bits of the largest magnitudes so far, [ROWS, BLOCK / 8]."""
    tl.store(q + places, quantized(value * multiplier, q.dtype.element_ty), mask=mask)
    return tl.maximum(largest, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2))


@triton.jit
def _transpose_rows(
    q, transposed, first, tokens, D: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Transpose GROUP rows of ``q``, from row ``first`` on, to ``transposed`` [D, tokens rounded up to 16].

    This program must have written the rows.
    """
    tl.debug_barrier()  # wait, because a thread reads what other threads wrote
    padded = (tokens + 15) // 16 * 16  # the compiler recognises a multiple of 16, and writes 16 bytes at a time
    row, column = tl.arange(0, GROUP), tl.arange(0, COLUMNS)
    q += tl.cast(first, tl.int64) * D
    transposed += first
    for start in range(0, D, COLUMNS):
        live = (row < tokens - first)[:, None] & (column < D - start)[None, :]
        tile = tl.load(q + start + (row[:, None] * D + column[None, :]), mask=live)
        tile = tl.where(live, tile.to(tl.uint8, bitcast=True), 0).to(q.dtype.element_ty, bitcast=True)
        live = (column < D - start)[:, None] & (row < padded - first)[None, :]
        tl.store(transposed + (column[:, None] * padded + row[None, :]), tl.trans(tile), mask=live)
        transposed += COLUMNS * padded.to(tl.int64)
    tl.debug_barrier()


@torch.library.custom_op("mlperf_bert::add_norm_cast_fp8", mutates_args=("amax",))
def _forward(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    state: Tensor | None,
    threshold: int,
    kept_scale: float,
    stream: int,
    scale: Tensor | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output, its statistics, its cast and the transposed cast. The casts are empty if ``scale`` is None."""
    (tokens, columns), layout = x.shape, Layout.of(x.shape[1])
    inputs = (tensor.contiguous() for tensor in (x, bias, residual, weight, norm_bias))
    y, statistics = x.new_empty(tokens, columns), x.new_empty(2, tokens, dtype=torch.float32)
    pair = fp8_pair(x[:0] if scale is None else x, E4M3)
    casts = (None,) * 4 if amax is None else (scale, amax.view(torch.int32), *pair)
    _add_norm_cast_forward[(max(1, triton.cdiv(tokens, _TILE["GROUP"])),)](
        *inputs, y, statistics, *casts, state, tokens, eps, threshold, kept_scale, stream,
        **layout.options(columns, state is not None), **_TILE,
    )  # fmt: skip
    return y, statistics, *pair


@_forward.register_fake
def _(x: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, scale, _amax = inputs
    pair = fp8_pair(x[:0] if scale is None else x, E4M3)
    return x.new_empty(x.shape), x.new_empty(2, len(x), dtype=torch.float32), *pair


@torch.library.custom_op("mlperf_bert::add_norm_backward_cast_fp8", mutates_args=("amax",))
def _backward(
    dy: Tensor,
    shortcut_dy: Tensor | None,
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    statistics: Tensor,
    state: Tensor | None,
    threshold: int,
    kept_scale: float,
    stream: int,
    scale: Tensor,
    amax: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the cast of x's gradient, its transpose, and the gradients of residual and of three vectors, [3, D].

    The vectors are bias, weight and norm_bias.
    """
    (tokens, columns), layout = x.shape, Layout.of(x.shape[1])
    whole = Layout(layout.block, _TILE["GROUP"], layout.num_warps)
    programs = backward_programs(x.device, tokens, whole, WARPS)
    shortcut_dy = None if shortcut_dy is None else shortcut_dy.contiguous()
    inputs = (tensor.contiguous() for tensor in (x, bias, residual, weight, statistics))
    pair, dresidual = fp8_pair(x, E5M2), x.new_empty(tokens, columns)
    partials = x.new_empty(programs, 3, columns, dtype=torch.float32)
    _add_norm_cast_backward[(programs,)](
        dy.contiguous(), shortcut_dy, *inputs, scale, amax.view(torch.int32), *pair, dresidual, partials,
        state, tokens, threshold, kept_scale, stream, **layout.options(columns, state is not None), **_TILE,
    )  # fmt: skip
    return *pair, dresidual, sums_over_programs(partials, weight.dtype)


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, x, _, _, weight, *_ = inputs
    return *fp8_pair(x, E5M2), x.new_empty(x.shape), weight.new_empty(3, x.shape[1])


def add_norm_cast_fp8(
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    dropout: Dropout | None,
    scale: Tensor | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    scalars = dropout_scalars(dropout)
    y_TD, statistics_2T, *pair = _forward(x_TD, bias_D, residual_TD, weight_D, norm_bias_D, eps, *scalars, scale, amax)
    q_TD, q_DT = (None, None) if scale is None else pair
    return y_TD, statistics_2T, q_TD, q_DT


def add_norm_backward_cast_fp8(
    dy_TD: Tensor,
    shortcut_dy_TD: Tensor | None,
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    statistics_2T: Tensor,
    dropout: Dropout | None,
    scale: Tensor,
    amax: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = dy_TD, shortcut_dy_TD, x_TD, bias_D, residual_TD, weight_D, statistics_2T
    q_TD, q_DT, dresidual_TD, vectors_3D = _backward(*inputs, *dropout_scalars(dropout), scale, amax)
    return q_TD, q_DT, dresidual_TD, *vectors_3D.unbind()


def unsupported_reasons(x_TD: Tensor, *others: Any) -> list[str]:
    return layer_norm.unsupported_reasons(x_TD, *others) + cast_reasons(x_TD)


def backward_reasons(*arguments: Any) -> list[str]:
    dy_TD, _shortcut, x_TD, bias_D, residual_TD, weight_D, *_ = arguments
    reasons = mixed_reasons("x and its output's gradient", x_TD, dy_TD)
    return reasons + unsupported_reasons(x_TD, bias_D, residual_TD, weight_D, bias_D)


def configurations() -> list[Configuration]:
    found = []
    for kernel, dtype in ((_add_norm_cast_forward, E4M3), (_add_norm_cast_backward, E5M2)):
        types = {"scale": "*fp32", "amax": "*i32", "kept_scale": "fp32", "shortcut_dy": "*bf16"}
        types |= dict.fromkeys(("q", "transposed"), POINTERS[dtype])
        found += norm_configurations("bf16", kernel, types=types, fixed=_TILE, capabilities=(90, 100))
    return found
