"""Parts that the kernels of attention share: tiles of queries and keys, scores, and what dropout keeps of them.

Shape legend in ``kernels/__init__.py``. Where keys are the columns of a product they stand in an order of their own inside a
block (``places_of_keys``): the thread that makes a draw for 16 neighbouring keys also holds, in the product's result, their
scores.

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

from kernels.triton.dropout import PLACES

KEYS_A_GROUP = 64
DRAWS_A_GROUP = tl.constexpr(KEYS_A_GROUP // PLACES.value)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# A captured graph or a new length must not compile anew because a number happens to be 1 or a multiple of 16.
VARYING = ["queries", "keys", "groups", "stream", "threshold"]


@triton.jit
def places_of_keys(BLOCK_K: tl.constexpr):
    """Order of a block's keys, as the columns of a product: the 16 of a draw in pairs, a pair of each draw in turn."""
    DRAWS: tl.constexpr = BLOCK_K // PLACES
    # In a result of mma and of wgmma, thread t of each four has columns 2 t and 2 t + 1 of every eight.
    columns = tl.arange(0, BLOCK_K)
    return columns // 2 % DRAWS * PLACES + columns // (2 * DRAWS) * 2 + columns % 2


@triton.jit
def keep_columns(x, kept):
    """Zero what is dropped of fp32 ``x`` [rows, 16 * draws], by int32 [rows, draws]; keys as in ``places_of_keys``."""
    ROWS: tl.constexpr = kept.shape[0]
    DRAWS: tl.constexpr = kept.shape[1]
    pairs, ones = tl.arange(0, PLACES // 2)[None, :, None, None], tl.arange(0, 2)[None, None, None, :]
    kept, bits = tl.broadcast(kept[:, None, :, None], 1 << (pairs * 2 + ones))
    return _keep(x, tl.reshape(kept, (ROWS, PLACES * DRAWS)), tl.reshape(bits, (ROWS, PLACES * DRAWS)))


@triton.jit
def keep_rows(x, kept):
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
    if INTERPRETED:
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
def of_sequence(kept, queries, groups, head, start_q):
    """Return where a sequence's draws for a head start."""
    return kept + ((head * groups).to(tl.int64) * queries + start_q) * DRAWS_A_GROUP


@triton.jit
def of_keys(kept, queries, first_k, BLOCK_K: tl.constexpr):
    """Return where the draws for a block of keys from ``first_k`` on start: those of 64 keys stand together."""
    tl.static_assert(BLOCK_K <= 64)
    kept += first_k // 64 * queries * DRAWS_A_GROUP
    if BLOCK_K < 64:
        kept += first_k % 64 // PLACES
    return kept


@triton.jit
def upper_rows_of(ROWS: tl.constexpr):
    """Return every other eight of rows: half of them, and each thread has one of either half in a product's result.

    What is stored or loaded for a half is in the registers where it is drawn or needed; of all rows at once it would not be.
    """
    # In a result of mma and of wgmma a thread has rows g and g + 8 of every sixteen.
    rows = tl.arange(0, ROWS // 2)
    return rows // 8 * 16 + rows % 8


@triton.jit
def store_kept(kept, drawn, rows, stop):
    """Store 16 bits a draw, int32 [rows, draws]; ``rows`` are those of ``upper_rows_of``, and ``stop`` ends them."""
    ROWS: tl.constexpr = drawn.shape[0]
    DRAWS: tl.constexpr = drawn.shape[1]
    upper, lower = tl.split(tl.permute(tl.reshape(drawn, (ROWS // 16, 2, 8, DRAWS)), (0, 2, 3, 1)))
    pointers = kept + (rows * DRAWS_A_GROUP)[:, None] + tl.arange(0, DRAWS)[None, :]
    tl.store(pointers, tl.reshape(upper, (ROWS // 2, DRAWS)).to(tl.int16), mask=(rows < stop)[:, None])
    pointers += 8 * DRAWS_A_GROUP
    tl.store(pointers, tl.reshape(lower, (ROWS // 2, DRAWS)).to(tl.int16), mask=(rows + 8 < stop)[:, None])


@triton.jit
def load_kept(kept, rows, stop, DRAWS: tl.constexpr):
    """Load what ``store_kept`` stored, int32 [rows, draws]."""
    ROWS: tl.constexpr = 2 * rows.shape[0]
    pointers = kept + (rows * DRAWS_A_GROUP)[:, None] + tl.arange(0, DRAWS)[None, :]
    upper = tl.load(pointers, mask=(rows < stop)[:, None], other=0)
    lower = tl.load(pointers + 8 * DRAWS_A_GROUP, mask=(rows + 8 < stop)[:, None], other=0)
    halves = tl.reshape(tl.join(upper, lower), (ROWS // 16, 8, DRAWS, 2))
    return tl.reshape(tl.permute(halves, (0, 3, 1, 2)), (ROWS, DRAWS)).to(tl.int32)


@triton.jit
def product(left, right):
    """Matrix product in fp32."""
    if INTERPRETED:  # the interpreter takes bf16 operands for integers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision="ieee")  # fp32 operands, else in TF32


@triton.jit
def scores_of(query_QE, key_KE, positions, first_k, length_k):
    """Scores of a block of keys from ``first_k`` on, unscaled; in a sequence's last block -inf past its end."""
    scores = product(query_QE, tl.trans(key_KE))
    # A branch that all threads take alike, in place of a selection for every block.
    if first_k + key_KE.shape[0] > length_k:
        scores = tl.where((positions < length_k)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def load_rows(base, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Load a head's ``rows``, 0 from ``stop`` on."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    # Zeros and not just anything: these rows take part in products, where a weight of 0 would not undo a NaN.
    return tl.load(pointers, mask=(rows < stop)[:, None], other=0.0)


@triton.jit
def store_rows(base, tile, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Store a head's ``rows`` below ``stop``."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(rows < stop)[:, None])


@triton.jit
def transposed_rows(row, tokens):
    """Return where a row of a transposed cast starts."""
    return row.to(tl.int64) * ((tokens + 15) // 16 * 16)


@triton.jit
def place_of_sums(sums, start, sequence, column, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a block of a sequence puts its sums of columns: no two put theirs into one row."""
    # Sequence s has rows start // BLOCK + s to stop // BLOCK + s at most, and the next one begins a row after that.
    return sums + (start // BLOCK + sequence + tl.program_id(0)).to(tl.int64) * STRIDE + column


@triton.jit
def zero_rows(base, start, stop, step, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Zero to every ``step``-th block of a head's rows from ``start`` to ``stop``."""
    base += start.to(tl.int64) * STRIDE
    for first in range(0, stop - start, step):
        zeros = tl.zeros((BLOCK, HEAD_SIZE), tl.float32)
        rows = first + tl.arange(0, BLOCK).to(tl.int64)  # all that is not a sequence: more than a 32-bit offset spans
        store_rows(base, zeros, rows, stop - start, STRIDE, HEAD_SIZE)
