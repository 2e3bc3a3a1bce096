"""A data set, which is a folder of shards with a manifest and a length index.

    FOLDER/part_00000_of_00008.hdf5   a shard, in any layout that `open_shard` recognises
    FOLDER/manifest.json              description of the data set; counts, digest and size of each shard
    FOLDER/lengths.npy                uint16 [N, 2]: tokens and masked tokens of each sample, shard by shard

Planning reads only the manifest and the length index, so it can run before the point where a timed run may read data.
"""

import hashlib
import io
import json
import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from console.files import atomic_path, read_json, sha256_of, shown, write_atomically
from console.text import counted
from dataloading.shards.formats import FORMAT, SCHEMA_VERSION, open_shard, write_shard
from dataloading.shards.samples import SampleBuilder, Samples
from dataloading.shards.shard import REMEDY, DatasetInfo, Shard, ShardRecord, check_content
from dataloading.text.losses import TextCounts
from dataloading.text.vocabulary import Vocabulary

MANIFEST_NAME = "manifest.json"
LENGTHS_NAME = "lengths.npy"

_MAX_MANIFEST_BYTES = 64 << 20
_VERIFIED_ON_OPENING = 1 << 30
"""Maximum size in bytes of a data set whose shards are verified by digest when they are opened."""

_OTHER_DESCRIPTORS = 256
"""Number of file descriptors to reserve for the rest of the process. Each open shard uses one."""

_MAX_HELD_BYTES = 512 << 20
"""Limit on the memory for open shards that are unpacked into memory."""


# NumPy's reader evaluates the head of a file as Python code, which may warn or raise any error.
_LENGTHS_HEAD = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '<u2', 'fortran_order': False, 'shape': \(([0-9]{1,18}), 2\), \} *\n", re.DOTALL
)
"""Head that numpy.save writes before the length index. The first group is the length of the rest of the head."""


@dataclass(frozen=True)
class _Manifest:
    format: Literal["mlperf-bert-samples"]
    schema_version: Literal[1]
    samples: int
    lengths_sha256: str
    info: DatasetInfo
    shards: tuple[ShardRecord, ...]


def shard_name(index: int, count: int) -> str:
    """Return the file name of shard ``index`` of ``count``, in the form that published data sets use."""
    return f"part_{index:05d}_of_{count:05d}.hdf5"


def write_dataset(folder: Path, samples: Samples, *, shards: int, info: DatasetInfo) -> None:
    """Write a data set. The samples keep their order and are divided evenly over ``shards`` shards.

    The folder must be absent or empty. It appears complete or not at all.
    """
    if not 1 <= shards <= len(samples):
        raise ValueError(
            f"shards is {shards} for {counted(len(samples), 'sample')}; expected 1 to the number of samples"
        )
    bounds = np.linspace(0, len(samples), shards + 1).astype(np.int64)
    names = [shard_name(index, shards) for index in range(shards)]
    with new_folder(folder) as partial:
        for name, (start, stop) in zip(names, pairwise(bounds.tolist()), strict=True):
            write_shard(partial / name, samples.slice(start, stop), info)
        index_shards(partial, names, info)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``folder`` when the block ends without an error, and is removed otherwise."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; name one that does not exist or is empty")
    with atomic_path(folder) as aside:
        aside.mkdir(parents=True)
        yield aside


def open_dataset(folder: Path) -> "Dataset":
    """Open a data set by reading its manifest and length index. No shard is opened."""
    manifest = _read_manifest(folder)
    return Dataset(folder, manifest.info, manifest.shards, _read_lengths(folder / LENGTHS_NAME, manifest))


