"""Dropout, residual and layer norm in Triton, in one forward and one backward pass.

Shape legend in ``kernels/__init__.py``; the definition is in ``kernels.reference.ops``, and dropout's mask in
``kernels.reference.random``.

The backward pass recomputes the normalised sum and the mask from the inputs. For each token, the forward pass reads x
and residual and writes y, and the backward pass reads dy, x and residual and writes dx and dresidual: 8 rows of D elements,
16 KiB for BERT-Large in bf16. Saving the sum would move as many rows, and round the sum. Without dropout, dx equals
dresidual and is not written.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configuration import Configuration
from kernels.reference.random import Dropout
from kernels.triton.dropout import dropout_scalars
from kernels.triton.inputs import mixed_reasons, tensor_reasons
from kernels.triton.norms.rows import (
    PLACES,
    VARYING,
    Layout,
    backward_programs,
    columns_of,
    forward_grid,
    kept_places,
    load_fp32,
    load_state,
    load_statistics,
    norm_configurations,
    norm_gradient,
    normalised_rows,
    places_of,
    store_statistics,
    store_vectors,
    sums_over_programs,
    width_reasons,
)

WARPS = 20
"""Warps of the backward kernel per multiprocessor: as many as its registers can hold at once."""
PREFETCH = tl.constexpr(3)
"""Pipeline stages of a loop over rows: two tiles are loaded to shared memory while one is computed."""


@triton.jit
def add_norm_rows(
    x, offset, residual, gain, shift, rows, places, live, inside,
    state, eps, threshold, scale, stream, D: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return ``layer_norm(residual + dropout(x + bias))`` of a tile, and its rows' means and reciprocal deviations.

    ``offset`` is the bias. ``gain`` and ``shift`` are the layer norm's weight and bias.
    """
    summed = load_fp32(x + places, live & inside) + offset
    shortcut = load_fp32(residual + places, live & inside)
    if DROPOUT:
        kept = kept_places(rows, state, threshold, stream, BLOCK)
        summed = tl.where(kept, summed * scale, 0.0)
    normalised, mean, rstd = normalised_rows(summed + shortcut, inside, eps, D)
    return normalised * gain + shift, mean, rstd


