"""Properties that the benchmark's own data are known by, and the check of a data set against them.

Sources: the benchmark's reference README (table of provided files, statistics of the generated records) and NVIDIA's
published preparation scripts (number of samples, digest of the evaluation set).
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from console.files import read_bounded
from dataloading.dataset.folder import Dataset
from dataloading.options import EVALUATION_SAMPLES, PretrainingOptions
from dataloading.shards.samples import Samples
from dataloading.shards.shard import DatasetInfo
from dataloading.text.tokenization import text_lines

VOCABULARY_MD5 = "64800d5d8528ce344256daf115d4965e"
TRAINING_SAMPLES = 156_726_829
TRAINING_SAMPLES_4320 = 156_725_280
"""4,320 shards of 36,279: what the sets in circulation hold after the last few samples were dropped."""
EVALUATION_CONTENT_MD5 = "611d8bae26646145e1c33338a27ba124"

_LONG_ENOUGH = 64
"""Tokens from which two samples cannot be equal by chance: 64 tokens have 10 masked ones, of more than 10^10 choices, while
a document of two or three words, drawn ten times, honestly repeats itself."""


def content_md5(blocks: Iterable[Samples]) -> str:
    """The digest by which shards of the varlength layout are listed: MD5 of the list of the samples' own, each the MD5 of
    its ``input_ids`` as a Python list in text."""
    rows = []
    for block in blocks:
        # As Python's integers: the text of NumPy's would be another, and with it the digest.
        ids, offsets = block.input_ids.tolist(), block.sequence_offsets.tolist()
        for start, stop in pairwise(offsets):
            rows.append(hashlib.md5(str(ids[start:stop]).encode(), usedforsecurity=False).hexdigest())
    return hashlib.md5(str(rows).encode(), usedforsecurity=False).hexdigest()


def describe_vocabulary(info: DatasetInfo) -> str:
    """Say in words whether the vocabulary is the benchmark's."""
    if info.vocabulary_md5 == VOCABULARY_MD5:
        return f"vocabulary: the benchmark's, {info.vocab_size:,} tokens, md5 {VOCABULARY_MD5}"
    return f"vocabulary: not the benchmark's; {info.vocab_size:,} tokens, md5 {info.vocabulary_md5}"


def describe_options(info: DatasetInfo) -> str:
    """Say in words whether the samples were made with the benchmark's settings."""
    # The defaults are the benchmark's values.
    expected = PretrainingOptions().__dict__
    # Other options, such as the version of Unicode's tables, are no settings of the reference script.
    recorded = {name: info.options[name] for name in expected if name in info.options}
    if len(recorded) < len(expected):
        most = f"{info.max_seq_length} tokens, {info.max_predictions_per_seq} of them masked"
        return f"settings: not recorded; samples of at most {most}"
    different = [f"{name} {value}" for name, value in recorded.items() if value != expected[name]]
    if not different:
        return "settings: the benchmark's"
    return f"settings: not the benchmark's ({', '.join(different)})"


def is_training_count(count: int) -> bool:
    """Tell whether the benchmark's training set may have so many samples."""
    return TRAINING_SAMPLES_4320 <= count <= TRAINING_SAMPLES


def describe_samples(dataset: Dataset) -> str:
    """Say in words whether the samples are the benchmark's training or evaluation set; a set of 10,000 is read."""
    count = len(dataset)
    if is_training_count(count):
        return f"samples: {count:,}, as many as the benchmark's training set has"
    if count == EVALUATION_SAMPLES:
        found = content_md5(dataset.blocks())
        if found == EVALUATION_CONTENT_MD5:
            return f"samples: the benchmark's evaluation set, {count:,} samples, content md5 {found}"
        return (
            f"samples: {count:,} as in the benchmark's evaluation set, but not those: content md5 is {found}, "
            f"published is {EVALUATION_CONTENT_MD5}"
        )
    return (
        f"samples: {count:,}; neither the benchmark's training set ({TRAINING_SAMPLES:,}) "
        f"nor its evaluation set ({EVALUATION_SAMPLES:,})"
    )


