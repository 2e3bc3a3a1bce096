"""Shape buckets: the few sizes that micro-batches are padded to, so that a step of each size can be captured and replayed.

They follow from the length index alone, which may be read before the clock starts: global batches are drawn and dealt as
the plan does it, and the boundaries are those that waste the fewest token slots on what was drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataloading.batches.sampler import deal

Size = TypeVar("Size", int, NDArray[np.int64])

TOKENS_MULTIPLE = 64
"""Rows that a tile of a kernel takes; products in FP8 contract over multiples of 16."""
MASKED_MULTIPLE = 16
_MICRO_BATCHES = 2048
_GLOBAL_BATCHES = 64


@dataclass(frozen=True)
class ShapeBucket:
    """Numbers of slots in the tensors of a padded ``Batch``; those past the real ones are inert."""

    tokens: int
    """A multiple of 64 and more than the real tokens: the first row that no sequence owns is where empty slots point."""
    sequences: int
    masked: int
    """A multiple of 16."""
    max_seqlen: int
    """Longest sequence that a batch of this shape bucket may hold."""

    @classmethod
    def around(cls, tokens: int, sequences: int, masked: int, max_seqlen: int) -> "ShapeBucket":
        """The smallest shape bucket that holds so much."""
        return cls(
            _rounded_up(tokens + 1, TOKENS_MULTIPLE),
            sequences,
            _rounded_up(max(1, masked), MASKED_MULTIPLE),
            max_seqlen,
        )

    def holds(self, other: "ShapeBucket") -> bool:
        """Tell whether a batch of ``other`` fits."""
        return (
            self.tokens >= other.tokens
            and self.sequences >= other.sequences
            and self.masked >= other.masked
            and self.max_seqlen >= other.max_seqlen
        )


def fitting(needed: ShapeBucket, shape_buckets: Sequence[ShapeBucket]) -> ShapeBucket:
    """The first of ``shape_buckets``, which ascend, that holds ``needed``; without one, ``needed`` itself."""
    return next((shape_bucket for shape_bucket in shape_buckets if shape_bucket.holds(needed)), needed)


def choose_shape_buckets(
    tokens_N: NDArray[np.integer], masked_N: NDArray[np.integer], sequences: int, max_seqlen: int, most: int = 16
) -> list[ShapeBucket]:
    """Choose at most ``most`` shape buckets, ascending, for micro-batches like the N that were drawn.

    Every one of those fits. Boundaries waste the fewest token slots in all, found by dynamic programming over the rounded
    sizes. The last shape bucket lies above the largest by a quarter of its distance from the mean, which from some thousands
    of micro-batches leaves out about one in 10^5. Masked slots are in the largest ratio to tokens that was drawn.
    """
    largest, mean = int(tokens_N.max()), float(tokens_N.mean())
    # No micro-batch holds more than all of its sequences at their full length.
    top = min(largest + int((largest - mean) / 4), sequences * max_seqlen)
    needed_N = _rounded_up(tokens_N.astype(np.int64) + 1, TOKENS_MULTIPLE)
    sizes_U, counts_U = np.unique(np.append(needed_N, _rounded_up(top + 1, TOKENS_MULTIPLE)), return_counts=True)
    counts_U[-1] -= 1  # nothing that was drawn
    ratio = float((masked_N / tokens_N).max())
    return [
        # around() adds the spare row, which these sizes have already.
        ShapeBucket.around(tokens - 1, sequences, int(np.ceil(ratio * tokens)), max_seqlen)
        for tokens in _boundaries(sizes_U, counts_U, most).tolist()
    ]


def draw_sizes(
    lengths: NDArray[np.integer], masked_counts: NDArray[np.integer], global_batch_size: int, micro_batches: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and masked tokens [N] of the micro-batches of random global batches, dealt as the plan deals them.

    ``micro_batches``: in a global batch, over all ranks.

    Equal for equal arguments, so that every rank has the same. At least 2,048 micro-batches of at least 64 global batches,
    whatever the size of the data set: 0.1 s.
    """
    generator = np.random.default_rng(0)
    tokens, masked = [], []
    for _ in range(max(_GLOBAL_BATCHES, -(-_MICRO_BATCHES // micro_batches))):
        batch = generator.integers(0, len(lengths), global_batch_size)  # no epoch's order: only lengths matter
        dealt = deal(lengths[batch], micro_batches)
        for sums, sizes in ((tokens, lengths), (masked, masked_counts)):
            drawn = np.append(sizes[batch], 0)  # an empty place, -1, takes the last
            sums.append(drawn[dealt].sum(axis=1, dtype=np.int64))
    return np.concatenate(tokens), np.concatenate(masked)


def _boundaries(sizes_U: NDArray[np.int64], counts_U: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Choose at most ``most`` of ``sizes_U``, ascending, with the last: each count takes the next, and the sum is least."""
    below = np.concatenate([[0], np.cumsum(counts_U)])
    # slots_UU[i, j]: what sizes i to j take in slots of size j.
    slots_UU = (sizes_U * (below[1:] - below[:-1, None])).astype(np.float64)
    slots_UU[np.tril_indices(len(sizes_U), -1)] = np.inf
    # best_U[j]: the fewest slots for sizes up to j, the last boundary at j, with one boundary, then with one more a
    # round; firsts: where that last bucket begins, to find the way back.
    best_U, firsts = slots_UU[0], [np.zeros(len(sizes_U), np.int64)]
    for _ in range(min(most, len(sizes_U)) - 1):
        totals_UU = np.concatenate([[0.0], best_U[:-1]])[:, None] + slots_UU
        firsts.append(totals_UU.argmin(axis=0))
        best_U = totals_UU.min(axis=0)
    chosen, last = [], len(sizes_U) - 1
    for first_U in reversed(firsts):
        if last < 0:
            break  # fewer boundaries than `most` waste nothing
        chosen.append(last)
        last = int(first_U[last]) - 1
    return sizes_U[chosen[::-1]]


def _rounded_up(value: Size, multiple: int) -> Size:
    return -(-value // multiple) * multiple
