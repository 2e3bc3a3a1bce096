"""Packing of several sequences into a row of ``capacity`` tokens, to reduce padding.

``pack_histogram`` (`dataloading.batches.packing_strategy`) chooses combinations of lengths from a histogram;
``pack_samples`` assigns samples to these combinations.

Shape legend: N samples, P packs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataloading.batches.packing_strategy import pack_histogram
from dataloading.shards.samples import offsets_of, ragged_indices


@dataclass(frozen=True)
class Packs:
    """Assignment of samples to packs. Pack p holds ``samples[offsets[p]:offsets[p + 1]]``, longest first."""

    samples: NDArray[np.int64]
    """[N] sample numbers."""
    offsets: NDArray[np.int64]
    """[P + 1]"""

    def __len__(self) -> int:
        return len(self.offsets) - 1


def pack_samples(
    lengths: NDArray[np.integer], capacity: int = 512, max_sequences: int | None = 3, seed: int | Sequence[int] = 0
) -> Packs:
    """Assign every sample to exactly one pack. ``lengths`` [N] are in tokens; their histogram determines the strategy.

    ``seed`` determines the random order of the packs and the random places of samples of equal length. Needs at most 70
    bytes of memory a sample. Raises the same ``ValueError`` as ``pack_histogram``.
    """
    if len(lengths) and (int(lengths.min()) < 1 or int(lengths.max()) > capacity):
        raise ValueError(
            f"sequences of {lengths.min()} to {lengths.max()} tokens, expected 1 to {capacity}: change the capacity "
            "or check the length index"
        )
    lengths = lengths.astype(np.min_scalar_type(capacity), copy=False)  # NumPy uses radix sort for up to 16 bits
    strategy = pack_histogram(np.bincount(lengths, minlength=capacity + 1), capacity, max_sequences)
    rng = np.random.default_rng(seed)
    packs = rng.permutation(np.repeat(np.arange(len(strategy.counts), dtype=np.int32), strategy.counts))
    sizes = np.array([len(lengths) for lengths in strategy.combinations], np.int64)
    flat = np.fromiter((length for lengths in strategy.combinations for length in lengths), lengths.dtype)
    slots = flat[ragged_indices(offsets_of(sizes)[packs], sizes[packs])]
    offsets = offsets_of(sizes[packs])
    del packs
    # Slots and samples are sorted by length and matched in this order. The sort is stable and the samples are shuffled
    # first, so that samples of equal length get random places.
    shuffled = rng.permutation(len(lengths))
    by_length = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    samples = np.empty(len(lengths), np.int64)
    samples[np.argsort(slots, kind="stable")] = by_length
    return Packs(samples, offsets)