def check_published(dataset: Dataset, checksums: Path) -> Iterator[str]:
    """Compare each shard with a published list of content digests, lines of ``file name<tab>md5``.

    Yields a line for each shard that agrees.

    Raises:
        ValueError: a shard is not in the list or differs, or the list names one that the data set lacks.
    """
    listed = {}
    for line in text_lines(read_bounded(checksums, _MAX_LIST_BYTES, "name a list of digests"), checksums):
        fields = line.split()
        if fields:
            if len(fields) != 2:
                raise ValueError(f"{checksums}: {line[:80]!r}; expected a file name and an md5 on each line")
            listed[Path(fields[0]).stem] = fields[1].lower()
    for index, record in enumerate(dataset.shards):
        expected = listed.pop(Path(record.name).stem, None)  # what is left of the list in the end is missing here
        if expected is None:
            raise ValueError(f"{checksums}: {record.name} is not in it; name the list of this set of shards")
        with dataset.open_listed(index) as shard:
            found = content_md5([shard.read(0, len(shard))])
        if found != expected:
            raise ValueError(f"{dataset.folder / record.name}: content md5 {found}, published is {expected}")
        yield f"{record.name}: content md5 as published"
    if listed:
        raise ValueError(f"{dataset.folder}: {len(listed)} listed shard(s) are missing, such as {min(listed)}")


_MAX_LIST_BYTES = 64 << 20


class Census:
    """Count of a data set's samples, and of those that occur more than once; it holds 8 bytes for each sample."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._digests = np.empty(len(dataset), np.uint64)
        self._filled = 0
        self.multiset_digest = 0
        """Sum of the samples' digests modulo 2^64: the same for the same samples in any order and layout."""

    def add(self, block: Samples) -> None:
        """The next samples of the data set."""
        digests = block.sample_digests()
        # uint64 wraps, which is the modulus that is wanted.
        self.multiset_digest = (self.multiset_digest + int(digests.sum(dtype=np.uint64))) % (1 << 64)
        self._digests[self._filled : self._filled + len(block)] = _marked(digests, block)
        self._filled += len(block)

    def describe_repeats(self) -> str:
        """Say in words how many samples repeat another.

        Raises:
            ValueError: some of them cannot do so by chance: the set was put together wrongly.
        """
        self._digests.sort()  # in place: 1.3 GB for the benchmark's training set
        repeated = self._digests[1:][self._digests[1:] == self._digests[:-1]]
        long = repeated[repeated & _LONG_MARK != 0]
        if len(long):
            first, second = self._places(long[0])
            raise ValueError(
                f"{self._dataset.folder}: {len(repeated):,} samples repeat another, {len(long):,} of them "
                f"{_LONG_ENOUGH} tokens or longer, which chance does not do (sample {second:,} repeats {first:,}); "
                "a text or a shard was used twice: prepare the data set again"
            )
        short = f", all of them short documents drawn alike (below {_LONG_ENOUGH} tokens)" if len(repeated) else ""
        return f"repeats: {len(repeated):,} samples repeat another{short}"

    def _places(self, digest: np.uint64) -> tuple[int, int]:
        """The first two samples with this digest."""
        found: list[int] = []
        start = 0
        # A second pass over the data, for the message alone: only a broken set pays for it.
        for block in self._dataset.blocks():
            found += (start + np.flatnonzero(_marked(block.sample_digests(), block) == digest)).tolist()
            start += len(block)
            if len(found) > 1:
                break
        return found[0], found[1]


_LONG_MARK = np.uint64(1)


def _marked(digests: NDArray[np.uint64], block: Samples) -> NDArray[np.uint64]:
    """``digests`` whose last bit tells whether the sample is too long to be repeated by chance."""
    # One bit of the digest is given up for it, so that no second array is needed.
    return (digests & ~_LONG_MARK) | (block.lengths >= _LONG_ENOUGH).astype(np.uint64)


def pick_evaluation(dataset: Dataset, count: int) -> NDArray[np.int64]:
    """[count] the samples that the reference's ``pick_eval_samples`` picks: evenly spaced ones, in order.

    Raises:
        ValueError: the data set holds fewer samples.
    """
    if not 1 <= count <= len(dataset):
        raise ValueError(f"{dataset.folder}: {len(dataset):,} samples, of which {count:,} are to be picked")
    # The reference's arithmetic: a ratio in double precision, cut off.
    ratio = len(dataset) / count
    return np.array([int(index * ratio) for index in range(count)], np.int64)
