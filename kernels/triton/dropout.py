"""Dropout's draws in Triton, bit for bit those of ``kernels.reference.random``.

A draw decides for 16 neighbouring columns of a row, and what it decides are 16 bits of a word: numbers are compared with the
threshold a bit at a time and all columns at once, which is a tenth of what a comparison for each would take.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202  (what a kernel is given, and gives, has types of the compiler's own)

import triton
import triton.language as tl

from kernels.reference.random import KEY_STEPS, MULTIPLIERS, PLACES_A_DRAW, ROUNDS, TIE_MULTIPLIER

PLACES = tl.constexpr(PLACES_A_DRAW)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_ROUNDS = tl.constexpr(ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_KEY_STEP_0, _KEY_STEP_1 = tl.constexpr(KEY_STEPS[0]), tl.constexpr(KEY_STEPS[1])
_TIE_MULTIPLIER = tl.constexpr(TIE_MULTIPLIER)


@triton.jit
def draw_kept(seed, step, stream, threshold, rows, draws):
    """Draw what is kept of 16 columns, a bit each: int32, of the shape to which ``rows`` and ``draws`` broadcast.

    ``seed`` and ``step`` are the two numbers of the state, int64.
    """
    word_0, word_1, word_2, word_3 = _philox(seed, draws, stream, rows, step)
    # Bits 16 to 31 of the words are the low halves of the numbers, bits 0 to 15 the high ones, both from low to high.
    # The definition compares the tie's highest eight bits. So do all 32, as those of the limit after the eighth are 0.
    tie = (word_0 ^ word_1 ^ word_2 ^ word_3) * tl.cast(_TIE_MULTIPLIER, tl.uint32)
    reached = tl.where(tie >= (threshold & 0xFF).to(tl.uint32) << 24, tl.cast(-1, tl.int32), 0).to(tl.uint32)
    limits = ~threshold
    limit_0, limit_1 = _limit(limits, 0), _limit(limits, 1)
    limit_2, limit_3 = _limit(limits, 2), _limit(limits, 3)
    for half in tl.static_range(2):
        if half == 1:
            reached >>= 16  # to the columns' places in the words' other halves
        reached = _majority(reached, word_0, limit_0)
        reached = _majority(reached, word_1, limit_1)
        reached = _majority(reached, word_2, limit_2)
        reached = _majority(reached, word_3, limit_3)
    return reached.to(tl.int32)


@triton.jit
def _limit(limits, place: tl.constexpr):
    """Return a bit of the low half of a byte, and of its high half, for each of 16 columns."""
    low, high = -((limits >> 8 + place) & 1), -((limits >> 12 + place) & 1)
    return ((low << 16) | (high & 0xFFFF)).to(tl.uint32)


@triton.jit
def _majority(reached, word, limit):
    """Compare one more bit: what is larger than the threshold's is reached, what equals it leaves it to the lower bits."""
    return (reached & word) | (reached & limit) | (word & limit)


@triton.jit
def _philox(seed, draws, stream, rows, step):
    """Four words for each counter (draw, stream, row, step).

    Unlike Triton's own, it broadcasts late: two rounds of seven are of the rows or the draws alone. And a multiplication of
    the GPU gives both halves of a product.
    """
    key_0, key_1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1, c2, c3 = draws.to(tl.uint32), stream.to(tl.uint32), rows.to(tl.uint32), step.to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        product_0, product_1 = _wide_product(c0, _MULTIPLIER_0), _wide_product(c2, _MULTIPLIER_1)
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ key_0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ key_1
        c1, c3 = product_1.to(tl.uint32), product_0.to(tl.uint32)
        key_0 += tl.cast(_KEY_STEP_0, tl.uint32)
        key_1 += tl.cast(_KEY_STEP_1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _wide_product(word, MULTIPLIER: tl.constexpr):
    """Product of 32-bit words in 64 bits, by the one instruction that the compiler would at times make two of."""
    if _INTERPRETED:
        return word.to(tl.uint64) * tl.cast(MULTIPLIER, tl.uint64)
    return tl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [word, tl.cast(MULTIPLIER, tl.uint32)], tl.uint64, is_pure=True, pack=1
    )
