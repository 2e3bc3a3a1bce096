"""A data set: a folder of shards with a manifest and a length index.

    FOLDER/part_00000_of_00008.hdf5   a shard, of any layout that `open_shard` recognises
    FOLDER/manifest.json              what the data set is, and for each shard its counts, digest and size
    FOLDER/lengths.npy                uint16 [N, 2]: tokens and masked tokens of each sample, shard by shard

Planning reads the manifest and the length index alone, so it can happen before a timed run may touch data.
"""

import hashlib
import io
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloading.files import atomic_path, open_regular, read_json, shown, sync, write_atomically
from dataloading.shards.formats import open_shard
from dataloading.shards.native import FORMAT, SCHEMA_VERSION, check_version, write_shard
from dataloading.shards.samples import SampleBuilder, Samples, concatenate
from dataloading.shards.shard import REMEDY, DatasetInfo, Shard, ShardRecord, check_content, check_indices
from dataloading.text.tokenization import Vocabulary

MANIFEST_NAME = "manifest.json"
LENGTHS_NAME = "lengths.npy"

_MAX_MANIFEST_BYTES = 64 << 20
_VERIFIED_IN_PASSING = 1 << 30
"""Bytes of a data set up to which every shard is compared with its digest when it is opened; `verify` does larger ones."""

_OTHER_DESCRIPTORS = 256
"""File descriptors left to the rest of the process; each open shard holds one."""

_MAX_HELD_BYTES = 512 << 20
"""Memory for shards that cannot be read in place."""

_SAMPLES_BEFORE_FORGETTING = 4096
"""Samples read at random before mapped pages are given back: each may have brought in 64 KiB around each of its arrays."""


@dataclass(frozen=True)
class Part:
    """One of several shares of the work of making a data set, counted from 1."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise ValueError(f"part {self.index}/{self.count}; expected i/n with i from 1 to n")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def manifest_name(self) -> str:
        """Name of the part's manifest: parts may share a folder."""
        return f"manifest_{self.index}_of_{self.count}.json"

    @property
    def lengths_name(self) -> str:
        """Name of the part's length index."""
        return f"lengths_{self.index}_of_{self.count}.npy"


def shard_name(index: int, count: int) -> str:
    """File name of shard ``index`` of ``count``, as the data sets in circulation have it."""
    return f"part_{index:05d}_of_{count:05d}.hdf5"


def write_dataset(folder: Path, samples: Samples, *, shards: int, info: DatasetInfo) -> None:
    """Writes a data set of ``shards`` shards, the samples in order and evenly divided.

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


def write_metadata(
    folder: Path,
    records: list[ShardRecord],
    lengths: NDArray[np.integer],
    masked_counts: NDArray[np.integer],
    info: DatasetInfo,
    part: Part | None = None,
) -> None:
    """Writes the length index and then the manifest, which makes the shards in ``folder`` a data set, or part of one.

    ``lengths`` and ``masked_counts``: [N], in the order of ``records``.
    """
    index = io.BytesIO()
    np.save(index, np.stack([lengths, masked_counts], axis=1).astype("<u2"), allow_pickle=False)
    manifest = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "samples": sum(record.samples for record in records),
        "lengths_sha256": hashlib.sha256(index.getbuffer()).hexdigest(),
        "info": asdict(info),
        "shards": [asdict(record) for record in records],
    }
    write_atomically(folder / (part.lengths_name if part else LENGTHS_NAME), index.getvalue())
    write_atomically(folder / (part.manifest_name if part else MANIFEST_NAME), json.dumps(manifest, indent=1).encode())


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes ``folder`` when the block ends without an error, and is removed otherwise.

    Raises:
        ValueError: ``folder`` holds something.
    """
    require_absent_or_empty(folder)
    with atomic_path(folder) as aside:
        aside.mkdir(parents=True)
        yield aside


