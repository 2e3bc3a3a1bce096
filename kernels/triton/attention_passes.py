"""The kernels of ``kernels.triton.attention``: what one program does.

Shape legend in ``kernels/__init__.py``. Where keys are the columns of a product they stand in an order of their own inside a
block (``_places``): the thread that makes a draw for 16 neighbouring keys also holds, in the product's result, their scores.

Drawing is most of what dropout costs, so the forward pass writes what it kept, a bit an element, and the backward passes
read that: 1 / 8 byte in place of some six integer operations. ``kept`` is int16 [H, ``groups``, Q, 4]: a draw for 16 keys,
four to a group.

Where products in FP8 are next, results are also cast, transposed and added up by columns, as far as ``cast``, ``transposed``
and ``sums`` are there; gradients are then written in FP8 alone.

Scores are scaled where exp2 takes them, in the one instruction that also subtracts the maximum.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportUnboundVariable=false
# ruff: noqa: ANN001, ANN201, ANN202  (what a kernel is given, and gives, has types of the compiler's own)

import triton
import triton.language as tl

from kernels.triton.dropout import PLACES, draw_kept
from kernels.triton.fp8 import SCALARS, cast_rows, cast_zeros

KEYS_A_GROUP = 64
_DRAWS_A_GROUP = tl.constexpr(KEYS_A_GROUP // PLACES.value)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# A captured graph or a new length must not compile anew because a number happens to be 1 or a multiple of 16.
_VARYING = ["queries", "keys", "groups", "stream", "threshold"]


@triton.jit
def _places(BLOCK_K: tl.constexpr):
    """Order of a block's keys, as the columns of a product: the 16 of a draw in pairs, a pair of each draw in turn."""
    DRAWS: tl.constexpr = BLOCK_K // PLACES
    # In a result of mma and of wgmma, thread t of each four has columns 2 t and 2 t + 1 of every eight.
    columns = tl.arange(0, BLOCK_K)
    return columns // 2 % DRAWS * PLACES + columns // (2 * DRAWS) * 2 + columns % 2


@triton.jit
def _keep_columns(x, kept):
    """Zero what is dropped of fp32 ``x`` [rows, 16 * draws], by int32 [rows, draws]; keys in the order of ``_places``."""
    ROWS: tl.constexpr = kept.shape[0]
    DRAWS: tl.constexpr = kept.shape[1]
    pairs, ones = tl.arange(0, PLACES // 2)[None, :, None, None], tl.arange(0, 2)[None, None, None, :]
    kept, bits = tl.broadcast(kept[:, None, :, None], 1 << (pairs * 2 + ones))
    return _keep(x, tl.reshape(kept, (ROWS, PLACES * DRAWS)), tl.reshape(bits, (ROWS, PLACES * DRAWS)))


@triton.jit
def _keep_rows(x, kept):
    """Zero what is dropped of fp32 ``x`` [16 * draws, columns], by int32 [draws, columns]; keys in their own order."""
    DRAWS: tl.constexpr = kept.shape[0]
    COLUMNS: tl.constexpr = kept.shape[1]
    kept, bits = tl.broadcast(kept[:, None, :], 1 << tl.arange(0, PLACES)[None, :, None])
    return _keep(x, tl.reshape(kept, (PLACES * DRAWS, COLUMNS)), tl.reshape(bits, (PLACES * DRAWS, COLUMNS)))


@triton.jit
def _keep(x, kept, bit):
    """Return fp32 ``x`` where ``kept`` has the bit, else 0.

    In the GPU's language: of ``tl.where`` the compiler makes vectors of bits, or chooses after rounding, in halves of words.
    """
    if _INTERPRETED:
        return tl.where((kept & bit) != 0, x, 0.0)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 both;
        .reg .pred kept;
        and.b32 both, $2, $3;
        setp.ne.b32 kept, both, 0;
        selp.f32 $0, $1, 0f00000000, kept;
        }""",
        "=f,f,r,r",
        [x, kept, bit],
        tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _of_sequence(kept, queries, groups, head, start_q):
    """Return where a sequence's draws for a head start."""
    return kept + ((head * groups).to(tl.int64) * queries + start_q) * _DRAWS_A_GROUP


