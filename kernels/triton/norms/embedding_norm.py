"""The sum of three embeddings, its layer norm and dropout in Triton, in one forward and one backward pass.

Shape legend in ``kernels/__init__.py``; the definition is in ``kernels.reference.ops``, and dropout's mask in
``kernels.reference.random``. For each token, the forward pass gathers 3 table rows and writes 1 row. The backward pass
gathers 3 table rows, reads 1 row, and adds to 2 rows of table gradients in fp32. These additions are atomic, so the
last bits of the word and position tables' gradients depend on the order of the additions.
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
    store_partial,
    store_statistics,
    sums_over_programs,
    width_reasons,
)

WARPS = 16
"""Warps of the backward kernel per multiprocessor: as many as its registers can hold at once."""


@triton.jit
def _summed_embeddings(word, position, segment, words, positions, segments, columns, mask, D: tl.constexpr):
    """Return the sum of each token's rows in the three tables, fp32 [ROWS, BLOCK / 8, 8]. Ids are [ROWS, 1, 1]."""
    summed = load_fp32(word + words * D + columns, mask) + load_fp32(position + positions * D + columns, mask)
    return summed + load_fp32(segment + segments * D + columns, mask)


@triton.jit
def _ids(pointer, rows, tokens):
    return tl.load(pointer + rows, mask=rows < tokens, other=0).to(tl.int64)[:, None, None]


