"""Parts of the attention kernels: tiles of queries and keys, scores, and dropout.

Shape legend in ``kernels/__init__.py``. Products use the keys of a block in another order (``places_of_keys``), in which the
thread that makes a draw for 16 adjacent keys also holds their scores in the product's result.

Drawing is most of the cost of dropout. Therefore the forward pass stores the mask, one bit per element, and the backward
kernels read 1 / 8 byte per element instead of doing some six integer operations. The mask ``kept`` is int16 [H, ``groups``,
Q, 4]. An entry is a draw for 16 keys, and a group has four draws.

If ``cast``, ``transposed`` and ``sums`` are given, results are also cast to FP8, transposed, and summed by columns, for the
FP8 products that follow. Gradients are then written only in FP8.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportUnboundVariable=false
# ruff: noqa: ANN001, ANN201, ANN202  (the compiler has its own types)

import triton
import triton.language as tl

from kernels.triton.dropout import PLACES

KEYS_A_GROUP = 64
DRAWS_A_GROUP = tl.constexpr(KEYS_A_GROUP // PLACES.value)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# By default Triton compiles a kernel again when one of these is 1 or a multiple of 16.
VARYING = ["queries", "keys", "groups", "stream", "threshold"]


@triton.jit
def places_of_keys(BLOCK_K: tl.constexpr):
    """Return the order of a block's keys as columns of a product: pairs of a draw's 16 keys, from each draw in turn."""
    DRAWS: tl.constexpr = BLOCK_K // PLACES
    # In a result of mma and of wgmma, thread t of each four has columns 2 t and 2 t + 1 of every eight.
    columns = tl.arange(0, BLOCK_K)
    return columns // 2 % DRAWS * PLACES + columns // (2 * DRAWS) * 2 + columns % 2


@triton.jit
def keep_columns(x, kept):
    """Zero dropped elements of fp32 ``x`` [rows, 16 * draws] by int32 [rows, draws]; keys as in ``places_of_keys``."""
    ROWS: tl.constexpr = kept.shape[0]
    DRAWS: tl.constexpr = kept.shape[1]
    pairs, ones = tl.arange(0, PLACES // 2)[None, :, None, None], tl.arange(0, 2)[None, None, None, :]
    kept, bits = tl.broadcast(kept[:, None, :, None], 1 << (pairs * 2 + ones))
    return _keep(x, tl.reshape(kept, (ROWS, PLACES * DRAWS)), tl.reshape(bits, (ROWS, PLACES * DRAWS)))


@triton.jit
def keep_rows(x, kept):
    """Zero dropped elements of fp32 ``x`` [16 * draws, columns] by int32 [draws, columns]; keys in their own order."""
    DRAWS: tl.constexpr = kept.shape[0]
    COLUMNS: tl.constexpr = kept.shape[1]
    kept, bits = tl.broadcast(kept[:, None, :], 1 << tl.arange(0, PLACES)[None, :, None])
    return _keep(x, tl.reshape(kept, (PLACES * DRAWS, COLUMNS)), tl.reshape(bits, (PLACES * DRAWS, COLUMNS)))


@triton.jit
def _keep(x, kept, bit):
    """Return fp32 ``x`` where ``kept`` has the bit, else 0.

    This is PTX, because the compiler turns ``tl.where`` into more instructions.
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
    """Return a pointer to a sequence's first draw for a head."""
    return kept + ((head * groups).to(tl.int64) * queries + start_q) * DRAWS_A_GROUP


@triton.jit
def of_keys(kept, queries, first_k, BLOCK_K: tl.constexpr):
    """Return a pointer to the draws for the block of keys that starts at ``first_k``; draws of 64 keys are neighbours."""
    tl.static_assert(BLOCK_K <= 64)
    kept += first_k // 64 * queries * DRAWS_A_GROUP
    if BLOCK_K < 64:
        kept += first_k % 64 // PLACES
    return kept


