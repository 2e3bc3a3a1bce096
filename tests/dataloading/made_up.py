"""Text and random samples for tests that do not depend on their content."""

import numpy as np

from dataloading.shards.samples import Samples
from dataloading.shards.shard import DatasetInfo

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(30))]
TEXT = "\n".join("" if line % 9 == 8 else f"w{line % 30} w3 w{line % 7}" for line in range(200))

INFO = DatasetInfo(
    vocab_size=100,
    max_seq_length=20,
    max_predictions_per_seq=4,
    vocabulary_md5="0" * 32,
    vocabulary_sha256="1" * 64,
    options={"random_seed": 12345, "masked_lm_prob": 0.15, "do_lower_case": True},
    sources={"text.txt": "2" * 64},
)
"""Metadata that is valid for the samples of `make_samples`."""


def make_samples(count: int, seed: int = 0) -> Samples:
    """Return ``count`` random samples: 5 to 20 tokens, ids below 100, and 0 to 4 masked tokens each."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 21, count)
    masked_counts = rng.integers(0, 5, count)
    positions = [
        np.sort(rng.choice(length, m, replace=False)) for length, m in zip(lengths, masked_counts, strict=True)
    ]
    return Samples(
        input_ids=rng.integers(0, 100, lengths.sum()).astype(np.uint16),
        segment_ids=rng.integers(0, 2, lengths.sum()).astype(np.uint8),
        sequence_offsets=np.cumsum([0, *lengths]),
        masked_lm_positions=np.concatenate([np.empty(0), *positions]).astype(np.uint16),
        masked_lm_ids=rng.integers(0, 100, masked_counts.sum()).astype(np.uint16),
        masked_lm_offsets=np.cumsum([0, *masked_counts]),
        next_sentence_labels=rng.integers(0, 2, count).astype(np.uint8),
    )