@triton.jit(do_not_specialize=VARYING)
def _embedding_norm_forward(
    input_ids, position_ids, segment_ids, word, position, segment, weight, bias, y, statistics,
    state, tokens, eps, threshold, scale, stream,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    columns = columns_of(BLOCK)
    inside = columns < D
    rows, live, places = places_of(tl.program_id(0) * ROWS, tokens, columns, D, ROWS)
    words, positions = _ids(input_ids, rows, tokens), _ids(position_ids, rows, tokens)
    segments = _ids(segment_ids, rows, tokens)
    summed = _summed_embeddings(word, position, segment, words, positions, segments, columns, live & inside, D)
    gain, shift = load_fp32(weight + columns, inside), load_fp32(bias + columns, inside)
    normalised, mean, rstd = normalised_rows(summed, inside, eps, D)
    output = normalised * gain + shift
    if DROPOUT:
        kept = kept_places(rows, load_state(state), threshold, stream, BLOCK)
        output = tl.where(kept, output * scale, 0.0)
    tl.store(y + places, output, mask=live & inside)
    store_statistics(statistics, mean, rstd, rows, tokens)


@triton.jit(do_not_specialize=VARYING)
def _embedding_norm_backward(
    dy, input_ids, position_ids, segment_ids, word, position, segment, weight, statistics, dword, dposition, partials,
    state, tokens, threshold, scale, stream,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the word and position tables to ``dword`` and ``dposition``, fp32, by atomic additions.

    Each program sums the gradients of weight, bias and the two segment rows, and writes the sums to ``partials``, which
    is [programs, 4, D].
    """
    columns = columns_of(BLOCK)
    inside = columns < D
    gain = load_fp32(weight + columns, inside)
    dweight = tl.zeros([ROWS, BLOCK // PLACES, PLACES], tl.float32)
    dbias = tl.zeros_like(dweight)
    dsegment_0 = tl.zeros_like(dweight)
    dsegment_1 = tl.zeros_like(dweight)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        rows, live, places = places_of(tile * ROWS, tokens, columns, D, ROWS)
        words, positions = _ids(input_ids, rows, tokens), _ids(position_ids, rows, tokens)
        segments = _ids(segment_ids, rows, tokens)
        upstream = load_fp32(dy + places, live & inside)
        summed = _summed_embeddings(word, position, segment, words, positions, segments, columns, live & inside, D)
        mean, rstd = load_statistics(statistics, rows, tokens)
        if DROPOUT:
            kept = kept_places(rows, load_state(state), threshold, stream, BLOCK)
            upstream = tl.where(kept, upstream * scale, 0.0)
        normalised = (summed - mean) * rstd
        dweight += upstream * normalised
        dbias += upstream
        gradient = norm_gradient(upstream, normalised, gain, rstd, D)
        tl.atomic_add(dword + words * D + columns, gradient, mask=live & inside, sem="relaxed")
        tl.atomic_add(dposition + positions * D + columns, gradient, mask=live & inside, sem="relaxed")
        # The segment table has only two rows. Atomic additions would make all programs wait for the same addresses.
        dsegment_0 += tl.where(segments == 0, gradient, 0.0)
        dsegment_1 += tl.where(segments == 1, gradient, 0.0)
    partial = partials + tl.program_id(0) * 4 * D + columns
    store_partial(partial, dweight, inside)
    store_partial(partial + D, dbias, inside)
    store_partial(partial + 2 * D, dsegment_0, inside)
    store_partial(partial + 3 * D, dsegment_1, inside)


@torch.library.custom_op("mlperf_bert::embedding_layer_norm", mutates_args=())
def _embedding_norm(
    input_ids: Tensor,
    position_ids: Tensor,
    segment_ids: Tensor,
    word: Tensor,
    position: Tensor,
    segment: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    state: Tensor | None,
    threshold: int,
    scale: float,
    stream: int,
    word_gradient: Tensor | None = None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """Return the output [T, D], and the rows' means and reciprocal standard deviations, fp32 [2, T].

    Only the backward pass uses ``word_gradient``.
    """
    tokens, columns = len(input_ids), word.shape[1]
    layout = Layout.of(columns)
    inputs = (input_ids, position_ids, segment_ids, word, position, segment, weight, bias)
    outputs = word.new_empty(tokens, columns), word.new_empty(2, tokens, dtype=torch.float32)
    scalars, options = (tokens, eps, threshold, scale, stream), layout.options(columns, state is not None)
    _embedding_norm_forward[forward_grid(tokens, layout)](
        *(tensor.contiguous() for tensor in inputs), *outputs, state, *scalars, **options
    )
    return outputs


@_embedding_norm.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    input_ids, _, _, word, *_ = inputs
    tokens = len(input_ids)
    return word.new_empty(tokens, word.shape[1]), word.new_empty(2, tokens, dtype=torch.float32)


@torch.library.custom_op("mlperf_bert::embedding_layer_norm_backward", mutates_args=("dword",))
def _embedding_norm_gradients(
    dy: Tensor,
    input_ids: Tensor,
    position_ids: Tensor,
    segment_ids: Tensor,
    word: Tensor,
    position: Tensor,
    segment: Tensor,
    weight: Tensor,
    statistics: Tensor,
    state: Tensor | None,
    threshold: int,
    scale: float,
    stream: int,
    dword: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the position table [L, D] and of weight, bias and both segments [4, D].

    The word table's gradient is added to ``dword``. The sums are fp32, because 16-bit atomics would round at every token.
    """
    (tokens, columns), layout = dy.shape, Layout.of(dy.shape[1])
    programs = backward_programs(dy.device, tokens, layout, WARPS)
    inputs = (dy, input_ids, position_ids, segment_ids, word, position, segment, weight, statistics)
    dposition = position.new_zeros(position.shape, dtype=torch.float32)
    partials = dy.new_empty(programs, 4, columns, dtype=torch.float32)
    scalars, options = (tokens, threshold, scale, stream), layout.options(columns, state is not None)
    _embedding_norm_backward[(programs,)](
        *(tensor.contiguous() for tensor in inputs), dword, dposition, partials, state, *scalars, **options
    )
    return dposition.to(position.dtype), sums_over_programs(partials, weight.dtype)


@_embedding_norm_gradients.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    _, _, _, _, word, position, _, weight, *_ = inputs
    return position.new_empty(position.shape), weight.new_empty(4, word.shape[1])


def _save_embedding_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, _, state, threshold, scale, stream, word_gradient = inputs
    ctx.scalars = threshold, scale, stream
    # ``word_gradient`` is kept outside of save_for_backward, which refuses a tensor that another backward pass (the
    # decoder's) has changed.
    ctx.word_gradient = word_gradient
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # otherwise autograd would allocate a gradient of zeros for the statistics
    ctx.save_for_backward(*tensors, output[1], state)


def _embedding_norm_autograd(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
    word, added = ctx.saved_tensors[3], ctx.word_gradient
    dword = word.new_zeros(word.shape, dtype=torch.float32) if added is None else added
    dposition, vectors_4D = _embedding_norm_gradients(dy, *ctx.saved_tensors, *ctx.scalars, dword)
    tables = dword.to(word.dtype) if added is None else None, dposition, vectors_4D[2:]
    return None, None, None, *tables, vectors_4D[0], vectors_4D[1], *(None,) * 6


_embedding_norm.register_autograd(_embedding_norm_autograd, setup_context=_save_embedding_norm)


def embedding_layer_norm(
    input_ids_T: Tensor,
    position_ids_T: Tensor,
    segment_ids_T: Tensor,
    word_VD: Tensor,
    position_LD: Tensor,
    segment_2D: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    dropout: Dropout | None = None,
    word_gradient_VD: Tensor | None = None,
) -> Tensor:
    """Return ``dropout(layer_norm(sum of the three embeddings))``, [T, D] in the tables' dtype.

    Ids are int32 or int64. The op does not check that they are inside their tables. Tables and vectors share a dtype.
    The op saves the inputs and 8 bytes per token for the backward pass.
    """
    tables = (word_VD, position_LD, segment_2D)
    others = weight_D, bias_D, eps, *dropout_scalars(dropout), word_gradient_VD
    return _embedding_norm(input_ids_T, position_ids_T, segment_ids_T, *tables, *others)[0]


def unsupported_reasons(*arguments: Any, **_: Any) -> list[str]:
    tensors = arguments[3:8]
    reasons = tensor_reasons(*tensors) + width_reasons(tensors[0].shape[1])
    return reasons + mixed_reasons("tables, weight and bias", *tensors)


def configurations() -> list[Configuration]:
    return norm_configurations("fp32", _embedding_norm_forward, _embedding_norm_backward)