def require_absent_or_empty(folder: Path) -> None:
    """ValueError unless a data set can be made at ``folder``."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; name a folder that does not exist or is empty")


@dataclass(frozen=True)
class Manifest:
    """What the manifest of a data set says."""

    info: DatasetInfo
    shards: tuple[ShardRecord, ...]
    lengths_sha256: str


def read_manifest(folder: Path, part: Part | None = None) -> Manifest:
    """The manifest of a data set, or of one part of it; ValueError where it is missing, damaged or of another version."""
    path = folder / (part.manifest_name if part else MANIFEST_NAME)
    found = read_json(path, _MAX_MANIFEST_BYTES, _remedy_without_manifest(folder))
    try:
        check_version(found["format"], found["schema_version"])
        shards = tuple(ShardRecord(**record) for record in found["shards"])
        return Manifest(DatasetInfo(**found["info"]), shards, found["lengths_sha256"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or of another kind ({shown(error)}); {REMEDY}") from None


def open_dataset(folder: Path, part: Part | None = None) -> "Dataset":
    """Opens a data set, or one part of it: reads the manifest and the length index, and touches no shard.

    Raises:
        ValueError: metadata missing, damaged, of another version, or at odds with itself.
    """
    manifest = read_manifest(folder, part)
    lengths_path = folder / (part.lengths_name if part else LENGTHS_NAME)
    lengths = _read_lengths(lengths_path, sum(shard.samples for shard in manifest.shards), manifest.lengths_sha256)
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
        """ValueError unless the samples were made with this vocabulary file."""
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
        shard_of = np.searchsorted(self._first_samples, indices, side="right") - 1
        rows = indices - self._first_samples[shard_of]
        shards = {index: self._shard(index) for index in np.unique(shard_of).tolist()}
        self._forget_now_and_then(len(indices))
        builder = SampleBuilder()
        if all(shards[shard].add_to(builder, row) for shard, row in zip(shard_of.tolist(), rows.tolist(), strict=True)):
            samples = builder.samples()
            try:
                check_content(samples, self.info, self.folder)
            except ValueError:
                pass  # what follows names the shard
            else:
                return samples
        return self._take_by_shard(shards, shard_of, rows)

    def _take_by_shard(self, shards: dict[int, Shard], shard_of: NDArray[np.int64], rows: NDArray[np.int64]) -> Samples:
        """Samples ``rows`` of shards ``shard_of``, each shard asked once."""
        order = np.argsort(shard_of, kind="stable")
        used, starts = np.unique(shard_of[order], return_index=True)
        parts = np.split(rows[order], starts[1:])
        blocks = [shards[shard].take(part) for shard, part in zip(used.tolist(), parts, strict=True)]
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return concatenate(blocks).take(rank)

    def blocks(self, samples: int = 1 << 14) -> Iterator[Samples]:
        """The whole data set in order, at most ``samples`` at a time, with one shard open at a time."""
        for index in range(len(self.shards)):
            with self.open_listed(index) as shard:
                for start in range(0, len(shard), samples):
                    yield shard.read(start, min(start + samples, len(shard)))
                    shard.forget()

    def verify(self, visit: Callable[[ShardRecord, Samples], None] = lambda *_: None) -> None:
        """Reads every shard and compares it with its digest and with the length index; ValueError at the first
        difference.

        ``visit`` is called with each shard and its samples.
        """
        for index, record in enumerate(self.shards):
            with self.open_listed(index) as shard:
                samples = shard.verify(record.digest)
                lengths = np.stack([shard.lengths, shard.masked_counts], axis=1)
            rows = self._length_index[self._first_samples[index] : self._first_samples[index + 1]]
            if not np.array_equal(rows, lengths):
                raise ValueError(
                    f"{self.folder / LENGTHS_NAME}: lengths of {record.name} differ from the shard; {REMEDY}"
                )
            visit(record, samples)

    def check_files(self) -> None:
        """ValueError unless every shard is there in its full size; looks at the folder and opens no shard."""
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
        if shard.digest is not None:
            agrees &= shard.digest == record.digest and shard.info.without_sources() == self.info.without_sources()
        if not agrees:
            raise ValueError(f"{shard.path}: not the shard that {MANIFEST_NAME} lists; {REMEDY}")
        shard.info = self.info
        return shard

    def close(self) -> None:
        """Closes every open shard; they open again when needed."""
        self._open_shards.clear()

    def _shard(self, index: int) -> Shard:
        """An open shard that agrees with the manifest; those opened longest ago make room for it."""
        if index not in self._open_shards:
            shard = self.open_listed(index)
            if self._verified_in_passing:
                shard.verify(self.shards[index].digest)
            shard.expect_random_reads()
            held = shard.held_bytes + sum(other.held_bytes for other in self._open_shards.values())
            while self._open_shards and (len(self._open_shards) >= self._most_open or held > _MAX_HELD_BYTES):
                held -= self._open_shards.pop(next(iter(self._open_shards))).held_bytes
            self._open_shards[index] = shard
        shard = self._open_shards[index]
        shard.require_whole()
        return shard

    def _forget_now_and_then(self, samples: int) -> None:
        """Keeps the memory that the system counts for mapped pages bounded; they stay in its cache."""
        self._samples_read += samples
        if self._samples_read >= _SAMPLES_BEFORE_FORGETTING:
            self._samples_read = 0
            for shard in self._open_shards.values():
                shard.forget()


def _most_open_shards(count: int) -> int:
    """How many of ``count`` shards may be open at a time; raises the process's soft limit for it as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_DESCRIPTORS
    if soft < wanted and hard != soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(count, soft - _OTHER_DESCRIPTORS))


