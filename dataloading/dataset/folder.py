"""A data set: a folder of shards with a manifest and a length index.

    FOLDER/part_00000_of_00008.hdf5   a shard, of any layout that `open_shard` recognises
    FOLDER/manifest.json              what the data set is, and for each shard its counts, digest and size
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
    metadata_names,
    read_lengths,
    read_manifest,
    shard_name,
    write_metadata,
)
from dataloading.jobs import WorkPart
from dataloading.shards.formats import open_shard
from dataloading.shards.native import write_shard
from dataloading.shards.samples import SampleBuilder, Samples, concatenate
from dataloading.shards.shard import REMEDY, DatasetInfo, Shard, ShardRecord, check_content, check_indices
from dataloading.text.tokenization import Vocabulary

_VERIFIED_IN_PASSING = 1 << 30
"""Bytes of a data set up to which every shard is compared with its digest when it is opened; `verify` does larger ones."""

_OTHER_DESCRIPTORS = 256
"""File descriptors left to the rest of the process; each open shard holds one."""

_MAX_HELD_BYTES = 512 << 20
"""Memory for shards that cannot be read in place."""

_SAMPLES_BEFORE_FORGETTING = 4096
"""Samples read at random before mapped pages are given back: each may have brought in 64 KiB around each of its arrays."""


def write_dataset(folder: Path, samples: Samples, *, shards: int, info: DatasetInfo) -> None:
    """Write a data set of ``shards`` shards, the samples in order and evenly divided.

    The folder must be absent or empty; it appears complete or not at all.

    Raises:
        ValueError: the folder holds something, there are fewer samples than shards, or they break what ``info`` says.
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
    """An empty folder that becomes ``folder`` when the block ends without an error, and is removed otherwise.

    Raises:
        ValueError: ``folder`` holds something.
    """
    require_absent_or_empty(folder)
    # Where an empty folder is there, a rename replaces it.
    with atomic_path(folder) as aside:
        aside.mkdir(parents=True)
        yield aside


