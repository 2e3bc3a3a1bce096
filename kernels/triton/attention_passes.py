"""The kernels of ``kernels.triton.attention``: what one program does.

Shape legend in ``kernels/__init__.py``. Keys stand in an order of their own inside a block. A draw of the generator serves 8
neighbouring keys; with key 8 g + j in column j * (BLOCK_K / 8) + g, the thread that draws also holds, in a matrix product's
result, the scores that it draws for.

Drawing is by far the most of what dropout costs, so the forward pass writes what it kept, a bit an element, and the
backward passes read that: 1 / 8 byte in place of some ten integer operations. ``kept`` is uint8 [H, ``groups``, Q, 8]:
eight keys to a byte, 64 to a group.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202  (what a kernel is given, and gives, has types of the compiler's own)

import triton
import triton.language as tl

from kernels.reference.random import PLACES_A_DRAW, ROUNDS

KEYS_A_GROUP = 64
_PLACES = tl.constexpr(PLACES_A_DRAW)
_ROUNDS = tl.constexpr(ROUNDS)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# A captured graph or a new length must not compile anew because a number happens to be 1 or a multiple of 16.
_VARYING = ["queries", "keys", "groups", "stream", "threshold"]


@triton.jit
def _draw(state, stream, threshold, rows, draws):
    """Draw what dropout keeps, a byte a draw: uint8 [rows, draws], bit j for its place j."""
    seed, step = tl.load(state), tl.load(state + 1).to(tl.uint32)
    words = tl.philox(seed, draws[None, :], stream, rows[:, None], step, n_rounds=_ROUNDS)
    kept = _pair(words[0], threshold) | (_pair(words[1], threshold) << 2)
    kept |= (_pair(words[2], threshold) << 4) | (_pair(words[3], threshold) << 6)
    return kept.to(tl.uint8)


@triton.jit
def _pair(word, threshold):
    """Two bits for the two places that a word is for, the low half's first."""
    low, high = (word & 0xFFFF).to(tl.int32) >= threshold, (word >> 16).to(tl.int32) >= threshold
    return low.to(tl.int32) | (high.to(tl.int32) << 1)


@triton.jit
def _unpack(kept):
    """Unpack bytes to bool [rows, 8 * draws]: column j * draws + g is bit j of draw g."""
    bits = kept.to(tl.int32)
    halves = tl.join(bits, bits >> 4)
    quarters = tl.join(halves, halves >> 2)
    singles = tl.permute(tl.join(quarters, quarters >> 1), (0, 2, 3, 4, 1))  # [rows, bit's number, high to low, draws]
    return tl.reshape((singles & 1) != 0, (kept.shape[0], 8 * kept.shape[1]))