def scan_shards(folder: Path, names: Iterable[str], info: DatasetInfo) -> Dataset:
    """The data set that some shards in ``folder`` make, whether or not it has a manifest; reads every shard.

    ``info`` is what is to be said of the shards; those that say it themselves must agree.

    Raises:
        ValueError: a shard is damaged, differs from ``info``, or holds what another one holds.
    """
    records, lengths = [], [np.empty((0, 2), np.uint16)]
    sources: dict[str, str] = dict(info.sources)
    for name in names:
        with open_shard(folder / name) as shard:
            if shard.digest is None:
                shard.info = info
            elif shard.info.without_sources() != info.without_sources():
                raise ValueError(f"{shard.path}: made otherwise than the rest ({_difference(shard.info, info)})")
            sources |= shard.info.sources
            records.append(shard.record())
            lengths.append(np.stack([shard.lengths, shard.masked_counts], axis=1).astype(np.uint16))
    check_records(records, folder)
    return Dataset(folder, replace(info, sources=sources), tuple(records), np.concatenate(lengths))


def index_shards(folder: Path, names: Iterable[str], info: DatasetInfo, part: Part | None = None) -> Dataset:
    """Makes the shards that `scan_shards` finds a data set, or one part of it, by a manifest and a length index."""
    found = scan_shards(folder, names, info)
    write_metadata(folder, list(found.shards), found.lengths, found.masked_counts, found.info, part)
    return open_dataset(folder, part)


def merge(folders: list[Path], out: Path) -> Dataset:
    """Joins the parts of a data set in ``folders``, or whole data sets in the order named, to one in ``out``.

    Shards are linked where the file system can, and copied otherwise; parts that share one folder may be joined in place
    (``out`` is that folder).

    Raises:
        ValueError: a part is missing or there twice, parts were made otherwise than others, or two shards hold the same.
    """
    members = _members(folders)
    infos = [dataset.info.without_sources() for dataset in members]
    for dataset, info in zip(members, infos, strict=True):
        dataset.check_files()
        if info != infos[0]:
            raise ValueError(
                f"{dataset.folder}: made otherwise than {members[0].folder} ({_difference(info, infos[0])})"
            )
    records = [replace(record) for dataset in members for record in dataset.shards]
    check_records(records, out)
    _check_sources(members)
    sources = {name: digest for dataset in members for name, digest in dataset.info.sources.items()}
    paths = [dataset.folder / record.name for dataset in members for record in dataset.shards]
    lengths = np.concatenate([dataset.lengths for dataset in members])
    masked_counts = np.concatenate([dataset.masked_counts for dataset in members])
    info = replace(infos[0], sources=sources)
    if {path.parent.absolute() for path in paths} == {out.absolute()}:
        write_metadata(out, records, lengths, masked_counts, info)
    else:
        records = [replace(record, name=shard_name(index, len(records))) for index, record in enumerate(records)]
        with new_folder(out) as aside:
            for path, record in zip(paths, records, strict=True):
                _link_or_copy(path, aside / record.name)
            write_metadata(aside, records, lengths, masked_counts, info)
    return open_dataset(out)


