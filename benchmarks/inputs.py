"""Text, vocabularies, data sets and command lines that several benchmarks share."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.sampler import BatchPlan
from dataloading.batches.synthetic import synthetic_samples
from dataloading.dataset.folder import Dataset, write_dataset
from dataloading.shards.shard import DatasetInfo
from dataloading.text.documents import demo_documents
from dataloading.text.tokenization import SPECIAL_TOKENS, Vocabulary

_BERT_WORDS = 30522


def flags(settings: Mapping[str, object]) -> list[str]:
    """Return settings as command-line arguments."""
    # Names of settings have underscores in Python and hyphens on a command line.
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def write_demo_text(path: Path) -> Path:
    """Write the standard library's prose, one sentence a line and an empty line between documents."""
    path.write_text("\n\n".join("\n".join(document.sentences) for document in demo_documents()), encoding="utf-8")
    return path


def made_up_vocabulary(path: Path, size: int) -> Vocabulary:
    """Write a synthetic vocabulary, and return it."""
    # A vocabulary of BERT must contain the special tokens.
    words = [*SPECIAL_TOKENS, *(f"word{number}" for number in range(len(SPECIAL_TOKENS), size))]
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return Vocabulary.from_file(path)


def write_made_up_set(
    folder: Path,
    lengths_N: NDArray[np.integer],
    longest: int = 512,
    vocabulary: Vocabulary | None = None,
    shards: int = 8,
    seed: int = 0,
) -> None:
    """Write a data set of random tokens. Without a vocabulary, the ids are drawn from BERT's vocabulary size."""
    samples = synthetic_samples(lengths_N, vocabulary.size if vocabulary else _BERT_WORDS, seed)
    masked = int(samples.masked_counts.max())
    info = DatasetInfo(_BERT_WORDS, longest, masked, "", "", {}, {})
    write_dataset(
        folder, samples, shards=shards, info=DatasetInfo.of(vocabulary, longest, masked) if vocabulary else info
    )


def global_batch(data: Dataset, sequences: int, step: int) -> Batch:
    """Return the global batch of a step as one micro-batch."""
    # With one rank and no accumulation, the global batch is the only micro-batch.
    (micro_batch,) = BatchPlan(data.lengths, data.masked_counts, sequences, 1, 1, seed=0).rank_batches(step, 0)
    return batch_of(data.take(micro_batch.indices), micro_batch)