class Dataset:
    """A folder of shards whose samples are indexed globally, shard by shard in the order of the manifest.

    Shards are opened when first needed. Open shards remain usable in a forked process. An unpickled data set opens its
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
        self._most_open = _raise_open_file_limit(len(shards))

    def __len__(self) -> int:
        return len(self._length_index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_shards": {}}

    @property
    def lengths(self) -> NDArray[np.uint16]:
        """[N] number of real tokens in each sample."""
        return self._length_index[:, 0]

    @property
    def masked_counts(self) -> NDArray[np.uint16]:
        """[N] number of masked tokens in each sample."""
        return self._length_index[:, 1]

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Raise ``ValueError`` unless the samples were made with the tokens of this vocabulary."""
        if vocabulary.sha256 != self.info.vocabulary_sha256:
            raise ValueError(
                f"{self.folder}: made with the vocabulary of md5 {self.info.vocabulary_md5} "
                f"({self.info.vocab_size:,} tokens), not with the given one of md5 {vocabulary.md5} ({vocabulary.size:,} "
                "tokens); give the vocabulary of the data set, or prepare the data set again"
            )

    def take(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at ``indices``, in this order. Indices may repeat.

        Raises ``IndexError`` for an index outside the data set.
        """
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(
                f"{self.folder}: indices {indices.min()} to {indices.max()} asked for; "
                f"it holds {counted(len(self), 'sample')}"
            )
        # side="right" skips empty shards: an empty shard has the same start as the next shard, which has the sample.
        shard_of = np.searchsorted(self._first_samples, indices, side="right") - 1
        rows = (indices - self._first_samples[shard_of]).tolist()
        # This dictionary keeps a shard readable even if it is closed to make room for another shard of this batch.
        shards = {index: self._shard(index) for index in np.unique(shard_of).tolist()}
        for each in shards.values():
            each.require_whole()
        builder = SampleBuilder()
        for shard, row in zip(shard_of.tolist(), rows, strict=True):
            shards[shard].add_to(builder, row)
        samples = builder.samples()
        try:
            check_content(samples, self.info, self.folder)
        except ValueError:
            # Read each sample again, to raise an error that names the shard.
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
                # Release the mapped pages. Otherwise the whole data set would count as memory of this process.
                shard.forget()

    def verify(self, visit: Callable[[ShardRecord, Samples], None] = lambda *_: None) -> None:
        """Read every shard, and call ``visit`` with the shard's record and samples.

        Raises ``ValueError`` if a shard does not match its digest or the length index.
        """
        for index, record in enumerate(self.shards):
            shard = self.open_listed(index)
            samples = shard.verify(record.digest)
            rows = self._length_index[self._first_samples[index] : self._first_samples[index + 1]]
            if not np.array_equal(rows, np.stack([shard.lengths, shard.masked_counts], axis=1)):
                raise ValueError(f"{self.folder}: lengths of {record.name} differ from {LENGTHS_NAME}; {REMEDY}")
            visit(record, samples)

    def check_files(self) -> None:
        """Raise ``ValueError`` unless every shard file has the size in the manifest. No shard is opened."""
        for record in self.shards:
            path = self.folder / record.name
            size = path.stat().st_size if path.is_file() else None
            if size != record.file_bytes:
                found = "missing" if size is None else f"{size:,} bytes"
                raise ValueError(f"{path}: {found}, but {MANIFEST_NAME} lists {record.file_bytes:,} bytes; {REMEDY}")

    def open_listed(self, index: int) -> Shard:
        """Open shard ``index`` and compare it with its record in the manifest, without reading the samples.

        Raises ``ValueError`` if they differ.
        """
        record = self.shards[index]
        shard = open_shard(self.folder / record.name)
        agrees = (len(shard), shard.file_bytes) == (record.samples, record.file_bytes)
        if shard.digest is not None:
            agrees &= shard.digest == record.digest and shard.info.without_sources() == self.info.without_sources()
        if not agrees:
            raise ValueError(f"{shard.path}: not the shard that {MANIFEST_NAME} lists; {REMEDY}")
        # Check the content against the manifest's description, because only native shards contain a description.
        shard.info = self.info
        return shard

    def _shard(self, index: int) -> Shard:
        """Return shard ``index``, and open it if needed. To stay within limits, closes the shards that were opened first."""
        if index not in self._open_shards:
            shard = self.open_listed(index)
            if self._verified_on_opening:
                shard.verify(self.shards[index].digest)
            shard.expect_random_reads()  # after the verification, which reads sequentially
            held = shard.held_bytes + sum(other.held_bytes for other in self._open_shards.values())
            while self._open_shards and (len(self._open_shards) >= self._most_open or held > _MAX_HELD_BYTES):
                oldest = next(iter(self._open_shards))  # the shard that was opened first
                held -= self._open_shards.pop(oldest).held_bytes
            self._open_shards[index] = shard
        return self._open_shards[index]


def scan_shards(folder: Path, names: Sequence[str], info: DatasetInfo) -> Dataset:
    """Read the shards ``names`` in ``folder``, and return them as a data set. ``info`` describes the samples.

    Raises ``ValueError`` if a shard's own description differs, or if two shards hold the same samples.
    """
    records, lengths = [], [np.empty((0, 2), np.uint16)]
    sources, text = dict(info.sources), TextCounts()
    names_by_digest: dict[str, str] = {}
    for name in names:
        shard = open_shard(folder / name)
        if shard.digest is None:
            shard.info = info
        elif shard.info.without_sources() != info.without_sources():
            raise ValueError(f"{shard.path}: made with other settings than the other shards; prepare it again")
        sources |= shard.info.sources
        text += shard.info.text
        digest = shard.digest or shard.read(0, len(shard)).digest()
        other = names_by_digest.setdefault(digest, name)
        if other != name and len(shard):  # all shards without samples have the same digest
            raise ValueError(
                f"{folder}: {name} holds the same samples as {other}: leave out one of the two, or one of the equal texts "
                "that they were made from"
            )
        tokens, masked_tokens = int(shard.sequence_offsets[-1]), int(shard.masked_lm_offsets[-1])
        records.append(ShardRecord(name, len(shard), tokens, masked_tokens, digest, shard.file_bytes))
        lengths.append(np.stack([shard.lengths, shard.masked_counts], axis=1).astype(np.uint16))
    # In a rewritten data set, each shard holds samples from the whole text, so only ``info`` has the counts of the text.
    info = replace(info, sources=sources, text=info.text or text)
    return Dataset(folder, info, tuple(records), np.concatenate(lengths))


def index_shards(folder: Path, names: Sequence[str], info: DatasetInfo) -> Dataset:
    """Turn shards into a data set: scan them with `scan_shards`, write a length index, and then write a manifest."""
    found = scan_shards(folder, names, info)
    index = io.BytesIO()
    np.save(index, np.stack([found.lengths, found.masked_counts], axis=1).astype("<u2"), allow_pickle=False)
    digest = hashlib.sha256(index.getbuffer()).hexdigest()
    manifest = _Manifest(FORMAT, SCHEMA_VERSION, len(found), digest, found.info, found.shards)
    write_atomically(folder / LENGTHS_NAME, index.getvalue())
    write_atomically(folder / MANIFEST_NAME, json.dumps(asdict(manifest), indent=1).encode())
    return open_dataset(folder)


def shard_names(folder: Path) -> list[str]:
    """Return the sorted names of the shards in a folder. Raises ``ValueError`` if it has a manifest or is empty."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    # Skip hidden files, which an interrupted command may have left.
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if MANIFEST_NAME in names:
        raise ValueError(f"{folder} already has a {MANIFEST_NAME}; delete it first to make a new one")
    if not names:
        raise ValueError(f"{folder} holds no files; name a folder of shards")
    return names


def shards_of(folder: Path) -> list[Path]:
    """Return the shards of a data set, or of a folder that contains only shards."""
    if (folder / MANIFEST_NAME).exists():
        return [folder / record.name for record in open_dataset(folder).shards]
    return [folder / name for name in shard_names(folder)]


def info_of(folder: Path, names: Sequence[str], vocab: Path) -> DatasetInfo:
    """Describe shards from other programs by their vocabulary and the largest sizes that they contain or declare."""
    vocabulary = Vocabulary.read(vocab)
    most_tokens = most_masked = 1
    for name in names:
        shard = open_shard(folder / name)
        if shard.digest is not None:  # only native shards contain a description
            return shard.info.without_sources()
        if shard.layout in ("fixed", "tfrecord"):  # these shards declare the row width, so one shard is enough
            most_tokens, most_masked = shard.info.max_seq_length, shard.info.max_predictions_per_seq
            break
        most_tokens = max(most_tokens, int(shard.lengths.max(initial=1)))
        most_masked = max(most_masked, int(shard.masked_counts.max(initial=1)))
    return DatasetInfo.of(vocabulary, most_tokens, most_masked)


def open_or_scan(folder: Path, vocab: Path | None) -> Dataset:
    """Open a data set. If the folder has no manifest, scan its shards, for which ``vocab`` is required."""
    if (folder / MANIFEST_NAME).exists():
        dataset = open_dataset(folder)
        if vocab is not None:
            dataset.check_vocabulary(Vocabulary.read(vocab))
        return dataset
    names = shard_names(folder)
    if vocab is None:
        raise ValueError(f"{folder} has no {MANIFEST_NAME}: name the vocabulary of its ids with --vocab FILE")
    return scan_shards(folder, names, info_of(folder, names, vocab))


def _raise_open_file_limit(count: int) -> int:
    """Raise this process's soft limit of open files if needed. Return how many of ``count`` shards may be open at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_DESCRIPTORS
    # The soft limit is often 1,024, but data sets commonly have 4,320 shards.
    if soft < wanted and hard != soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(count, soft - _OTHER_DESCRIPTORS))


def _read_manifest(folder: Path) -> _Manifest:
    """Read the manifest of a data set. Raises ``ValueError`` if it is missing, damaged or has another version."""
    path = folder / MANIFEST_NAME
    found = read_json(path, _MAX_MANIFEST_BYTES, _remedy_without_manifest(folder))
    try:
        # `read_json` parsed with Python's json module, because msgspec refuses file names that are not UTF-8.
        return msgspec.convert(found, _Manifest)
    # msgspec raises UnicodeEncodeError for a string with half of a surrogate pair where it expects another type.
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise ValueError(f"{path}: damaged or of another version ({shown(error)}); {REMEDY}") from None


def _read_lengths(path: Path, manifest: _Manifest) -> NDArray[np.uint16]:
    """Check the length index against its digest in the manifest, and return it as a memory map [samples, 2]."""
    count = sum(shard.samples for shard in manifest.shards)
    try:
        is_listed = sha256_of(path) == manifest.lengths_sha256
        with path.open("rb") as file:
            head, size = _LENGTHS_HEAD.match(file.read(256)), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; {REMEDY}") from None
    if not is_listed:
        raise ValueError(f"{path}: digest differs from {MANIFEST_NAME}; {REMEDY}")
    end = head.end() if head else 0
    if head is None or (int.from_bytes(head[1], "little"), int(head[2]), size) != (end - 10, count, end + 4 * count):
        raise ValueError(
            f"{path}: not an array of type uint16 and shape ({count}, 2) as numpy.save writes it; {REMEDY}"
        )
    return np.asarray(np.memmap(path, "<u2", "r", end, (count, 2)))


def _remedy_without_manifest(folder: Path) -> str:
    if folder.is_dir() and any(folder.glob("part*")):
        return "`python -m dataloading index` makes a data set of shards from elsewhere"
    if inside := sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}")):
        return f"name a data set in this folder: {', '.join(inside)}"
    return (
        "`python -m dataloading wikipedia` makes the benchmark's data (docs/data.md), `from-text` data of your own text"
    )
