"""Kernel of attention's forward pass."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportUnboundVariable=false

import triton
import triton.language as tl

from kernels.triton.attention.tiles import (
    INTERPRETED,
    VARYING,
    keep_columns,
    load_rows,
    of_keys,
    of_sequence,
    places_of_keys,
    product,
    scores_of,
    store_kept,
    store_rows,
    transposed_rows,
    upper_rows_of,
    zero_rows,
)
from kernels.triton.dropout import PLACES, draw_kept
from kernels.triton.quantize import SCALARS, cast_rows, cast_zeros


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SCALARS)
def attention_forward(
    query, key, value, output, scale, amax, cast, transposed, lse, kept, cu_seqlens_q, cu_seqlens_k, state, queries,
    groups, stream, threshold, kept_scale,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute attention for one block of queries of one head of one sequence.

    The grid is (blocks of queries, heads, sequences + 1). The programs with the last index on axis 2 write zeros to the
    rows after all sequences.
    """
    DRAWS: tl.constexpr = BLOCK_K // PLACES
    # log2(e) / sqrt(E). The factor log2(e) is there because the hardware computes exp2, not exp.
    SCORE_SCALE: tl.constexpr = 1.4426950408889634 / HEAD_SIZE**0.5
    head, sequence = tl.program_id(1), tl.program_id(2)
    STRIDE: tl.constexpr = HEADS * HEAD_SIZE
    output += head * HEAD_SIZE
    if cast is not None:
        cast += head * HEAD_SIZE
        transposed += transposed_rows(head * HEAD_SIZE, queries)
    start_q = tl.load(cu_seqlens_q + sequence)
    first = tl.program_id(0) * BLOCK_Q
    if sequence == tl.num_programs(2) - 1:  # this program is for the rows after all sequences
        step = tl.num_programs(0) * BLOCK_Q
        zero_rows(output, start_q + first, queries, step, STRIDE, HEAD_SIZE, BLOCK_Q)
        if cast is not None:
            cast_zeros(cast, transposed, start_q + first, queries, step, STRIDE, HEAD_SIZE, BLOCK_Q)
        return
    length_q = tl.load(cu_seqlens_q + sequence + 1) - start_q
    # The grid has enough blocks for the longest possible sequence. In a shorter sequence, some programs have no queries.
    if first >= length_q:
        return
    start_k = tl.load(cu_seqlens_k + sequence)
    length_k = tl.load(cu_seqlens_k + sequence + 1) - start_k

    rows = first + tl.arange(0, BLOCK_Q)
    valid_q = rows < length_q
    query += start_q.to(tl.int64) * QUERY_STRIDE + head * HEAD_SIZE
    key += start_k.to(tl.int64) * KEY_STRIDE + head * HEAD_SIZE
    value += start_k.to(tl.int64) * VALUE_STRIDE + head * HEAD_SIZE
    query_QE = load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
    places = places_of_keys(BLOCK_K)
    if DROPOUT:
        seed, step = tl.load(state), tl.load(state + 1)
        upper_rows = first + upper_rows_of(BLOCK_Q)
        kept = of_sequence(kept, queries, groups, head, start_q)
    # Every block contains at least one key, so the maximum is finite after the first block. An argument of exp2 is therefore
    # never -inf - -inf, which would be NaN. In the first block, the factor ``rescale`` is exp2(-inf) = 0.
    maximum = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    context = tl.zeros((BLOCK_Q, HEAD_SIZE), tl.float32)
    for first_k in range(0, length_k, BLOCK_K):
        positions = first_k + places
        key_KE = load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
        scores = scores_of(query_QE, key_KE, positions, first_k, length_k)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores * SCORE_SCALE - (new_maximum * SCORE_SCALE)[:, None])
        rescale = tl.exp2((maximum - new_maximum) * SCORE_SCALE)
        total = total * rescale + tl.sum(weights, 1)  # sum before dropout, which must not change softmax's sum
        if DROPOUT:
            draws = tl.arange(0, DRAWS) + first_k // PLACES
            drawn = draw_kept(seed, step, stream, threshold, ((start_q + rows) * HEADS + head)[:, None], draws[None, :])
            store_kept(of_keys(kept, queries, first_k, BLOCK_K), drawn, upper_rows, length_q)
            weights = keep_columns(weights, drawn)
        value_KE = load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
        if not INTERPRETED:  # the interpreter truncates casts to bf16, and multiplies bf16 wrongly
            weights = weights.to(value_KE.dtype)
        context = context * rescale[:, None] + product(weights, value_KE)
        maximum = new_maximum
    total = tl.where(total > 0, total, 1.0)  # avoid 0 / 0 in a sequence without keys
    if DROPOUT:
        context *= kept_scale
    context /= total[:, None]
    # Store log2 of the sum of exp2(score * SCORE_SCALE), because the backward kernels subtract it inside exp2.
    tl.store(lse + head.to(tl.int64) * queries + start_q + rows, maximum * SCORE_SCALE + tl.log2(total), mask=valid_q)
    # Round to the output's type before the cast to FP8, so that the FP8 result equals a cast of the stored output.
    context = context.to(output.dtype.element_ty)
    output += start_q.to(tl.int64) * STRIDE
    store_rows(output, context, rows, length_q, STRIDE, HEAD_SIZE)
    if cast is not None:
        value = context.to(tl.float32)
        cast_rows(value, scale, amax, cast, transposed, None, start_q, rows, length_q, queries, STRIDE, HEAD_SIZE)
