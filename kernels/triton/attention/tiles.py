"""Parts of the attention kernels: tiles of queries and keys, scores, and dropout.

Shape legend in ``kernels/__init__.py``. Matrix products take the keys of a block in the order of ``places_of_keys``. In
this order, the thread that makes a dropout draw for 16 adjacent keys also holds the scores of these keys.

Drawing is most of the cost of dropout. Therefore the forward pass stores the mask, one bit per element, and the
backward kernels read 1 / 8 byte per element instead of doing some six integer operations. The mask ``kept`` is int16
[H, ``groups``, Q, 4]. Each entry holds the bits of one draw, for 16 adjacent keys. A group has four draws, for 64 keys.

If a kernel gets ``cast``, ``transposed`` and ``sums``, it also casts its results to FP8, transposes the casts and sums
the columns, for the FP8 products that follow. Gradients are then written only in FP8.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportUnboundVariable=false

import triton
import triton.language as tl

from kernels.triton.dropout import PLACES

KEYS_A_GROUP = 64
DRAWS_A_GROUP = tl.constexpr(KEYS_A_GROUP // PLACES.value)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Triton must not specialize kernels on these integers. By default, it compiles again for 1 and for multiples of 16.
VARYING = ["queries", "keys", "groups", "stream", "threshold"]


@triton.jit
def places_of_keys(BLOCK_K: tl.constexpr):
    """Return which key of a block each column of a score matrix holds, [BLOCK_K].

    The columns take two adjacent keys from each draw in turn: keys 0 and 1 of every draw, then keys 2 and 3 of every
    draw, and so on. All columns of a thread then belong to the same draw.
    """
    DRAWS: tl.constexpr = BLOCK_K // PLACES
    # In the results of mma and wgmma, thread t of each four threads holds columns 2 t and 2 t + 1 of every eight columns.
    columns = tl.arange(0, BLOCK_K)
    return columns // 2 % DRAWS * PLACES + columns // (2 * DRAWS) * 2 + columns % 2


@triton.jit
def keep_columns(x, kept):
    """Set the dropped elements of fp32 ``x`` [rows, 16 * draws] to 0. Its columns have the order of ``places_of_keys``.

    ``kept`` is int32 [rows, draws], 16 keys a draw. Bit i of a draw tells whether the element of its key i is kept.
    """
    ROWS: tl.constexpr = kept.shape[0]
    DRAWS: tl.constexpr = kept.shape[1]
    pairs, ones = tl.arange(0, PLACES // 2)[None, :, None, None], tl.arange(0, 2)[None, None, None, :]
    kept, bits = tl.broadcast(kept[:, None, :, None], 1 << (pairs * 2 + ones))
    return _keep(x, tl.reshape(kept, (ROWS, PLACES * DRAWS)), tl.reshape(bits, (ROWS, PLACES * DRAWS)))


@triton.jit
def keep_rows(x, kept):
    """Set the dropped elements of fp32 ``x`` [16 * draws, columns] to 0. Its rows are keys in ascending order.

    ``kept`` is int32 [draws, columns]. Bit i of a draw tells whether the element of the draw's key i is kept.
    """
    DRAWS: tl.constexpr = kept.shape[0]
    COLUMNS: tl.constexpr = kept.shape[1]
    kept, bits = tl.broadcast(kept[:, None, :], 1 << tl.arange(0, PLACES)[None, :, None])
    return _keep(x, tl.reshape(kept, (PLACES * DRAWS, COLUMNS)), tl.reshape(bits, (PLACES * DRAWS, COLUMNS)))


@triton.jit
def _keep(x, kept, bit):
    """Return fp32 ``x`` where ``kept & bit`` is not 0, and 0 elsewhere.

    The function uses PTX, because Triton compiles ``tl.where`` to more instructions.
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
    """Return a pointer to the mask entry of a head's first group and a sequence's first query.

    ``kept`` is int16 [H, ``groups``, ``queries``, 4], and ``start_q`` is the row of the sequence's first query.
    """
    return kept + ((head * groups).to(tl.int64) * queries + start_q) * DRAWS_A_GROUP


@triton.jit
def of_keys(kept, queries, first_k, BLOCK_K: tl.constexpr):
    """Return a pointer to the mask entries for the block of keys that starts at ``first_k``.

    ``kept`` points to a sequence's mask entries, int16 [groups, ``queries``, 4]. Only the entries for
    64 keys of one row are adjacent, so a block may have at most 64 keys.
    """
    tl.static_assert(BLOCK_K <= 64)
    kept += first_k // 64 * queries * DRAWS_A_GROUP
    if BLOCK_K < 64:
        kept += first_k % 64 // PLACES
    return kept


