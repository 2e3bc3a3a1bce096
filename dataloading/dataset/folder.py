"""A data set: a folder of shards with a manifest and a length index.

    FOLDER/part_00000_of_00008.hdf5   a shard, of any layout that `open_shard` recognises
    FOLDER/manifest.json              description of the data set, and counts, digest and size of each shard
    FOLDER/lengths.npy                uint16 [N, 2]: tokens and masked tokens of each sample, shard by shard

Planning reads the manifest and the length index alone, so it can happen before a timed run may touch data.
"""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from console.files import atomic_path
from dataloading.dataset.manifest import (
    LENGTHS_NAME,
    MANIFEST_NAME,
    read_lengths,
    read_manifest,
    shard_name,
    write_metadata,
)
from dataloading.shards.formats import open_shard
from dataloading.shards.native import write_shard
from dataloading.shards.samples import SampleBuilder, Samples
from dataloading.shards.shard import REMEDY, DatasetInfo, Shard, ShardRecord, check_content
from dataloading.text.tokenization import Vocabulary

_VERIFIED_ON_OPENING = 1 << 30
"""Largest data set in bytes whose shards are compared with their digests when they are opened."""

_OTHER_DESCRIPTORS = 256
"""File descriptors left to the rest of the process; each open shard holds one."""

_MAX_HELD_BYTES = 512 << 20
"""Memory for shards that cannot be read in place."""


def write_dataset(folder: Path, samples: Samples, *, shards: int, info: DatasetInfo) -> None:
    """Write a data set of ``shards`` shards, with the samples in order and evenly divided.

    The folder must be absent or empty; it appears complete or not at all.

    Raises:
        ValueError: the folder holds something, there are fewer samples than shards, or the samples contradict ``info``.
    """
    require_absent_or_empty(folder)
    if not 1 <= shards <= len(samples):
        raise ValueError(f"shards is {shards} for {len(samples):,} samples; expected 1 to the number of samples")
    bounds = np.linspace(0, len(samples), shards + 1).astype(np.int64)
    with new_folder(folder) as partial:
        records = []
        for index, (start, stop) in enumerate(pairwise(bounds.tolist())):
            path = partial / shard_name(index, shards)
            records.append(write_shard(path, samples.slice(start, stop), info))
        write_metadata(partial, records, samples.lengths, samples.masked_counts, info)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``folder`` when the block ends without an error, and is removed otherwise.

    Raises:
        ValueError: ``folder`` holds something.
    """
    require_absent_or_empty(folder)
    with atomic_path(folder) as aside:
        aside.mkdir(parents=True)
        yield aside


def require_absent_or_empty(folder: Path) -> None:
    """Raise ``ValueError`` unless a data set can be made at ``folder``."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists; name a folder that does not exist or is empty")


def open_dataset(folder: Path) -> "Dataset":
    """Open a data set: read the manifest and the length index, and touch no shard.

    Raises:
        ValueError: metadata missing, damaged, of another version, or contradictory.
    """
    manifest = read_manifest(folder)
    return Dataset(folder, manifest.info, manifest.shards, read_lengths(folder / LENGTHS_NAME, manifest))