@triton.jit
def _byte_pointers(kept, queries, rows, draws):
    """Return pointers to a head's bytes, [rows, draws]: those of 64 keys stand together, for each row in turn.

    So a block of rows by 64 keys is one piece of memory.
    """
    return kept + (rows[:, None] * 8 + (draws // 8 * (queries * 8) + draws % 8)[None, :])


@triton.jit
def _product(left, right):
    """Matrix product in fp32."""
    if _INTERPRETED:  # the interpreter takes bf16 operands for integers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _load_rows(base, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Load a head's ``rows``, 0 from ``stop`` on."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    return tl.load(pointers, mask=(rows < stop)[:, None], other=0.0)


@triton.jit
def _store_rows(base, tile, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Store a head's ``rows`` below ``stop``."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(rows < stop)[:, None])


@triton.jit
def _zero_rows(base, start, stop, step, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Zero to every ``step``-th block of a head's rows from ``start`` to ``stop``."""
    base += start.to(tl.int64) * STRIDE
    for first in range(0, stop - start, step):
        zeros = tl.zeros((BLOCK, HEAD_SIZE), tl.float32)
        rows = first + tl.arange(0, BLOCK).to(tl.int64)  # all that is not a sequence: more than a 32-bit offset spans
        _store_rows(base, zeros, rows, stop - start, STRIDE, HEAD_SIZE)


@triton.jit(do_not_specialize=_VARYING)
def attention_forward(
    query,
    key,
    value,
    output,
    lse,
    kept,
    cu_seqlens_q,
    cu_seqlens_k,
    state,
    queries,
    groups,
    stream,
    threshold,
    kept_scale,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Attend from a block of queries of one head of one sequence.

    The last program on axis 2 owns the rows past all sequences and zeroes them.
    """
    DRAWS: tl.constexpr = BLOCK_K // _PLACES
    SCORE_SCALE: tl.constexpr = 1.4426950408889634 / HEAD_SIZE**0.5  # base 2: exp2 is what the hardware has
    head, sequence = tl.program_id(1), tl.program_id(2)
    output += head * HEAD_SIZE
    if DROPOUT:
        kept += (head * groups).to(tl.int64) * queries * 8
    start_q = tl.load(cu_seqlens_q + sequence)
    first = tl.program_id(0) * BLOCK_Q
    if sequence == tl.num_programs(2) - 1:  # the grid has a program more than there are sequences
        step = tl.num_programs(0) * BLOCK_Q
        _zero_rows(output, start_q + first, queries, step, HEADS * HEAD_SIZE, HEAD_SIZE, BLOCK_Q)
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
    query_QE = _load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
    # Keys in the order in which `_unpack` has their bits: sums over keys are the same in any order.
    places = tl.arange(0, BLOCK_K) % DRAWS * _PLACES + tl.arange(0, BLOCK_K) // DRAWS
    maximum = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    context = tl.zeros((BLOCK_Q, HEAD_SIZE), tl.float32)
    for first_k in range(0, length_k, BLOCK_K):
        positions = first_k + places
        valid_k = positions < length_k
        key_KE = _load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
        scores = _product(query_QE, tl.trans(key_KE)) * SCORE_SCALE
        scores = tl.where(valid_k[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)  # before dropout, which takes what softmax has normalised
        if DROPOUT:
            draws = tl.arange(0, DRAWS) + first_k // _PLACES
            drawn = _draw(state, stream, threshold, (start_q + rows) * HEADS + head, draws)
            inside = valid_q[:, None] & (draws * _PLACES < length_k)[None, :]
            tl.store(_byte_pointers(kept, queries, start_q + rows, draws), drawn, mask=inside)
            weights = tl.where(_unpack(drawn), weights, 0.0)
        value_KE = _load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
        if not _INTERPRETED:  # whose bf16 products are wrong, and whose casts truncate
            weights = weights.to(value_KE.dtype)
        context = context * rescale[:, None] + _product(weights, value_KE)
        maximum = new_maximum
    total = tl.where(total > 0, total, 1.0)  # a sequence without keys
    if DROPOUT:
        context *= kept_scale
    context /= total[:, None]
    tl.store(lse + head.to(tl.int64) * queries + start_q + rows, maximum + tl.log2(total), mask=valid_q)
    output += start_q.to(tl.int64) * (HEADS * HEAD_SIZE)
    _store_rows(output, context, rows, length_q, HEADS * HEAD_SIZE, HEAD_SIZE)


@triton.jit
def _weights_and_gradients(
    query_QE, key_KE, value_KE, upstream, lse_Q, delta_Q, kept, queries, rows_Q, draws, inside, DROPOUT: tl.constexpr
):
    """Softmax of a tile after dropout, and the gradient of its scores, both without the constants that all of them share.

    ``rows_Q`` and ``draws`` are the places in dropout's mask, ``inside`` [Q, draws] those that there are. Keys past the
    sequence's end are zero rows here: what they get is finite, meets the zeros again and is not stored.
    """
    SCORE_SCALE: tl.constexpr = 1.4426950408889634 / query_QE.shape[1] ** 0.5
    scores = _product(query_QE, tl.trans(key_KE)) * SCORE_SCALE
    # A weight is at most 1; the scores of keys past the end are 0 and may lie far above the logarithm of the sum.
    weights = tl.exp2(tl.minimum(scores - lse_Q[:, None], 0.0))
    weight_gradient = _product(upstream, tl.trans(value_KE))
    dropped = weights
    if DROPOUT:
        drawn = tl.load(_byte_pointers(kept, queries, rows_Q, draws), mask=inside, other=0)
        keep = _unpack(drawn)
        dropped = tl.where(keep, weights, 0.0)
        weight_gradient = tl.where(keep, weight_gradient, 0.0)
    score_gradient = weights * (weight_gradient - delta_Q[:, None])
    if not _INTERPRETED:
        dropped, score_gradient = dropped.to(query_QE.dtype), score_gradient.to(query_QE.dtype)
    return dropped, score_gradient


@triton.jit(do_not_specialize=_VARYING)
def attention_backward_queries(
    output_gradient,
    query,
    key,
    value,
    output,
    lse,
    delta,
    kept,
    query_gradient,
    cu_seqlens_q,
    cu_seqlens_k,
    queries,
    groups,
    kept_scale,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    QUERY_GRADIENT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Gradient of a block of queries, divided as in ``attention_forward``; also writes ``delta``, fp32 [H, Q].

    That is each row's sum of output times its gradient, without dropout's scale.
    """
    DRAWS: tl.constexpr = BLOCK_K // _PLACES
    OUTPUT_STRIDE: tl.constexpr = HEADS * HEAD_SIZE
    head, sequence = tl.program_id(1), tl.program_id(2)
    query_gradient += head * HEAD_SIZE
    if DROPOUT:
        kept += (head * groups).to(tl.int64) * queries * 8
    start_q = tl.load(cu_seqlens_q + sequence)
    first = tl.program_id(0) * BLOCK_Q
    if sequence == tl.num_programs(2) - 1:  # the grid has a program more than there are sequences
        step = tl.num_programs(0) * BLOCK_Q
        _zero_rows(query_gradient, start_q + first, queries, step, QUERY_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_Q)
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
    query_QE = _load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
    upstream = _load_rows(output_gradient + output_offset, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
    context = _load_rows(output + output_offset, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
    delta_Q = tl.sum(upstream.to(tl.float32) * context.to(tl.float32), 1)
    if DROPOUT:
        delta_Q /= kept_scale
    head_row = head.to(tl.int64) * queries + start_q
    tl.store(delta + head_row + rows, delta_Q, mask=valid_q)
    lse_Q = tl.load(lse + head_row + rows, mask=valid_q, other=float("inf"))  # weights of rows that are not: 0
    # Keys in the order in which `_unpack` has their bits: sums over keys are the same in any order.
    places = tl.arange(0, BLOCK_K) % DRAWS * _PLACES + tl.arange(0, BLOCK_K) // DRAWS
    total = tl.zeros((BLOCK_Q, HEAD_SIZE), tl.float32)
    for first_k in range(0, length_k, BLOCK_K):
        positions = first_k + places
        key_KE = _load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
        value_KE = _load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
        draws = tl.arange(0, DRAWS) + first_k // _PLACES
        inside = valid_q[:, None] & (draws * _PLACES < length_k)[None, :]
        _, score_gradient = _weights_and_gradients(
            query_QE, key_KE, value_KE, upstream, lse_Q, delta_Q, kept, queries, start_q + rows, draws, inside, DROPOUT
        )
        total += _product(score_gradient, key_KE)
    query_gradient += start_q.to(tl.int64) * QUERY_GRADIENT_STRIDE
    total *= 1.0 / HEAD_SIZE**0.5
    if DROPOUT:
        total *= kept_scale
    _store_rows(query_gradient, total, rows, length_q, QUERY_GRADIENT_STRIDE, HEAD_SIZE)


@triton.jit(do_not_specialize=_VARYING)
def attention_backward_keys(
    output_gradient,
    query,
    key,
    value,
    lse,
    delta,
    kept,
    key_gradient,
    value_gradient,
    cu_seqlens_q,
    cu_seqlens_k,
    queries,
    keys,
    groups,
    kept_scale,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    KEY_GRADIENT_STRIDE: tl.constexpr,
    VALUE_GRADIENT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Gradients of a block of keys and values of one head of one sequence.

    Launched after ``attention_backward_queries``, whose ``delta`` it reads.
    """
    DRAWS: tl.constexpr = BLOCK_K // _PLACES
    OUTPUT_STRIDE: tl.constexpr = HEADS * HEAD_SIZE
    head, sequence = tl.program_id(1), tl.program_id(2)
    key_gradient += head * HEAD_SIZE
    if DROPOUT:
        kept += (head * groups).to(tl.int64) * queries * 8
    value_gradient += head * HEAD_SIZE
    start_k = tl.load(cu_seqlens_k + sequence)
    first = tl.program_id(0) * BLOCK_K
    if sequence == tl.num_programs(2) - 1:  # the grid has a program more than there are sequences
        step = tl.num_programs(0) * BLOCK_K
        _zero_rows(key_gradient, start_k + first, keys, step, KEY_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_K)
        _zero_rows(value_gradient, start_k + first, keys, step, VALUE_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_K)
        return
    length_k = tl.load(cu_seqlens_k + sequence + 1) - start_k
    if first >= length_k:
        return
    start_q = tl.load(cu_seqlens_q + sequence)
    length_q = tl.load(cu_seqlens_q + sequence + 1) - start_q

    positions = first + tl.arange(0, BLOCK_K) % DRAWS * _PLACES + tl.arange(0, BLOCK_K) // DRAWS
    query += start_q.to(tl.int64) * QUERY_STRIDE + head * HEAD_SIZE
    output_gradient += start_q.to(tl.int64) * OUTPUT_STRIDE + head * HEAD_SIZE
    key += start_k.to(tl.int64) * KEY_STRIDE + head * HEAD_SIZE
    value += start_k.to(tl.int64) * VALUE_STRIDE + head * HEAD_SIZE
    lse += head.to(tl.int64) * queries + start_q
    delta += head.to(tl.int64) * queries + start_q
    key_KE = _load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
    value_KE = _load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
    draws = tl.arange(0, DRAWS) + first // _PLACES
    key_total = tl.zeros((BLOCK_K, HEAD_SIZE), tl.float32)
    value_total = tl.zeros((BLOCK_K, HEAD_SIZE), tl.float32)
    for first_q in range(0, length_q, BLOCK_Q):
        rows = first_q + tl.arange(0, BLOCK_Q)
        valid_q = rows < length_q
        query_QE = _load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
        upstream = _load_rows(output_gradient, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
        lse_Q = tl.load(lse + rows, mask=valid_q, other=float("inf"))
        delta_Q = tl.load(delta + rows, mask=valid_q, other=0.0)
        inside = valid_q[:, None] & (draws * _PLACES < length_k)[None, :]
        dropped, score_gradient = _weights_and_gradients(
            query_QE, key_KE, value_KE, upstream, lse_Q, delta_Q, kept, queries, start_q + rows, draws, inside, DROPOUT
        )
        value_total += _product(tl.trans(dropped), upstream)
        key_total += _product(tl.trans(score_gradient), query_QE)
    key_total *= 1.0 / HEAD_SIZE**0.5
    if DROPOUT:
        key_total *= kept_scale
        value_total *= kept_scale
    key_gradient += start_k.to(tl.int64) * KEY_GRADIENT_STRIDE
    value_gradient += start_k.to(tl.int64) * VALUE_GRADIENT_STRIDE
    _store_rows(key_gradient, key_total, positions, length_k, KEY_GRADIENT_STRIDE, HEAD_SIZE)
    _store_rows(value_gradient, value_total, positions, length_k, VALUE_GRADIENT_STRIDE, HEAD_SIZE)
