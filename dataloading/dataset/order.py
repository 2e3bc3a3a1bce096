"""Test whether a data set's samples stand in random order, by samples that begin with the same text.

`prepare` draws samples of each document several times, and those of one pass begin where those of another do. In random
order two such samples lie anywhere: half of all pairs are farther apart than 0.29 of the set. Where shards were never mixed
both are in the shard of their text, however that was shuffled by itself.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dataloading.shards.samples import Samples

_TEXT = 16
"""Tokens behind [CLS] that make two samples' beginnings the same text, masked ones as they were."""
_AT_A_TIME = 1 << 14
_MOST_HELD = 1 << 20
"""Beginnings held in memory, 16 bytes each; of larger sets a random part of all texts is looked at."""
_MOST_ALIKE = 64
"""Samples of one beginning, above which it is a common phrase and not one document's."""
_FEWEST_PAIRS = 400
"""Of fewer the median is too uncertain: its standard error is 0.35 / sqrt(pairs), 0.018."""
# Two random places are farther apart than d with probability (1 - d)^2.
_BY_CHANCE = 1 - math.sqrt(0.5)
"""Median distance of two random places, as a share of the whole."""
_NEAR = 0.75 * _BY_CHANCE
"""Two shards that were never mixed have half the distance of chance."""
# Odd, so that a product with one loses no bit. From a fixed seed, so that the same set always gets the same answer.
_FACTORS = np.random.default_rng(0).integers(0, 1 << 64, _TEXT, np.uint64) | np.uint64(1)


class OrderCheck:
    """Check of how far apart samples of the same text lie; one pass over the samples in their order."""

    def __init__(self, samples: int) -> None:
        """Begin a check of a data set of ``samples``."""
        self._samples = samples
        self._seen = 0
        # Chosen by the digest: of a text either all samples are kept or none.
        self._last_kept = np.uint64(((1 << 64) - 1) * min(_MOST_HELD, samples) // max(samples, 1))
        self._texts = [np.empty(0, np.uint64)]
        self._places = [np.empty(0, np.int64)]

    def add(self, block: Samples) -> None:
        """The next samples of the data set."""
        for start in range(0, len(block), _AT_A_TIME):
            part = block.slice(start, min(start + _AT_A_TIME, len(block)))
            # With a token to spare: the last [SEP] is no text.
            rows = np.flatnonzero(part.lengths > _TEXT + 1)
            texts = _beginnings(part, rows)
            kept = texts <= self._last_kept
            self._texts.append(texts[kept])
            self._places.append(rows[kept] + self._seen)
            self._seen += len(part)

    def finding(self) -> tuple[str, bool]:
        """Return the finding in words, and whether the set looks as if it had never been shuffled as a whole."""
        distances = self._distances()
        if len(distances) < _FEWEST_PAIRS:
            return f"order: cannot be told of {len(distances):,} repeated texts; {_FEWEST_PAIRS} are needed", False
        median = float(np.median(distances))
        found = (
            f"samples of one text lie {median:.3f} of the set apart, in the middle; in random order {_BY_CHANCE:.3f}"
        )
        if median < _NEAR:
            return f"order: not random: {found}. Before training, run python -m dataloading shuffle", True
        return f"order: random as far as can be told: {found}", False

    def _distances(self) -> NDArray[np.float64]:
        """[pairs] how far apart two samples of each text lie, as shares of the set; which two is drawn at random."""
        texts, places = np.concatenate(self._texts), np.concatenate(self._places)
        order = np.argsort(texts, kind="stable")
        _, starts, counts = np.unique(texts[order], return_index=True, return_counts=True)
        usual = (counts > 1) & (counts <= _MOST_ALIKE)
        starts, counts = starts[usual], counts[usual]
        # One pair a text, so that a text which occurs often does not outweigh the others.
        rng = np.random.default_rng(1)
        first = rng.integers(0, counts)
        second = (first + rng.integers(1, counts)) % counts  # never the same one
        return np.abs(places[order[starts + first]] - places[order[starts + second]]) / self._samples


def _beginnings(block: Samples, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[rows] a digest of the first tokens behind [CLS] of these samples, as they were before masking."""
    tokens = block.input_ids.copy()
    samples = np.repeat(np.arange(len(block)), block.masked_counts)
    tokens[block.sequence_offsets[samples] + block.masked_lm_positions] = block.masked_lm_ids
    first = tokens[block.sequence_offsets[rows, None] + np.arange(1, _TEXT + 1)]
    return (first * _FACTORS).sum(axis=1, dtype=np.uint64)