class Dataset:
    """A folder of shards, read by global sample index: shard by shard in the order of the manifest.

    Shards are opened when first needed. A forked process may go on using open shards; a pickled data set opens its
    shards again.
    """

    def __init__(
        self, folder: Path, info: DatasetInfo, shards: tuple[ShardRecord, ...], lengths: NDArray[np.uint16]
    ) -> None:
        self.folder = folder
        self.info = info
        self.shards = shards
        self._length_index = lengths
        self._first_samples = np.cumsum([0, *(shard.samples for shard in shards)])
        self._open_shards: dict[int, Shard] = {}
        self._verified_on_opening = sum(shard.file_bytes for shard in shards) <= _VERIFIED_ON_OPENING
        self._most_open = _most_open_shards(len(shards))

    def __len__(self) -> int:
        return len(self._length_index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_shards": {}}

    @property
    def lengths(self) -> NDArray[np.uint16]:
        """[N] real tokens of each sample."""
        return self._length_index[:, 0]

    @property
    def masked_counts(self) -> NDArray[np.uint16]:
        """[N] masked tokens of each sample."""
        return self._length_index[:, 1]

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Raise ``ValueError`` unless the samples were made with this vocabulary file."""
        if vocabulary.sha256 != self.info.vocabulary_sha256:
            raise ValueError(
                f"{self.folder}: made with the vocabulary of md5 {self.info.vocabulary_md5} "
                f"({self.info.vocab_size:,} tokens), given is {vocabulary.md5} ({vocabulary.size:,} tokens); "
                "use that vocabulary or prepare the data set again"
            )

    def take(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at ``indices`` in this order, repeats allowed.

        Raises:
            IndexError: an index outside the data set.
            ValueError: a shard is missing, is not the shard of the manifest, or has bad content.
        """
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(
                f"{self.folder}: indices {indices.min()} to {indices.max()}; it holds {len(self):,} samples"
            )
        # side: an empty shard begins where the next shard begins, which has the sample.
        shard_of = np.searchsorted(self._first_samples, indices, side="right") - 1
        rows = (indices - self._first_samples[shard_of]).tolist()
        # A shard that is closed to make room for another shard of this batch stays readable through this dictionary.
        shards = {index: self._shard(index) for index in np.unique(shard_of).tolist()}
        builder = SampleBuilder()
        for shard, row in zip(shard_of.tolist(), rows, strict=True):
            shards[shard].add_to(builder, row)
        samples = builder.samples()
        try:
            check_content(samples, self.info, self.folder)
        except ValueError:
            # Reads each sample again for an error that names the shard.
            for shard, row in zip(shard_of.tolist(), rows, strict=True):
                shards[shard].read(row, row + 1)
            raise
        return samples

    def blocks(self, samples: int = 1 << 14) -> Iterator[Samples]:
        """Yield the whole data set in order, at most ``samples`` at a time."""
        for index in range(len(self.shards)):
            shard = self.open_listed(index)
            for start in range(0, len(shard), samples):
                yield shard.read(start, min(start + samples, len(shard)))
                # Otherwise the pages of the whole data set would count as this process's memory.
                shard.forget()

    def verify(self, visit: Callable[[ShardRecord, Samples], None] = lambda *_: None) -> None:
        """Read every shard and hand it to ``visit``; ValueError if it differs from its digest or the length index."""
        for index, record in enumerate(self.shards):
            shard = self.open_listed(index)
            samples = shard.verify(record.digest)
            rows = self._length_index[self._first_samples[index] : self._first_samples[index + 1]]
            if not np.array_equal(rows, np.stack([shard.lengths, shard.masked_counts], axis=1)):
                raise ValueError(
                    f"{self.folder / LENGTHS_NAME}: lengths of {record.name} differ from the shard; {REMEDY}"
                )
            visit(record, samples)

    def check_files(self) -> None:
        """Raise ``ValueError`` unless every shard has its full size; opens no shard."""
        for record in self.shards:
            path = self.folder / record.name
            size = path.stat().st_size if path.is_file() else None
            if size != record.file_bytes:
                found = "missing" if size is None else f"{size:,} bytes"
                raise ValueError(f"{path}: {found}, {MANIFEST_NAME} lists {record.file_bytes:,} bytes; {REMEDY}")

    def open_listed(self, index: int) -> Shard:
        """Open a shard and compare it with the manifest, as far as that is possible without reading all of it."""
        record = self.shards[index]
        shard = open_shard(self.folder / record.name)
        agrees = (len(shard), shard.file_bytes) == (record.samples, record.file_bytes)
        if shard.digest is not None:
            agrees &= shard.digest == record.digest and shard.info.without_sources() == self.info.without_sources()
        if not agrees:
            raise ValueError(f"{shard.path}: not the shard that {MANIFEST_NAME} lists; {REMEDY}")
        # Content is compared with what the manifest promises; files of other layouts promise nothing.
        shard.info = self.info
        return shard

    def close(self) -> None:
        """Close every open shard; they open again when needed."""
        self._open_shards.clear()

    def _shard(self, index: int) -> Shard:
        """Return an open shard; the shards that were opened first make room for it."""
        if index not in self._open_shards:
            shard = self.open_listed(index)
            if self._verified_on_opening:
                shard.verify(self.shards[index].digest)
            shard.expect_random_reads()  # after verifying, which reads in order
            held = shard.held_bytes + sum(other.held_bytes for other in self._open_shards.values())
            while self._open_shards and (len(self._open_shards) >= self._most_open or held > _MAX_HELD_BYTES):
                held -= self._open_shards.pop(next(iter(self._open_shards))).held_bytes  # a dict is in order of opening
            self._open_shards[index] = shard
        return self._open_shards[index]


def _most_open_shards(count: int) -> int:
    """Return how many of ``count`` shards may be open at a time, after raising the process's soft limit for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_DESCRIPTORS
    # The soft limit is often 1,024, and data sets of 4,320 shards are customary.
    if soft < wanted and hard != soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(count, soft - _OTHER_DESCRIPTORS))
