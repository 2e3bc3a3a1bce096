"""Packing: which sequences share a row of ``capacity`` tokens, so that little of the row is padding.

Two steps, both pure functions. ``pack_histogram`` (`dataloading.batches.packing_strategy`) chooses the combinations of
lengths, for which the number of sequences of each length is all it needs; ``pack_samples`` and ``stream_packs`` deal actual
samples into those combinations.

Shape legend: N samples, P packs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataloading.batches.packing_strategy import pack_histogram
from dataloading.shards.samples import offsets_of, ragged_indices

STREAM_WINDOW = 1 << 21
"""Samples that ``stream_packs`` packs at a time."""


@dataclass(frozen=True)
class Packs:
    """Samples dealt into packs; pack p holds ``samples[offsets[p]:offsets[p + 1]]``, longest first."""

    samples: NDArray[np.int64]
    """[N] sample numbers."""
    offsets: NDArray[np.int64]
    """[P + 1]"""

    def __len__(self) -> int:
        return len(self.offsets) - 1


def pack_samples(
    lengths: NDArray[np.integer], capacity: int = 512, max_sequences: int | None = 3, seed: int | Sequence[int] = 0
) -> Packs:
    """Every sample in exactly one pack: ``lengths`` [N] in tokens, the strategy from their histogram.

    Which of the samples of a length goes where and the order of the packs are random and follow from ``seed``. Takes
    about 70 bytes a sample at most. Raises ``ValueError`` like ``pack_histogram``.
    """
    if len(lengths) and (int(lengths.min()) < 1 or int(lengths.max()) > capacity):
        raise ValueError(
            f"sequences of {lengths.min()} to {lengths.max()} tokens, expected 1 to {capacity}: change the capacity "
            "or check the length index"
        )
    lengths = lengths.astype(np.min_scalar_type(capacity), copy=False)  # 16 bits or fewer are sorted by radix
    strategy = pack_histogram(np.bincount(lengths, minlength=capacity + 1), capacity, max_sequences)
    rng = np.random.default_rng(seed)
    packs = rng.permutation(np.repeat(np.arange(len(strategy.counts), dtype=np.int32), strategy.counts))
    sizes = np.array([len(lengths) for lengths in strategy.combinations], np.int64)
    flat = np.fromiter((length for lengths in strategy.combinations for length in lengths), lengths.dtype)
    slots = flat[ragged_indices(offsets_of(sizes)[packs], sizes[packs])]
    offsets = offsets_of(sizes[packs])
    del packs
    # Slots and samples are both sorted by length, and pair up in that order. Samples are shuffled before, and the sort
    # is stable, so that chance decides which of a length goes where.
    shuffled = rng.permutation(len(lengths))
    by_length = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    samples = np.empty(len(lengths), np.int64)
    samples[np.argsort(slots, kind="stable")] = by_length
    return Packs(samples, offsets)


def stream_packs(
    blocks: Iterable[NDArray[np.integer]],
    capacity: int = 512,
    max_sequences: int | None = 3,
    seed: int = 0,
    window: int = STREAM_WINDOW,
) -> Iterator[Packs]:
    """The packs of any number of samples, ``window`` of them at a time, in memory that grows with the window alone.

    ``blocks`` are the lengths in order, cut anywhere: one memory map, or slices of one. Sample numbers count from the
    first block on. Window w is packed like ``pack_samples(..., seed=[seed, w])``, so no pack reaches over a window's
    end and none is left over. The order of samples ought to be random, as a pack mixes those of one window only.
    Raises ``ValueError`` like ``pack_histogram``.
    """
    if window < 1:
        raise ValueError(f"window of {window} samples, expected at least 1")
    first = 0
    for number, lengths in enumerate(_windows(blocks, window)):
        # A generator of its own for each window, so that none depends on those before it.
        packs = pack_samples(lengths, capacity, max_sequences, [seed, number])
        # In place, as a window has two million of them.
        np.add(packs.samples, first, out=packs.samples)
        first += len(lengths)
        yield packs


def _windows(blocks: Iterable[NDArray[np.integer]], window: int) -> Iterator[NDArray[np.integer]]:
    """The same lengths in arrays of ``window`` samples; the last may be shorter."""
    parts: list[NDArray[np.integer]] = []
    missing = window
    for block in blocks:
        start = 0
        while start < len(block):
            # A view: the block may be a memory map of a whole data set.
            part = block[start : start + missing]
            start += len(part)
            missing -= len(part)
            parts.append(part)
            if not missing:
                yield np.concatenate(parts)
                parts, missing = [], window
    if parts:
        yield np.concatenate(parts)