@triton.jit
def upper_rows_of(ROWS: tl.constexpr):
    """Return every other eight of the rows: half of them, and a thread holds one row of each half in a product's result.

    Loads and stores of a half then use the registers of the thread that draws or needs the bits.
    """
    # In a result of mma and of wgmma a thread has rows g and g + 8 of every sixteen.
    rows = tl.arange(0, ROWS // 2)
    return rows // 8 * 16 + rows % 8


@triton.jit
def store_kept(kept, drawn, rows, stop):
    """Store the low 16 bits of draws, int32 [rows, draws], for ``rows`` of ``upper_rows_of`` below ``stop``."""
    ROWS: tl.constexpr = drawn.shape[0]
    DRAWS: tl.constexpr = drawn.shape[1]
    upper, lower = tl.split(tl.permute(tl.reshape(drawn, (ROWS // 16, 2, 8, DRAWS)), (0, 2, 3, 1)))
    pointers = kept + (rows * DRAWS_A_GROUP)[:, None] + tl.arange(0, DRAWS)[None, :]
    tl.store(pointers, tl.reshape(upper, (ROWS // 2, DRAWS)).to(tl.int16), mask=(rows < stop)[:, None])
    pointers += 8 * DRAWS_A_GROUP
    tl.store(pointers, tl.reshape(lower, (ROWS // 2, DRAWS)).to(tl.int16), mask=(rows + 8 < stop)[:, None])


@triton.jit
def load_kept(kept, rows, stop, DRAWS: tl.constexpr):
    """Load draws that ``store_kept`` stored, int32 [rows, draws]."""
    ROWS: tl.constexpr = 2 * rows.shape[0]
    pointers = kept + (rows * DRAWS_A_GROUP)[:, None] + tl.arange(0, DRAWS)[None, :]
    upper = tl.load(pointers, mask=(rows < stop)[:, None], other=0)
    lower = tl.load(pointers + 8 * DRAWS_A_GROUP, mask=(rows + 8 < stop)[:, None], other=0)
    halves = tl.reshape(tl.join(upper, lower), (ROWS // 16, 8, DRAWS, 2))
    return tl.reshape(tl.permute(halves, (0, 3, 1, 2)), (ROWS, DRAWS)).to(tl.int32)


@triton.jit
def product(left, right):
    """Return the matrix product in fp32."""
    if INTERPRETED:  # the interpreter treats bf16 operands as integers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision="ieee")  # otherwise fp32 operands become TF32


@triton.jit
def scores_of(query_QE, key_KE, positions, first_k, length_k):
    """Return the unscaled scores of the block of keys that starts at ``first_k``, -inf past the end of the sequence."""
    scores = product(query_QE, tl.trans(key_KE))
    # All threads take the same branch, which is cheaper than a selection for every block.
    if first_k + key_KE.shape[0] > length_k:
        scores = tl.where((positions < length_k)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def load_rows(base, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Load a head's ``rows``, 0 from ``stop`` on."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    # These rows take part in products, where a weight of 0 would not undo a NaN.
    return tl.load(pointers, mask=(rows < stop)[:, None], other=0.0)


@triton.jit
def store_rows(base, tile, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Store a head's ``rows`` below ``stop``."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(rows < stop)[:, None])


@triton.jit
def transposed_rows(row, tokens):
    """Return the offset of a row of a transposed cast."""
    return row.to(tl.int64) * ((tokens + 15) // 16 * 16)


@triton.jit
def place_of_sums(sums, start, sequence, column, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return a pointer to the row in which a block of a sequence stores its sums of columns."""
    # Sequence s has rows start // BLOCK + s to at most stop // BLOCK + s, and the next sequence begins a row later.
    return sums + (start // BLOCK + sequence + tl.program_id(0)).to(tl.int64) * STRIDE + column


@triton.jit
def zero_rows(base, start, stop, step, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to every ``step``-th block of a head's rows from ``start`` to ``stop``."""
    base += start.to(tl.int64) * STRIDE
    for first in range(0, stop - start, step):
        zeros = tl.zeros((BLOCK, HEAD_SIZE), tl.float32)
        rows = first + tl.arange(0, BLOCK).to(tl.int64)  # unowned rows may exceed 32-bit offsets
        store_rows(base, zeros, rows, stop - start, STRIDE, HEAD_SIZE)