@triton.jit
def _of_keys(kept, queries, first_k, BLOCK_K: tl.constexpr):
    """Return where the draws for a block of keys from ``first_k`` on start: those of 64 keys stand together."""
    tl.static_assert(BLOCK_K <= 64)
    kept += first_k // 64 * queries * _DRAWS_A_GROUP
    if BLOCK_K < 64:
        kept += first_k % 64 // PLACES
    return kept


@triton.jit
def _upper_rows(ROWS: tl.constexpr):
    """Return every other eight of rows: half of them, and each thread has one of either half in a product's result.

    What is stored or loaded for a half is in the registers where it is drawn or needed; of all rows at once it would not be.
    """
    # In a result of mma and of wgmma a thread has rows g and g + 8 of every sixteen.
    rows = tl.arange(0, ROWS // 2)
    return rows // 8 * 16 + rows % 8


@triton.jit
def _store_kept(kept, drawn, rows, stop):
    """Store 16 bits a draw, int32 [rows, draws]; ``rows`` are those of ``_upper_rows``, and ``stop`` ends them."""
    ROWS: tl.constexpr = drawn.shape[0]
    DRAWS: tl.constexpr = drawn.shape[1]
    upper, lower = tl.split(tl.permute(tl.reshape(drawn, (ROWS // 16, 2, 8, DRAWS)), (0, 2, 3, 1)))
    pointers = kept + (rows * _DRAWS_A_GROUP)[:, None] + tl.arange(0, DRAWS)[None, :]
    tl.store(pointers, tl.reshape(upper, (ROWS // 2, DRAWS)).to(tl.int16), mask=(rows < stop)[:, None])
    pointers += 8 * _DRAWS_A_GROUP
    tl.store(pointers, tl.reshape(lower, (ROWS // 2, DRAWS)).to(tl.int16), mask=(rows + 8 < stop)[:, None])


@triton.jit
def _load_kept(kept, rows, stop, DRAWS: tl.constexpr):
    """Load what ``_store_kept`` stored, int32 [rows, draws]."""
    ROWS: tl.constexpr = 2 * rows.shape[0]
    pointers = kept + (rows * _DRAWS_A_GROUP)[:, None] + tl.arange(0, DRAWS)[None, :]
    upper = tl.load(pointers, mask=(rows < stop)[:, None], other=0)
    lower = tl.load(pointers + 8 * _DRAWS_A_GROUP, mask=(rows + 8 < stop)[:, None], other=0)
    halves = tl.reshape(tl.join(upper, lower), (ROWS // 16, 8, DRAWS, 2))
    return tl.reshape(tl.permute(halves, (0, 3, 1, 2)), (ROWS, DRAWS)).to(tl.int32)


@triton.jit
def _product(left, right):
    """Matrix product in fp32."""
    if _INTERPRETED:  # the interpreter takes bf16 operands for integers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision="ieee")  # fp32 operands, else in TF32


@triton.jit
def _scores(query_QE, key_KE, positions, first_k, length_k):
    """Scores of a block of keys from ``first_k`` on, unscaled; in a sequence's last block -inf past its end."""
    scores = _product(query_QE, tl.trans(key_KE))
    # A branch that all threads take alike, in place of a selection for every block.
    if first_k + key_KE.shape[0] > length_k:
        scores = tl.where((positions < length_k)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _load_rows(base, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Load a head's ``rows``, 0 from ``stop`` on."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    # Zeros and not just anything: these rows take part in products, where a weight of 0 would not undo a NaN.
    return tl.load(pointers, mask=(rows < stop)[:, None], other=0.0)


@triton.jit
def _store_rows(base, tile, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Store a head's ``rows`` below ``stop``."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(rows < stop)[:, None])


@triton.jit
def _transposed_rows(row, tokens):
    """Return where a row of a transposed cast starts."""
    return row.to(tl.int64) * ((tokens + 15) // 16 * 16)


@triton.jit
def _sums(sums, start, sequence, column, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a block of a sequence puts its sums of columns: no two put theirs into one row."""
    # Sequence s has rows start // BLOCK + s to stop // BLOCK + s at most, and the next one begins a row after that.
    return sums + (start // BLOCK + sequence + tl.program_id(0)).to(tl.int64) * STRIDE + column


@triton.jit
def _zero_rows(base, start, stop, step, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Zero to every ``step``-th block of a head's rows from ``start`` to ``stop``."""
    base += start.to(tl.int64) * STRIDE
    for first in range(0, stop - start, step):
        zeros = tl.zeros((BLOCK, HEAD_SIZE), tl.float32)
        rows = first + tl.arange(0, BLOCK).to(tl.int64)  # all that is not a sequence: more than a 32-bit offset spans
        _store_rows(base, zeros, rows, stop - start, STRIDE, HEAD_SIZE)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=SCALARS)
def attention_forward(
    query,
    key,
    value,
    output,
    scale,
    amax,
    cast,
    transposed,
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
    LARGEST: tl.constexpr,
):
    """Attend from a block of queries of one head of one sequence.

    The last program on axis 2 owns the rows past all sequences and zeroes them.
    """
    DRAWS: tl.constexpr = BLOCK_K // PLACES
    SCORE_SCALE: tl.constexpr = 1.4426950408889634 / HEAD_SIZE**0.5  # base 2: exp2 is what the hardware has
    head, sequence = tl.program_id(1), tl.program_id(2)
    STRIDE: tl.constexpr = HEADS * HEAD_SIZE
    output += head * HEAD_SIZE
    if cast is not None:
        cast += head * HEAD_SIZE
        transposed += _transposed_rows(head * HEAD_SIZE, queries)
    start_q = tl.load(cu_seqlens_q + sequence)
    first = tl.program_id(0) * BLOCK_Q
    if sequence == tl.num_programs(2) - 1:  # the grid has a program more than there are sequences
        step = tl.num_programs(0) * BLOCK_Q
        _zero_rows(output, start_q + first, queries, step, STRIDE, HEAD_SIZE, BLOCK_Q)
        if cast is not None:
            cast_zeros(cast, transposed, start_q + first, queries, step, STRIDE, HEAD_SIZE, BLOCK_Q)
        return
    length_q = tl.load(cu_seqlens_q + sequence + 1) - start_q
    # The grid is that of the longest sequence: others have programs to spare.
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
    places = _places(BLOCK_K)  # sums over keys are the same in any order
    if DROPOUT:
        seed, step = tl.load(state), tl.load(state + 1)
        upper_rows = first + _upper_rows(BLOCK_Q)
        kept = _of_sequence(kept, queries, groups, head, start_q)
    # Every block has a key, so that a maximum is finite after the first: exp2 never gets -inf less -inf, which is NaN.
    # The first rescaling is by exp2(-inf) = 0.
    maximum = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    context = tl.zeros((BLOCK_Q, HEAD_SIZE), tl.float32)
    for first_k in range(0, length_k, BLOCK_K):
        positions = first_k + places
        key_KE = _load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
        scores = _scores(query_QE, key_KE, positions, first_k, length_k)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores * SCORE_SCALE - (new_maximum * SCORE_SCALE)[:, None])
        rescale = tl.exp2((maximum - new_maximum) * SCORE_SCALE)
        total = total * rescale + tl.sum(weights, 1)  # before dropout, which takes what softmax has normalised
        if DROPOUT:
            draws = tl.arange(0, DRAWS) + first_k // PLACES
            drawn = draw_kept(seed, step, stream, threshold, ((start_q + rows) * HEADS + head)[:, None], draws[None, :])
            _store_kept(_of_keys(kept, queries, first_k, BLOCK_K), drawn, upper_rows, length_q)
            weights = _keep_columns(weights, drawn)
        value_KE = _load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
        if not _INTERPRETED:  # whose bf16 products are wrong, and whose casts truncate
            weights = weights.to(value_KE.dtype)
        context = context * rescale[:, None] + _product(weights, value_KE)
        maximum = new_maximum
    total = tl.where(total > 0, total, 1.0)  # a sequence without keys
    if DROPOUT:
        context *= kept_scale
    context /= total[:, None]
    # In base 2 and of scaled scores, as the backward passes subtract it inside their exp2.
    tl.store(lse + head.to(tl.int64) * queries + start_q + rows, maximum * SCORE_SCALE + tl.log2(total), mask=valid_q)
    # Rounded before it is cast: FP8 is then what a pass over the stored output would make.
    context = context.to(output.dtype.element_ty)
    output += start_q.to(tl.int64) * STRIDE
    _store_rows(output, context, rows, length_q, STRIDE, HEAD_SIZE)
    if cast is not None:
        value = context.to(tl.float32)
        cast_rows(
            value, scale, amax, cast, transposed, None, start_q, rows, length_q, queries, STRIDE, HEAD_SIZE, LARGEST
        )


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=SCALARS)
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
    scale,
    amax,
    cast,
    transposed,
    sums,
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
    LARGEST: tl.constexpr,
):
    """Gradient of a block of queries, divided as in ``attention_forward``; also writes ``delta``, fp32 [H, Q].

    That is each row's sum of output times its gradient, without dropout's scale.
    """
    OUTPUT_STRIDE: tl.constexpr = HEADS * HEAD_SIZE
    SCORE_SCALE: tl.constexpr = 1.4426950408889634 / HEAD_SIZE**0.5
    head, sequence = tl.program_id(1), tl.program_id(2)
    if cast is None:
        query_gradient += head * HEAD_SIZE
    else:
        cast += head * HEAD_SIZE
        transposed += _transposed_rows(head * HEAD_SIZE, queries)
    start_q = tl.load(cu_seqlens_q + sequence)
    first = tl.program_id(0) * BLOCK_Q
    if sequence == tl.num_programs(2) - 1:  # the grid has a program more than there are sequences
        step = tl.num_programs(0) * BLOCK_Q
        if cast is None:
            _zero_rows(query_gradient, start_q + first, queries, step, QUERY_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_Q)
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
    query_QE = _load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
    upstream = _load_rows(output_gradient + output_offset, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
    context = _load_rows(output + output_offset, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
    delta_Q = tl.sum(upstream.to(tl.float32) * context.to(tl.float32), 1)
    if DROPOUT:
        # The scale is a factor of all that goes into the gradient: it is left out here and multiplied once, at the end.
        delta_Q /= kept_scale
    head_row = head.to(tl.int64) * queries + start_q
    tl.store(delta + head_row + rows, delta_Q, mask=valid_q)
    lse_Q = tl.load(lse + head_row + rows, mask=valid_q, other=float("inf"))  # weights of rows that are not: 0
    places = _places(BLOCK_K)
    if DROPOUT:
        kept = _of_sequence(kept, queries, groups, head, start_q)
        upper_rows = first + _upper_rows(BLOCK_Q)
    total = tl.zeros((BLOCK_Q, HEAD_SIZE), tl.float32)
    for first_k in range(0, length_k, BLOCK_K):
        positions = first_k + places
        key_KE = _load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
        value_KE = _load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
        scores = _scores(query_QE, key_KE, positions, first_k, length_k)
        weights = tl.exp2(scores * SCORE_SCALE - lse_Q[:, None])
        weight_gradient = _product(upstream, tl.trans(value_KE))
        if DROPOUT:
            drawn = _load_kept(_of_keys(kept, queries, first_k, BLOCK_K), upper_rows, length_q, BLOCK_K // PLACES)
            weight_gradient = _keep_columns(weight_gradient, drawn)
        # The derivative of softmax; weights are those before dropout, which only the gradient that comes in has passed.
        score_gradient = weights * (weight_gradient - delta_Q[:, None])
        if not _INTERPRETED:
            score_gradient = score_gradient.to(key_KE.dtype)
        total += _product(score_gradient, key_KE)
    total *= 1.0 / HEAD_SIZE**0.5
    if DROPOUT:
        total *= kept_scale
    if cast is None:
        query_gradient += start_q.to(tl.int64) * QUERY_GRADIENT_STRIDE
        _store_rows(query_gradient, total, rows, length_q, QUERY_GRADIENT_STRIDE, HEAD_SIZE)
    else:
        sums = _sums(sums, start_q, sequence, head * HEAD_SIZE, QUERY_GRADIENT_STRIDE, BLOCK_Q)
        # Rounded before it is cast, as the output is.
        value = total.to(query.dtype.element_ty).to(tl.float32)
        cast_rows(
            value, scale, amax, cast, transposed, sums, start_q, rows, length_q, queries,
            QUERY_GRADIENT_STRIDE, HEAD_SIZE, LARGEST,
        )  # fmt: skip


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=SCALARS)
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
    scale,
    amax,
    cast,
    transposed,
    sums,
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
    LARGEST: tl.constexpr,
):
    """Gradients of a block of keys and values of one head of one sequence.

    Launched after ``attention_backward_queries``, whose ``delta`` it reads.
    """
    DRAWS: tl.constexpr = BLOCK_K // PLACES
    OUTPUT_STRIDE: tl.constexpr = HEADS * HEAD_SIZE
    SCORE_SCALE: tl.constexpr = 1.4426950408889634 / HEAD_SIZE**0.5
    head, sequence = tl.program_id(1), tl.program_id(2)
    if cast is None:
        key_gradient += head * HEAD_SIZE
        value_gradient += head * HEAD_SIZE
    else:  # columns of keys before those of values
        key_column, value_column = head * HEAD_SIZE, (HEADS + head) * HEAD_SIZE
        key_transposed = transposed + _transposed_rows(key_column, keys)
        value_transposed = transposed + _transposed_rows(value_column, keys)
    start_k = tl.load(cu_seqlens_k + sequence)
    first = tl.program_id(0) * BLOCK_K
    if sequence == tl.num_programs(2) - 1:  # the grid has a program more than there are sequences
        step = tl.num_programs(0) * BLOCK_K
        start = start_k + first
        if cast is None:
            _zero_rows(key_gradient, start, keys, step, KEY_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_K)
            _zero_rows(value_gradient, start, keys, step, VALUE_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_K)
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
    key_KE = _load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
    value_KE = _load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
    if DROPOUT:
        kept = _of_sequence(kept, queries, groups, head, start_q)
        kept = _of_keys(kept, queries, first, BLOCK_K) + tl.arange(0, DRAWS)[:, None]
    key_total = tl.zeros((BLOCK_K, HEAD_SIZE), tl.float32)
    value_total = tl.zeros((BLOCK_K, HEAD_SIZE), tl.float32)
    for first_q in range(0, length_q, BLOCK_Q):
        rows = first_q + tl.arange(0, BLOCK_Q)
        valid_q = rows < length_q
        query_QE = _load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
        upstream = _load_rows(output_gradient, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
        # Of rows past the end the weights are finite, and upstream and delta zero: they add nothing to either sum.
        lse_Q = tl.load(lse + rows, mask=valid_q, other=0.0)
        delta_Q = tl.load(delta + rows, mask=valid_q, other=0.0)
        # Keys are rows here, as in the sums: the next products take weights and gradients from registers. Keys past the
        # end are zero rows, whose weights may overflow; no other row meets them, and their sums are not stored.
        scores = _product(key_KE, tl.trans(query_QE))
        weights = tl.exp2(scores * SCORE_SCALE - lse_Q[None, :])
        dropped = weights
        if DROPOUT:
            drawn = tl.load(kept + (rows * _DRAWS_A_GROUP)[None, :], mask=valid_q[None, :], other=0)
            dropped = _keep_rows(weights, drawn.to(tl.int32))
        weight_gradient = _product(value_KE, tl.trans(upstream))
        score_gradient = dropped * weight_gradient - weights * delta_Q[None, :]
        if not _INTERPRETED:
            dropped, score_gradient = dropped.to(query_QE.dtype), score_gradient.to(query_QE.dtype)
        value_total += _product(dropped, upstream)
        key_total += _product(score_gradient, query_QE)
    key_total *= 1.0 / HEAD_SIZE**0.5
    if DROPOUT:
        key_total *= kept_scale
        value_total *= kept_scale
    if cast is None:
        key_gradient += start_k.to(tl.int64) * KEY_GRADIENT_STRIDE
        value_gradient += start_k.to(tl.int64) * VALUE_GRADIENT_STRIDE
        _store_rows(key_gradient, key_total, positions, length_k, KEY_GRADIENT_STRIDE, HEAD_SIZE)
        _store_rows(value_gradient, value_total, positions, length_k, VALUE_GRADIENT_STRIDE, HEAD_SIZE)
    else:
        sums = _sums(sums, start_k, sequence, 0, KEY_GRADIENT_STRIDE, BLOCK_K)
        # A block of keys and values is one row of sums: keys' columns stand before those of values there too.
        values = key_total.to(key.dtype.element_ty).to(tl.float32)
        cast_rows(
            values, scale, amax, cast + key_column, key_transposed, sums + key_column, start_k, positions, length_k,
            keys, KEY_GRADIENT_STRIDE, HEAD_SIZE, LARGEST,
        )  # fmt: skip
        values = value_total.to(value.dtype.element_ty).to(tl.float32)
        cast_rows(
            values, scale, amax, cast + value_column, value_transposed, sums + value_column, start_k, positions,
            length_k, keys, VALUE_GRADIENT_STRIDE, HEAD_SIZE, LARGEST,
        )  # fmt: skip