def require_absent_or_empty(folder: Path) -> None:
    """Raise ``ValueError`` unless a data set can be made at ``folder``."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; name a folder that does not exist or is empty")


def open_dataset(folder: Path, part: WorkPart | None = None) -> "Dataset":
    """Open a data set, or one part of it: reads the manifest and the length index, and touches no shard.

    Raises:
        ValueError: metadata missing, damaged, of another version, or at odds with itself.
    """
    manifest = read_manifest(folder, part)
    lengths_path = folder / metadata_names(part)[1]
    lengths = read_lengths(lengths_path, sum(shard.samples for shard in manifest.shards), manifest.lengths_sha256)
    return Dataset(folder, manifest.info, manifest.shards, lengths)


class Dataset:
    """A folder of shards, read by global sample index: shard by shard in the order of the manifest.

    Shards are opened when first needed. An open shard is a read-only memory map or an array in memory, which a forked
    process may go on using; a pickled data set opens its shards anew.
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
        self._verified_in_passing = sum(shard.file_bytes for shard in shards) <= _VERIFIED_IN_PASSING
        self._samples_read = 0
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
        """The samples at ``indices`` in the order asked, repeats allowed.

        Raises:
            IndexError: an index outside the data set.
            ValueError: a shard is missing, is not the one of the manifest, or has bad content.
        """
        check_indices(indices, len(self), self.folder)
        # side: an empty shard begins where the next one does, which has the sample.
        shard_of = np.searchsorted(self._first_samples, indices, side="right") - 1
        rows = indices - self._first_samples[shard_of]
        # Held until the samples are taken: a shard that makes room for another one of this batch stays readable.
        shards = {index: self._shard(index) for index in np.unique(shard_of).tolist()}
        # Before the samples are read, whose pages would otherwise be given back and read again.
        self._forget_now_and_then(len(indices))
        builder = SampleBuilder()
        places = zip(shard_of.tolist(), rows.tolist(), strict=True)
        try:
            # Sample by sample where all shards can: index arrays would take a fixed time for each of many shards.
            if all(shards[shard].add_to(builder, row) for shard, row in places):
                samples = builder.samples()
                # Checked here, as add_to() checks nothing.
                check_content(samples, self.info, self.folder)
                return samples
        except ValueError:
            pass  # what follows names the shard
        return self._take_by_shard(shards, shard_of, rows)

    def _take_by_shard(self, shards: dict[int, Shard], shard_of: NDArray[np.int64], rows: NDArray[np.int64]) -> Samples:
        """Samples ``rows`` of shards ``shard_of``, each shard asked once."""
        order = np.argsort(shard_of, kind="stable")
        used, starts = np.unique(shard_of[order], return_index=True)
        parts = np.split(rows[order], starts[1:])
        blocks = [shards[shard].take(part) for shard, part in zip(used.tolist(), parts, strict=True)]
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))  # back to the order asked
        return concatenate(blocks).take(rank)

    def blocks(self, samples: int = 1 << 14) -> Iterator[Samples]:
        """The whole data set in order, at most ``samples`` at a time, with one shard open at a time."""
        for index in range(len(self.shards)):
            with self.open_listed(index) as shard:
                for start in range(0, len(shard), samples):
                    yield shard.read(start, min(start + samples, len(shard)))
                    # Given back, or the pages of a whole data set would count as this process's memory.
                    shard.forget()

    def verify(self, visit: Callable[[ShardRecord, Samples], None] = lambda *_: None) -> None:
        """Read every shard and hand it to ``visit``; ValueError where it differs from its digest or the length index."""
        for index, record in enumerate(self.shards):
            with self.open_listed(index) as shard:
                samples = shard.verify(record.digest)
                lengths = np.stack([shard.lengths, shard.masked_counts], axis=1)
            rows = self._length_index[self._first_samples[index] : self._first_samples[index + 1]]
            # A run is planned by the index before it reads any shard, so that the two must agree.
            if not np.array_equal(rows, lengths):
                raise ValueError(
                    f"{self.folder / LENGTHS_NAME}: lengths of {record.name} differ from the shard; {REMEDY}"
                )
            visit(record, samples)

    def check_files(self) -> None:
        """Raise ``ValueError`` unless every shard is there in its full size; looks at the folder and opens no shard."""
        for record in self.shards:
            path = self.folder / record.name
            size = path.stat().st_size if path.is_file() else None
            if size != record.file_bytes:
                found = "missing" if size is None else f"{size:,} bytes"
                raise ValueError(f"{path}: {found}, {MANIFEST_NAME} lists {record.file_bytes:,} bytes; {REMEDY}")

    def open_listed(self, index: int) -> Shard:
        """A shard, newly opened, that agrees with the manifest in everything that does not mean reading all of it."""
        record = self.shards[index]
        shard = open_shard(self.folder / record.name)
        agrees = (len(shard), shard.file_bytes) == (record.samples, record.file_bytes)
        # Layouts from elsewhere carry no digest: of them only the numbers can be compared.
        if shard.digest is not None:
            agrees &= shard.digest == record.digest and shard.info.without_sources() == self.info.without_sources()
        if not agrees:
            raise ValueError(f"{shard.path}: not the shard that {MANIFEST_NAME} lists; {REMEDY}")
        # Content is held against what the manifest promises: files of other layouts promise nothing.
        shard.info = self.info
        return shard

    def close(self) -> None:
        """Close every open shard; they open again when needed."""
        self._open_shards.clear()

    def _shard(self, index: int) -> Shard:
        """An open shard that agrees with the manifest; those opened longest ago make room for it."""
        if index not in self._open_shards:
            shard = self.open_listed(index)
            if self._verified_in_passing:
                shard.verify(self.shards[index].digest)
            shard.expect_random_reads()  # after verifying, which reads in order
            held = shard.held_bytes + sum(other.held_bytes for other in self._open_shards.values())
            while self._open_shards and (len(self._open_shards) >= self._most_open or held > _MAX_HELD_BYTES):
                held -= self._open_shards.pop(next(iter(self._open_shards))).held_bytes  # a dict is in order of opening
            self._open_shards[index] = shard
        shard = self._open_shards[index]
        # At every use, as the file may be cut short while it is mapped.
        shard.require_whole()
        return shard

    def _forget_now_and_then(self, samples: int) -> None:
        """Keep the memory that the system counts for mapped pages bounded; they stay in its cache."""
        self._samples_read += samples
        if self._samples_read >= _SAMPLES_BEFORE_FORGETTING:
            self._samples_read = 0
            for shard in self._open_shards.values():
                shard.forget()


def _most_open_shards(count: int) -> int:
    """Return how many of ``count`` shards may be open at a time; raise the process's soft limit for it as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_DESCRIPTORS
    # The soft limit is often 1,024, and data sets of 4,320 shards are customary.
    if soft < wanted and hard != soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(count, soft - _OTHER_DESCRIPTORS))
