"""Shape buckets, the few sizes to which micro-batches are padded so that a step of each size can be captured and replayed.

They are computed from the length index, which may be read before the clock starts: random global batches are drawn and
dealt as in the plan, and the bucket sizes are chosen to minimize padding on the resulting micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataloading.batches.sampler import deal, sums_of

Size = TypeVar("Size", int, NDArray[np.int64])

TOKENS_MULTIPLE = 64
"""The number of token slots is a multiple of a kernel's tile size. (FP8 products need only a multiple of 16.)"""
MASKED_MULTIPLE = 16
_MICRO_BATCHES = 2048
_GLOBAL_BATCHES = 64


@dataclass(frozen=True)
class ShapeBucket:
    """Numbers of slots in the tensors of a padded ``Batch``. Slots after the real tokens are inert."""

    tokens: int
    """A multiple of 64 above the number of real tokens, because empty masked slots point to a row that no sequence uses."""
    sequences: int
    masked: int
    """A multiple of 16."""
    max_seqlen: int
    """Longest sequence that a batch of this shape bucket may hold."""

    @classmethod
    def around(cls, tokens: int, sequences: int, masked: int, max_seqlen: int) -> "ShapeBucket":
        """Return the smallest shape bucket for a batch of this size."""
        return cls(
            _rounded_up(tokens + 1, TOKENS_MULTIPLE),
            sequences,
            _rounded_up(max(1, masked), MASKED_MULTIPLE),
            max_seqlen,
        )

    def holds(self, other: "ShapeBucket") -> bool:
        return (
            self.tokens >= other.tokens
            and self.sequences >= other.sequences
            and self.masked >= other.masked
            and self.max_seqlen >= other.max_seqlen
        )


def fitting(needed: ShapeBucket, shape_buckets: Sequence[ShapeBucket]) -> ShapeBucket:
    """Return the first of the ascending ``shape_buckets`` that ``needed`` fits, or ``needed`` if it fits none."""
    return next((shape_bucket for shape_bucket in shape_buckets if shape_bucket.holds(needed)), needed)


def choose_shape_buckets(
    tokens_N: NDArray[np.integer], masked_N: NDArray[np.integer], sequences: int, max_seqlen: int, most: int = 16
) -> list[ShapeBucket]:
    """Choose at most ``most`` ascending shape buckets into which N randomly drawn micro-batches fit.

    Dynamic programming over the rounded sizes minimizes the number of padded token slots. The size of the last shape
    bucket exceeds the largest drawn size by a quarter of that size's distance from the mean, so that about one
    micro-batch in 10^5 does not fit. The number of masked slots follows from the largest drawn ratio of masked tokens.
    """
    largest, mean = int(tokens_N.max()), float(tokens_N.mean())
    # A micro-batch cannot be larger than all of its sequences at full length.
    top = min(largest + int((largest - mean) / 4), sequences * max_seqlen)
    needed_N = _rounded_up(tokens_N.astype(np.int64) + 1, TOKENS_MULTIPLE)
    sizes_U, counts_U = np.unique(np.append(needed_N, _rounded_up(top + 1, TOKENS_MULTIPLE)), return_counts=True)
    counts_U[-1] -= 1  # the top size was not drawn
    ratio = float((masked_N / tokens_N).max())
    return [
        # Subtract 1, because these sizes already include the unused row that around() adds.
        ShapeBucket.around(tokens - 1, sequences, int(np.ceil(ratio * tokens)), max_seqlen)
        for tokens in _boundaries(sizes_U, counts_U, most).tolist()
    ]


def draw_sizes(
    lengths: NDArray[np.integer], masked_counts: NDArray[np.integer], global_batch_size: int, micro_batches: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw random global batches, deal them as in the plan, and return each micro-batch's tokens and masked tokens [N].

    ``micro_batches`` is the number of micro-batches in a global batch, over all ranks. Equal arguments give equal results
    on all ranks. At least 2,048 micro-batches of at least 64 global batches are drawn, which takes 0.1 s.
    """
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(max(_GLOBAL_BATCHES, -(-_MICRO_BATCHES // micro_batches))):
        batch = generator.integers(0, len(lengths), global_batch_size)  # only lengths matter
        dealt = deal(lengths[batch], micro_batches)
        drawn.append([sums_of(sizes[batch], dealt) for sizes in (lengths, masked_counts)])
    tokens_N, masked_N = np.concatenate(drawn, axis=1)
    return tokens_N, masked_N


def _boundaries(sizes_U: NDArray[np.int64], counts_U: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Choose at most ``most`` of the ascending ``sizes_U``, with the last one, that minimize the total number of slots.

    ``counts_U`` is the number of drawn micro-batches of each size.
    """
    below = np.concatenate([[0], np.cumsum(counts_U)])
    # slots_UU[i, j]: number of slots for sizes i to j in a bucket of size j.
    slots_UU = (sizes_U * (below[1:] - below[:-1, None])).astype(np.float64)
    slots_UU[np.tril_indices(len(sizes_U), -1)] = np.inf
    # best_U[j]: fewest slots for sizes up to j if the last boundary is j. Each round allows one more boundary.
    # firsts: for each round and each j, the first size in the last bucket, for backtracking.
    best_U, firsts = slots_UU[0], [np.zeros(len(sizes_U), np.int64)]
    for _ in range(min(most, len(sizes_U)) - 1):
        totals_UU = np.concatenate([[0.0], best_U[:-1]])[:, None] + slots_UU
        firsts.append(totals_UU.argmin(axis=0))
        best_U = totals_UU.min(axis=0)
    chosen, last = [], len(sizes_U) - 1
    for first_U in reversed(firsts):
        if last < 0:
            break  # fewer boundaries than `most` are enough
        chosen.append(last)
        last = int(first_U[last]) - 1
    return sizes_U[chosen[::-1]]


def _rounded_up(value: Size, multiple: int) -> Size:
    return -(-value // multiple) * multiple
