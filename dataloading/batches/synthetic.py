"""Synthetic samples with given lengths, for the warm-up before the clock starts, for benchmarks and for tests."""

import numpy as np
from numpy.typing import NDArray

from dataloading.shards.samples import Samples, offsets_of


def synthetic_samples(
    lengths: NDArray[np.integer], vocab_size: int, seed: int = 0, masked_lm_prob: float = 0.15
) -> Samples:
    """Return pretraining samples of random tokens, with about ``masked_lm_prob * length`` masked tokens in each sample.

    ``lengths`` [n] must all be at least 3, for [CLS] and two segments.
    """
    if len(lengths) == 0 or lengths.min() < 3:
        raise ValueError("synthetic samples need lengths of at least 3 tokens")
    generator = np.random.default_rng(seed)
    lengths = lengths.astype(np.int64)
    masked_counts = np.maximum(1, np.rint(masked_lm_prob * lengths).astype(np.int64))
    tokens, masked = int(lengths.sum()), int(masked_counts.sum())
    first_segments = (lengths + 1) // 2
    segment_sizes = np.stack([first_segments, lengths - first_segments], axis=1).ravel()
    positions = [
        # Position 0 is [CLS], which is never masked.
        np.sort(generator.choice(np.arange(1, length), count, replace=False))
        for length, count in zip(lengths.tolist(), masked_counts.tolist(), strict=True)
    ]
    return Samples(
        input_ids=generator.integers(0, vocab_size, tokens).astype(np.uint16),
        segment_ids=np.repeat(np.tile(np.array([0, 1], dtype=np.uint8), len(lengths)), segment_sizes),
        sequence_offsets=offsets_of(lengths),
        masked_lm_positions=np.concatenate(positions).astype(np.uint16),
        masked_lm_ids=generator.integers(0, vocab_size, masked).astype(np.uint16),
        masked_lm_offsets=offsets_of(masked_counts),
        next_sentence_labels=generator.integers(0, 2, len(lengths)).astype(np.uint8),
    )