@triton.jit
def upper_rows_of(ROWS: tl.constexpr):
    """Return the row numbers of the first eight rows of every sixteen rows, [ROWS / 2].

    In the result of a matrix product, the thread that holds row r of these also holds row r + 8. Dropout's bits are
    loaded and stored in two halves, rows r and rows r + 8, so that each thread accesses the bits that it draws or needs.
    """
    # In the results of mma and wgmma, a thread holds rows g and g + 8 of every sixteen rows.
    rows = tl.arange(0, ROWS // 2)
    return rows // 8 * 16 + rows % 8


@triton.jit
def store_kept(kept, drawn, rows, stop):
    """Store the low 16 bits of the draws ``drawn``, int32 [ROWS, draws], for the rows below ``stop``.

    ``rows`` [ROWS / 2] comes from ``upper_rows_of``: draws are stored for each row r in it and for row r + 8.
    """
    ROWS: tl.constexpr = drawn.shape[0]
    DRAWS: tl.constexpr = drawn.shape[1]
    upper, lower = tl.split(tl.permute(tl.reshape(drawn, (ROWS // 16, 2, 8, DRAWS)), (0, 2, 3, 1)))
    pointers = kept + (rows * DRAWS_A_GROUP)[:, None] + tl.arange(0, DRAWS)[None, :]
    tl.store(pointers, tl.reshape(upper, (ROWS // 2, DRAWS)).to(tl.int16), mask=(rows < stop)[:, None])
    pointers += 8 * DRAWS_A_GROUP
    tl.store(pointers, tl.reshape(lower, (ROWS // 2, DRAWS)).to(tl.int16), mask=(rows + 8 < stop)[:, None])


@triton.jit
def load_kept(kept, rows, stop, DRAWS: tl.constexpr):
    """Load draws that ``store_kept`` stored, int32 [ROWS, draws], with 0 for rows from ``stop`` on."""
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
    return tl.dot(left, right, input_precision="ieee")  # by default, Triton rounds fp32 operands to TF32


@triton.jit
def scores_of(query_QE, key_KE, positions, first_k, length_k):
    """Return the unscaled scores for the block of keys that starts at ``first_k``, and -inf for keys past the end."""
    scores = product(query_QE, tl.trans(key_KE))
    # Only a sequence's last block has keys past the end. All threads take the same branch, so the branch costs less
    # than a selection in every block.
    if first_k + key_KE.shape[0] > length_k:
        scores = tl.where((positions < length_k)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def load_rows(base, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Load ``rows`` of one head, [rows, HEAD_SIZE], with zeros for rows from ``stop`` on."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    # Rows past the end take part in matrix products with weights of 0. They must be zeros, because 0 times NaN is NaN.
    return tl.load(pointers, mask=(rows < stop)[:, None], other=0.0)


@triton.jit
def store_rows(base, tile, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Store ``tile`` [rows, HEAD_SIZE] to the ``rows`` of one head that are below ``stop``."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(rows < stop)[:, None])


@triton.jit
def transposed_rows(row, tokens):
    """Return the offset of a row in a transposed cast. The rows' length is ``tokens`` rounded up to a multiple of 16."""
    return row.to(tl.int64) * ((tokens + 15) // 16 * 16)


@triton.jit
def place_of_sums(sums, start, sequence, column, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return a pointer to the element of ``sums`` where this program's block of a sequence stores its first column sum.

    The element is in the row of the block, at the given column.
    """
    # No two blocks share a row. Sequence s uses rows start // BLOCK + s to at most stop // BLOCK + s, and the next
    # sequence starts at row stop // BLOCK + s + 1.
    return sums + (start // BLOCK + sequence + tl.program_id(0)).to(tl.int64) * STRIDE + column


@triton.jit
def zero_rows(base, start, stop, step, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to BLOCK rows of one head at ``start``, at ``start + step`` and so on, up to row ``stop``."""
    base += start.to(tl.int64) * STRIDE
    for first in range(0, stop - start, step):
        zeros = tl.zeros((BLOCK, HEAD_SIZE), tl.float32)
        rows = first + tl.arange(0, BLOCK).to(tl.int64)  # rows after all sequences may need 64-bit offsets
        store_rows(base, zeros, rows, stop - start, STRIDE, HEAD_SIZE)