def check_records(records: list[ShardRecord], folder: Path) -> None:
    """ValueError where two shards hold the same samples."""
    seen: dict[str, str] = {}
    for record in records:
        if record.digest in seen and record.samples:
            raise ValueError(f"{folder}: {record.name} holds the same samples as {seen[record.digest]}; name each once")
        seen[record.digest] = record.name


def _members(folders: list[Path]) -> list[Dataset]:
    """The data sets to join: whole ones as named, parts in the order of their numbers."""
    parts: dict[Part, Path] = {}
    wholes: list[Dataset] = []
    for folder in folders:
        found = parts_in(folder)
        for part in found:
            if part in parts:
                raise ValueError(f"part {part} is in {parts[part]} and in {folder}; name each part once")
            parts[part] = folder
        if not found:
            wholes.append(open_dataset(folder))
    if not parts:
        if len(wholes) < 2:
            raise ValueError(f"{len(wholes)} data set(s) named; expected the parts of one, or several to join")
        return wholes
    counts = sorted({part.count for part in parts})
    if wholes or len(counts) > 1:
        kinds = [f"parts of {count}" for count in counts] + [f"the whole data set {whole.folder}" for whole in wholes]
        raise ValueError(f"{' and '.join(kinds)} do not make one data set")
    missing = [str(Part(index, counts[0])) for index in range(1, counts[0] + 1) if Part(index, counts[0]) not in parts]
    if missing:
        raise ValueError(f"part {', '.join(missing)} is missing; name the folder that holds it, or prepare it")
    return [open_dataset(parts[part], part) for part in sorted(parts, key=lambda part: part.index)]


def parts_in(folder: Path) -> list[Part]:
    """The parts whose manifests lie in ``folder``."""
    found = []
    for path in sorted(folder.glob("manifest_*_of_*.json")):
        index, _, count = path.stem.removeprefix("manifest_").partition("_of_")
        if index.isdecimal() and count.isdecimal():
            found.append(Part(int(index), int(count)))
    return found


def _check_sources(members: list[Dataset]) -> None:
    """ValueError where one text went into two of the data sets: its samples would be there twice."""
    owner: dict[str, Path] = {}
    for dataset in members:
        for name, digest in dataset.info.sources.items():
            if digest in owner:
                raise ValueError(
                    f"{dataset.folder}: {name} was prepared for {owner[digest]} already; prepare each once"
                )
        owner |= dict.fromkeys(dataset.info.sources.values(), dataset.folder)


def _difference(found: DatasetInfo, expected: DatasetInfo) -> str:
    """The settings in which two descriptions differ, in words."""
    ours, theirs = ({**asdict(info), **info.options} for info in (found, expected))
    names = sorted(name for name in ours.keys() | theirs.keys() if name not in ("options", "sources"))
    different = [name for name in names if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} {ours.get(name)} instead of {theirs.get(name)}" for name in different)


def _link_or_copy(source: Path, target: Path) -> None:
    """``target`` with the content of ``source``, sharing its place on disk where both are on one file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync(target)


def _remedy_without_manifest(folder: Path) -> str:
    """What to do about a folder whose manifest cannot be read."""
    if folder.is_dir() and parts_in(folder):
        return f"it holds parts of a data set: join them by `python -m dataloading merge {folder} ... --out DIR`"
    if folder.is_dir() and any(folder.glob("part*")):
        return "`python -m dataloading index` makes a data set of shards from elsewhere"
    return "name a folder that `python -m dataloading prepare` or `from-text` made"


def _read_lengths(path: Path, count: int, sha256: str) -> NDArray[np.uint16]:
    """The length index [count, 2], checked against its digest: a memory map, which the processes of a machine share."""
    limit = 4 * count + 4096
    try:
        if (size := path.stat().st_size) > limit:
            raise ValueError(f"{path}: {size:,} bytes, expected at most {limit:,}; {REMEDY}")
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {REMEDY}") from None
    if digest != sha256:
        raise ValueError(f"{path}: digest differs from {MANIFEST_NAME}; {REMEDY}")
    try:
        lengths = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {REMEDY}") from None
    if lengths.dtype != np.dtype("<u2") or lengths.shape != (count, 2):
        raise ValueError(f"{path}: {lengths.dtype} {lengths.shape}, expected uint16 ({count}, 2); {REMEDY}")
    return lengths
