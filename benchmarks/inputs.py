"""Vocabularies, data sets and command lines that several benchmarks share."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataloading.dataset.folder import write_dataset
from dataloading.shards.samples import synthetic_samples
from dataloading.shards.shard import DatasetInfo
from dataloading.text.vocabulary import SPECIAL_TOKENS, Vocabulary


def flags(settings: Mapping[str, object]) -> list[str]:
    """Return settings as command-line options, with hyphens instead of underscores."""
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def synthetic_vocabulary(path: Path, size: int) -> Vocabulary:
    words = [*SPECIAL_TOKENS, *(f"word{number}" for number in range(len(SPECIAL_TOKENS), size))]
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return Vocabulary.from_file(path)


def write_demo_text(path: Path) -> Path:
    """Write the standard library's prose, with one sentence a line and an empty line between documents."""
    from dataloading.preparation.demo import demo_documents  # imported here, because its packages may be missing

    path.write_text("\n\n".join("\n".join(document.sentences) for document in demo_documents()), encoding="utf-8")
    return path


def write_synthetic_set(
    folder: Path, lengths_N: NDArray[np.integer], longest: int, vocabulary: Vocabulary, shards: int, seed: int
) -> None:
    samples = synthetic_samples(lengths_N, vocabulary.size, seed)
    info = DatasetInfo.of(vocabulary, longest, int(samples.masked_counts.max()))
    write_dataset(folder, samples, shards=shards, info=info)
