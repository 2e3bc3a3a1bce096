"""Kernels of attention's backward pass: one for queries, one for keys and values."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportUnboundVariable=false

import triton
import triton.language as tl

from kernels.triton.attention.tiles import (
    DRAWS_A_GROUP,
    INTERPRETED,
    VARYING,
    keep_columns,
    keep_rows,
    load_kept,
    load_rows,
    of_keys,
    of_sequence,
    place_of_sums,
    places_of_keys,
    product,
    scores_of,
    store_rows,
    transposed_rows,
    upper_rows_of,
    zero_rows,
)
from kernels.triton.dropout import PLACES
from kernels.triton.quantize import SCALARS, cast_rows, cast_zeros


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SCALARS)
def attention_backward_queries(
    output_gradient, query, key, value, output, lse, delta, kept, query_gradient, scale, amax, cast, transposed, sums,
    cu_seqlens_q, cu_seqlens_k, queries, groups, kept_scale,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    QUERY_GRADIENT_STRIDE: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one block of queries of one head of one sequence, and ``delta``, fp32 [H, Q].

    ``delta`` is the sum over a row of output times output gradient, divided by dropout's scale. The grid is the grid of
    ``attention_forward``: (blocks of queries, heads, sequences + 1). The programs with the last index on axis 2 write
    zeros to the rows after all sequences.
    """
    OUTPUT_STRIDE: tl.constexpr = HEADS * HEAD_SIZE
    SCORE_SCALE: tl.constexpr = 1.4426950408889634 / HEAD_SIZE**0.5
    head, sequence = tl.program_id(1), tl.program_id(2)
    if cast is None:
        query_gradient += head * HEAD_SIZE
    else:
        cast += head * HEAD_SIZE
        transposed += transposed_rows(head * HEAD_SIZE, queries)
    start_q = tl.load(cu_seqlens_q + sequence)
    first = tl.program_id(0) * BLOCK_Q
    if sequence == tl.num_programs(2) - 1:  # this program is for the rows after all sequences
        step = tl.num_programs(0) * BLOCK_Q
        if cast is None:
            zero_rows(query_gradient, start_q + first, queries, step, QUERY_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_Q)
        else:
            cast_zeros(cast, transposed, start_q + first, queries, step, QUERY_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_Q)
        return
    length_q = tl.load(cu_seqlens_q + sequence + 1) - start_q
    if first >= length_q:
        return
    start_k = tl.load(cu_seqlens_k + sequence)
    length_k = tl.load(cu_seqlens_k + sequence + 1) - start_k

    rows = first + tl.arange(0, BLOCK_Q)
    valid_q = rows < length_q
    query += start_q.to(tl.int64) * QUERY_STRIDE + head * HEAD_SIZE
    key += start_k.to(tl.int64) * KEY_STRIDE + head * HEAD_SIZE
    value += start_k.to(tl.int64) * VALUE_STRIDE + head * HEAD_SIZE
    output_offset = start_q.to(tl.int64) * OUTPUT_STRIDE + head * HEAD_SIZE
    query_QE = load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
    upstream = load_rows(output_gradient + output_offset, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
    context = load_rows(output + output_offset, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
    delta_Q = tl.sum(upstream.to(tl.float32) * context.to(tl.float32), 1)
    if DROPOUT:
        # ``delta_Q`` contains dropout's scale, because the output does. Divide by the scale here, because the whole gradient
        # is multiplied by it once at the end.
        delta_Q /= kept_scale
    head_row = head.to(tl.int64) * queries + start_q
    tl.store(delta + head_row + rows, delta_Q, mask=valid_q)
    # Rows past the end get infinity, which makes their softmax weights exp2(score - lse) zero.
    lse_Q = tl.load(lse + head_row + rows, mask=valid_q, other=float("inf"))
    places = places_of_keys(BLOCK_K)
    if DROPOUT:
        kept = of_sequence(kept, queries, groups, head, start_q)
        upper_rows = first + upper_rows_of(BLOCK_Q)
    total = tl.zeros((BLOCK_Q, HEAD_SIZE), tl.float32)
    for first_k in range(0, length_k, BLOCK_K):
        positions = first_k + places
        key_KE = load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
        value_KE = load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
        scores = scores_of(query_QE, key_KE, positions, first_k, length_k)
        weights = tl.exp2(scores * SCORE_SCALE - lse_Q[:, None])
        weight_gradient = product(upstream, tl.trans(value_KE))
        if DROPOUT:
            drawn = load_kept(of_keys(kept, queries, first_k, BLOCK_K), upper_rows, length_q, BLOCK_K // PLACES)
            weight_gradient = keep_columns(weight_gradient, drawn)
        # The derivative of softmax. ``weights`` are softmax's results before dropout, and dropout has already been
        # applied to ``weight_gradient``.
        score_gradient = weights * (weight_gradient - delta_Q[:, None])
        if not INTERPRETED:
            score_gradient = score_gradient.to(key_KE.dtype)
        total += product(score_gradient, key_KE)
    total *= 1.0 / HEAD_SIZE**0.5
    if DROPOUT:
        total *= kept_scale
    if cast is None:
        query_gradient += start_q.to(tl.int64) * QUERY_GRADIENT_STRIDE
        store_rows(query_gradient, total, rows, length_q, QUERY_GRADIENT_STRIDE, HEAD_SIZE)
    else:
        sums = place_of_sums(sums, start_q, sequence, head * HEAD_SIZE, QUERY_GRADIENT_STRIDE, BLOCK_Q)
        # Round to the input's type before the cast to FP8, as the forward pass rounds the output.
        value = total.to(query.dtype.element_ty).to(tl.float32)
        cast_rows(
            value, scale, amax, cast, transposed, sums, start_q, rows, length_q, queries,
            QUERY_GRADIENT_STRIDE, HEAD_SIZE,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SCALARS)
def attention_backward_keys(
    output_gradient, query, key, value, lse, delta, kept, key_gradient, value_gradient, scale, amax, cast, transposed,
    sums, cu_seqlens_q, cu_seqlens_k, queries, keys, groups, kept_scale,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, KEY_GRADIENT_STRIDE: tl.constexpr,
    VALUE_GRADIENT_STRIDE: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one block of keys and values of one head of one sequence.

    This kernel reads ``delta``, so it must run after ``attention_backward_queries``. The grid is (blocks of keys,
    heads, sequences + 1). The programs with the last index on axis 2 write zeros to the rows after all sequences.
    """
    DRAWS: tl.constexpr = BLOCK_K // PLACES
    OUTPUT_STRIDE: tl.constexpr = HEADS * HEAD_SIZE
    SCORE_SCALE: tl.constexpr = 1.4426950408889634 / HEAD_SIZE**0.5
    head, sequence = tl.program_id(1), tl.program_id(2)
    if cast is None:
        key_gradient += head * HEAD_SIZE
        value_gradient += head * HEAD_SIZE
    else:  # in a cast, the columns of the key gradients precede those of the value gradients
        key_column, value_column = head * HEAD_SIZE, (HEADS + head) * HEAD_SIZE
        key_transposed = transposed + transposed_rows(key_column, keys)
        value_transposed = transposed + transposed_rows(value_column, keys)
    start_k = tl.load(cu_seqlens_k + sequence)
    first = tl.program_id(0) * BLOCK_K
    if sequence == tl.num_programs(2) - 1:  # this program is for the rows after all sequences
        step = tl.num_programs(0) * BLOCK_K
        start = start_k + first
        if cast is None:
            zero_rows(key_gradient, start, keys, step, KEY_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_K)
            zero_rows(value_gradient, start, keys, step, VALUE_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_K)
        else:
            cast_zeros(cast + key_column, key_transposed, start, keys, step, KEY_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_K)
            cast += value_column
            cast_zeros(cast, value_transposed, start, keys, step, VALUE_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_K)
        return
    length_k = tl.load(cu_seqlens_k + sequence + 1) - start_k
    if first >= length_k:
        return
    start_q = tl.load(cu_seqlens_q + sequence)
    length_q = tl.load(cu_seqlens_q + sequence + 1) - start_q

    positions = first + tl.arange(0, BLOCK_K)
    query += start_q.to(tl.int64) * QUERY_STRIDE + head * HEAD_SIZE
    output_gradient += start_q.to(tl.int64) * OUTPUT_STRIDE + head * HEAD_SIZE
    key += start_k.to(tl.int64) * KEY_STRIDE + head * HEAD_SIZE
    value += start_k.to(tl.int64) * VALUE_STRIDE + head * HEAD_SIZE
    lse += head.to(tl.int64) * queries + start_q
    delta += head.to(tl.int64) * queries + start_q
    key_KE = load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
    value_KE = load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
    if DROPOUT:
        kept = of_sequence(kept, queries, groups, head, start_q)
        kept = of_keys(kept, queries, first, BLOCK_K) + tl.arange(0, DRAWS)[:, None]
    key_total = tl.zeros((BLOCK_K, HEAD_SIZE), tl.float32)
    value_total = tl.zeros((BLOCK_K, HEAD_SIZE), tl.float32)
    for first_q in range(0, length_q, BLOCK_Q):
        rows = first_q + tl.arange(0, BLOCK_Q)
        valid_q = rows < length_q
        query_QE = load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
        upstream = load_rows(output_gradient, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
        # For query rows past the end, ``weights`` are finite, and ``upstream`` and ``delta_Q`` are zero. These rows
        # therefore add nothing to the gradients of keys and values.
        lse_Q = tl.load(lse + rows, mask=valid_q, other=0.0)
        delta_Q = tl.load(delta + rows, mask=valid_q, other=0.0)
        # Compute transposed scores, [keys, queries], so that the products for the gradients of keys and values take
        # their left operand from registers. Keys past the end are rows of zeros, and their weights may overflow. These
        # rows do not mix with other rows, and their gradients are not stored.
        scores = product(key_KE, tl.trans(query_QE))
        weights = tl.exp2(scores * SCORE_SCALE - lse_Q[None, :])
        dropped = weights
        if DROPOUT:
            drawn = tl.load(kept + (rows * DRAWS_A_GROUP)[None, :], mask=valid_q[None, :], other=0)
            dropped = keep_rows(weights, drawn.to(tl.int32))
        weight_gradient = product(value_KE, tl.trans(upstream))
        score_gradient = dropped * weight_gradient - weights * delta_Q[None, :]
        if not INTERPRETED:
            dropped, score_gradient = dropped.to(query_QE.dtype), score_gradient.to(query_QE.dtype)
        value_total += product(dropped, upstream)
        key_total += product(score_gradient, query_QE)
    key_total *= 1.0 / HEAD_SIZE**0.5
    if DROPOUT:
        key_total *= kept_scale
        value_total *= kept_scale
    if cast is None:
        key_gradient += start_k.to(tl.int64) * KEY_GRADIENT_STRIDE
        value_gradient += start_k.to(tl.int64) * VALUE_GRADIENT_STRIDE
        store_rows(key_gradient, key_total, positions, length_k, KEY_GRADIENT_STRIDE, HEAD_SIZE)
        store_rows(value_gradient, value_total, positions, length_k, VALUE_GRADIENT_STRIDE, HEAD_SIZE)
    else:
        sums = place_of_sums(sums, start_k, sequence, 0, KEY_GRADIENT_STRIDE, BLOCK_K)
        # A block writes one row of sums: first the columns of the key gradients, then the columns of the value gradients.
        values = key_total.to(key.dtype.element_ty).to(tl.float32)
        cast_rows(
            values, scale, amax, cast + key_column, key_transposed, sums + key_column, start_k, positions, length_k,
            keys, KEY_GRADIENT_STRIDE, HEAD_SIZE,
        )  # fmt: skip
        values = value_total.to(value.dtype.element_ty).to(tl.float32)
        cast_rows(
            values, scale, amax, cast + value_column, value_transposed, sums + value_column, start_k, positions,
            length_k, keys, VALUE_GRADIENT_STRIDE, HEAD_SIZE,
        )  # fmt: skip