@triton.jit
def add_norm_row_gradients(
    upstream, x, offset, residual, gain, statistics, rows, places, live, inside, tokens,
    state, threshold, scale, stream, D: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return the gradients of residual and of x for a tile, which are equal without dropout, and its normalised rows.

    ``offset`` is the bias, and ``gain`` is the layer norm's weight.
    """
    summed = load_fp32(x + places, live & inside) + offset
    shortcut = load_fp32(residual + places, live & inside)
    mean, rstd = load_statistics(statistics, rows, tokens)
    if DROPOUT:
        kept = kept_places(rows, state, threshold, stream, BLOCK)
        summed = tl.where(kept, summed * scale, 0.0)
    # Past the last column, ``normalised`` is not zero, but ``gain`` and ``upstream`` are. These columns therefore add
    # nothing to the sums over a row.
    normalised = (summed + shortcut - mean) * rstd
    dresidual = norm_gradient(upstream, normalised, gain, rstd, D)
    dx = dresidual
    if DROPOUT:
        dx = tl.where(kept, dresidual * scale, 0.0)
    return dresidual, dx, normalised


@triton.jit(do_not_specialize=VARYING)
def _add_norm_forward(
    x, bias, residual, weight, norm_bias, y, statistics,
    state, tokens, eps, threshold, scale, stream,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    columns, state = columns_of(BLOCK), load_state(state)
    inside = columns < D
    rows, live, places = places_of(tl.program_id(0) * ROWS, tokens, columns, D, ROWS)
    offset, gain = load_fp32(bias + columns, inside), load_fp32(weight + columns, inside)
    output, mean, rstd = add_norm_rows(
        x, offset, residual, gain, load_fp32(norm_bias + columns, inside), rows, places, live, inside,
        state, eps, threshold, scale, stream, D, BLOCK, DROPOUT,
    )  # fmt: skip
    tl.store(y + places, output, mask=live & inside)
    store_statistics(statistics, mean, rstd, rows, tokens)


@triton.jit(do_not_specialize=VARYING)
def _add_norm_backward(
    dy, x, bias, residual, weight, statistics, dx, dresidual, partials,
    state, tokens, threshold, scale, stream,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Write the gradient of residual and, with dropout, the gradient of x. Without dropout, both are equal.

    Each program writes its sums of the gradients of bias, weight and norm_bias to ``partials`` [programs, 3, D].
    """
    columns, state = columns_of(BLOCK), load_state(state)
    inside = columns < D
    offset, gain = load_fp32(bias + columns, inside), load_fp32(weight + columns, inside)
    dbias = tl.zeros([ROWS, BLOCK // PLACES, PLACES], tl.float32)
    dweight = tl.zeros_like(dbias)
    dnorm_bias = tl.zeros_like(dbias)
    # Prefetch only if a tile is one row. Tiles of several rows, for narrow models, leave too few registers.
    STAGES: tl.constexpr = PREFETCH if ROWS == 1 else 1
    for tile in tl.range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows, live, places = places_of(tile * ROWS, tokens, columns, D, ROWS)
        upstream = load_fp32(dy + places, live & inside)
        gradient, product_gradient, normalised = add_norm_row_gradients(
            upstream, x, offset, residual, gain, statistics, rows, places, live, inside, tokens,
            state, threshold, scale, stream, D, BLOCK, DROPOUT,
        )  # fmt: skip
        dweight += upstream * normalised
        dnorm_bias += upstream
        tl.store(dresidual + places, gradient, mask=live & inside)
        if DROPOUT:
            tl.store(dx + places, product_gradient, mask=live & inside)
        dbias += product_gradient
    store_vectors(partials, dbias, dweight, dnorm_bias, columns, inside, D)


@torch.library.custom_op("mlperf_bert::dropout_add_layer_norm", mutates_args=())
def _add_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    state: Tensor | None,
    threshold: int,
    scale: float,
    stream: int,
) -> tuple[Tensor, Tensor]:
    """Return the output [T, D], and the rows' means and reciprocal standard deviations, fp32 [2, T]."""
    (tokens, columns), layout = x.shape, Layout.of(x.shape[1])
    inputs = (tensor.contiguous() for tensor in (x, bias, residual, weight, norm_bias))
    outputs = x.new_empty(tokens, columns), x.new_empty(2, tokens, dtype=torch.float32)
    scalars, options = (tokens, eps, threshold, scale, stream), layout.options(columns, state is not None)
    _add_norm_forward[forward_grid(tokens, layout)](*inputs, *outputs, state, *scalars, **options)
    return outputs


_add_norm.register_fake(lambda x, *_: (x.new_empty(x.shape), x.new_empty(2, len(x), dtype=torch.float32)))


@torch.library.custom_op("mlperf_bert::dropout_add_layer_norm_backward", mutates_args=())
def _add_norm_gradients(
    dy: Tensor,
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    statistics: Tensor,
    state: Tensor | None,
    threshold: int,
    scale: float,
    stream: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x [T, D], of the residual, and of bias, weight and norm_bias [3, D].

    Without dropout, the gradient of x equals the residual's gradient, and the first result is empty, [0, D].
    """
    (tokens, columns), layout = x.shape, Layout.of(x.shape[1])
    programs = backward_programs(x.device, tokens, layout, WARPS)
    inputs = (tensor.contiguous() for tensor in (dy, x, bias, residual, weight, statistics))
    dx, dresidual = x.new_empty(tokens if state is not None else 0, columns), x.new_empty(tokens, columns)
    partials = x.new_empty(programs, 3, columns, dtype=torch.float32)
    scalars, options = (tokens, threshold, scale, stream), layout.options(columns, state is not None)
    _add_norm_backward[(programs,)](*inputs, dx, dresidual, partials, state, *scalars, **options)
    return dx, dresidual, sums_over_programs(partials, weight.dtype)


@_add_norm_gradients.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, x, _, _, weight, _, state, *_ = inputs
    tokens, columns = x.shape
    dx = x.new_empty(tokens if state is not None else 0, columns)
    return dx, x.new_empty(tokens, columns), weight.new_empty(3, columns)


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, bias, residual, weight, _, _, state, *ctx.scalars = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # otherwise autograd would allocate a gradient of zeros for the statistics
    ctx.save_for_backward(x, bias, residual, weight, output[1], state)


def _add_norm_autograd(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
    dx, dresidual, vectors_3D = _add_norm_gradients(dy, *ctx.saved_tensors, *ctx.scalars)
    dbias, dweight, dnorm_bias = vectors_3D.unbind()
    # Without dropout, x and the residual have the same gradient.
    return dx if len(dx) else dresidual, dbias, dresidual, dweight, dnorm_bias, *(None,) * 5


_add_norm.register_autograd(_add_norm_autograd, setup_context=_save_add_norm)


def dropout_add_layer_norm(
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return ``layer_norm(residual + dropout(x + bias))``, [T, D] in x's dtype.

    x and residual share a dtype, and so do the three vectors. The op saves the inputs and 8 bytes per token for the
    backward pass.
    """
    return _add_norm(x_TD, bias_D, residual_TD, weight_D, norm_bias_D, eps, *dropout_scalars(dropout))[0]


def unsupported_reasons(
    x_TD: Tensor, bias_D: Tensor, residual_TD: Tensor, weight_D: Tensor, norm_bias_D: Tensor, *_: Any
) -> list[str]:
    rows, vectors = (x_TD, residual_TD), (bias_D, weight_D, norm_bias_D)
    reasons = tensor_reasons(*rows, *vectors) + width_reasons(x_TD.shape[1])
    return reasons + mixed_reasons("x and residual", *rows) + mixed_reasons("bias, weight and norm_bias", *vectors)


def configurations() -> list[Configuration]:
    return norm_configurations("bf16", _add_norm_forward, _add_norm_backward)
