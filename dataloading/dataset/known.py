"""Verification of a data set: integrity, repeated samples, and comparison with the benchmark's published data.

Sources: the benchmark's reference README (table of provided files, statistics of the generated records) and NVIDIA's
published preparation scripts (number of samples, digest of the evaluation set).
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from console.text import counted
from dataloading.dataset.folder import Dataset
from dataloading.options import EVALUATION_SAMPLES, PretrainingOptions
from dataloading.shards.samples import Samples
from dataloading.shards.shard import VOCABULARY_FITS, DatasetInfo, ShardRecord

VOCABULARY_MD5 = "64800d5d8528ce344256daf115d4965e"
TRAINING_SAMPLES = 156_726_829
TRAINING_SAMPLES_4320 = 156_725_280
"""Size of the training set as published: 4,320 shards of 36,279 samples, which leave out the last few samples."""
EVALUATION_CONTENT_MD5 = "611d8bae26646145e1c33338a27ba124"

_LONG_ENOUGH = 64
"""Samples of at least this number of tokens are never equal by chance: 10 of 64 tokens can be masked in more than 10^10
ways. Samples of a few words can be equal, because samples are drawn from every document ten times."""
_LONG_MARK = np.uint64(1)
"""Bit of each digest that is overwritten to store whether the sample is long. This saves a second array."""


def verify(dataset: Dataset, visit: Callable[[ShardRecord], None] = lambda _: None) -> list[str]:
    """Read a whole data set, check it against its digests and its length index, and return the findings as text.

    ``visit`` is called after each shard. Needs 8 bytes of memory per sample.
    """
    marked_digests: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
    multiset_digest = random_next = 0

    def examine(shard: ShardRecord, samples: Samples) -> None:
        nonlocal multiset_digest, random_next
        digests = samples.sample_digests()
        multiset_digest = (multiset_digest + int(digests.sum(dtype=np.uint64))) % (1 << 64)
        marked_digests.append((digests & ~_LONG_MARK) | (samples.lengths >= _LONG_ENOUGH).astype(np.uint64))
        random_next += int(samples.next_sentence_labels.sum(dtype=np.int64))
        visit(shard)

    dataset.verify(examine)
    return [
        describe_vocabulary(dataset.info),
        describe_options(dataset.info),
        f"normalization: {dataset.info.normalization or 'not recorded'}",
        f"text: {dataset.info.text or 'not recorded'}",
        describe_samples(dataset),
        _describe_next_sentences(random_next / max(1, len(dataset))),
        _describe_repeats(dataset.folder, np.concatenate(marked_digests)),
        f"multiset digest: {multiset_digest:016x}",
    ]


def content_md5(blocks: Iterable[Samples]) -> str:
    """Return the content digest that published lists of varlength shards contain.

    The ``input_ids`` of a sample are written as text, in the form of a Python list, and hashed with MD5. The list of all
    samples' MD5 sums is hashed in the same way.
    """
    rows = []
    for block in blocks:
        # Convert to Python integers, because NumPy integers have a different text representation.
        ids, offsets = block.input_ids.tolist(), block.sequence_offsets.tolist()
        for start, stop in pairwise(offsets):
            rows.append(hashlib.md5(str(ids[start:stop]).encode(), usedforsecurity=False).hexdigest())
    return hashlib.md5(str(rows).encode(), usedforsecurity=False).hexdigest()


def describe_vocabulary(info: DatasetInfo) -> str:
    whose = "the benchmark's," if info.vocabulary_md5 == VOCABULARY_MD5 else "not the benchmark's;"
    return f"vocabulary: {whose} {info.vocab_size:,} tokens, md5 {info.vocabulary_md5}"


def describe_options(info: DatasetInfo) -> str:
    expected = PretrainingOptions().recorded  # the defaults are the benchmark's values
    normalization = info.normalization
    found = info.options | (asdict(normalization) if normalization else {})
    recorded = {name: found[name] for name in expected if name in found}
    if len(recorded) < len(expected):
        most = f"{info.max_seq_length} tokens, {info.max_predictions_per_seq} of them masked"
        return f"settings: not recorded; samples of at most {most}"
    different = [f"{name} {value}" for name, value in recorded.items() if value != expected[name]]
    return f"settings: not the benchmark's ({', '.join(different)})" if different else "settings: the benchmark's"


def doubts(info: DatasetInfo, remedy: str = "") -> list[str]:
    """Return a sentence for each fault of a data set's text. ``remedy`` replaces the remedies that they usually name."""
    usual = "prepare the data set again with the right --do-lower-case and --strip-accents"
    misfit = (
        "the normalization of the text does not fit the vocabulary, many of whose words cannot occur in the samples; "
        f"{remedy or usual}"
    )
    return [*([misfit] if info.options.get(VOCABULARY_FITS) is False else []), *info.text.losses(remedy)]


def describe_samples(dataset: Dataset) -> str:
    """Describe whether the samples are the benchmark's training or evaluation set.

    Reads the whole data set if it has 10,000 samples, as the evaluation set does.
    """
    count = len(dataset)
    if TRAINING_SAMPLES_4320 <= count <= TRAINING_SAMPLES:
        return f"samples: {count:,}, as many as the benchmark's training set has"
    if count == EVALUATION_SAMPLES:
        found = content_md5(dataset.blocks())
        if found == EVALUATION_CONTENT_MD5:
            return f"samples: the benchmark's evaluation set, {counted(count, 'sample')}, content md5 {found}"
        return (
            f"samples: {count:,} as in the benchmark's evaluation set, but other samples: content md5 is {found}, "
            f"published is {EVALUATION_CONTENT_MD5}"
        )
    return (
        f"samples: {count:,}; neither the benchmark's training set ({TRAINING_SAMPLES:,}) "
        f"nor its evaluation set ({EVALUATION_SAMPLES:,})"
    )


def _describe_next_sentences(random_share: float) -> str:
    found = f"next sentences: {100 * random_share:.0f} % random"
    # The algorithm draws half of the second segments at random. In documents of a single sentence, it draws all of them
    # at random, so a high share reveals such documents.
    return (
        f"{found}; most documents have a single sentence, so a model cannot learn to predict next sentences"
        if random_share > 0.9
        else found
    )


def pick_evaluation(dataset: Dataset, count: int) -> NDArray[np.int64]:
    """Return the evenly spaced sample numbers [count] that the reference's ``pick_eval_samples`` picks."""
    # As in the reference, multiply by a double-precision ratio and truncate the result.
    ratio = len(dataset) / count
    return np.array([int(index * ratio) for index in range(count)], np.int64)


def _describe_repeats(folder: Path, marked_digests: NDArray[np.uint64]) -> str:
    """Describe how many samples repeat another sample. Raises ``ValueError`` if a repeat is too long to be due to chance."""
    marked_digests.sort()
    repeated = marked_digests[1:][marked_digests[1:] == marked_digests[:-1]]
    if long := int(np.count_nonzero(repeated & _LONG_MARK)):
        raise ValueError(
            f"{folder}: {counted(len(repeated), 'sample')} equal to another sample, {long:,} of them with {_LONG_ENOUGH} "
            "tokens or more, which does not happen by chance: a text or a shard was used twice; prepare the data set again"
        )
    short = f", all of them short (below {_LONG_ENOUGH} tokens)" if len(repeated) else ""
    return f"repeats: {counted(len(repeated), 'sample')} equal to another sample{short}"
