"""Samples on disk: HDF5 shards of flat arrays, and the folder that makes a data set of them.

    FOLDER/part_00000_of_00008.hdf5   one shard: the arrays of `Samples` as they are, described by root attributes
    FOLDER/manifest.json              what the data set is, and for each shard its counts, digest and size
    FOLDER/lengths.npy                uint16 [N, 2]: tokens and masked tokens of each sample, shard by shard

Planning reads the manifest and the length index alone, so it can happen before a timed run may touch data. The arrays
of a shard are stored contiguously and read through a memory map: a sample costs one copy, and forked readers share
nothing that moves.
"""

import hashlib
import io
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from dataloading.samples import Samples, concatenate
from dataloading.tokenization import Vocabulary

FORMAT = "mlperf-bert-samples"
SCHEMA_VERSION = 1

MANIFEST_NAME = "manifest.json"
LENGTHS_NAME = "lengths.npy"

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MAX_MANIFEST_BYTES = 64 << 20
_VERIFIED_IN_PASSING = 1 << 30
"""Bytes of a data set up to which every shard is compared with its digest when it is opened; `verify` does larger ones."""

_MAX_OPEN_SHARDS = 256
"""Memory maps kept at a time by one reader; each holds a file descriptor, of which a process usually may have 1,024."""

_DTYPES = {
    "input_ids": np.dtype("<u2"),
    "segment_ids": np.dtype("u1"),
    "sequence_offsets": np.dtype("<i8"),
    "masked_lm_positions": np.dtype("<u2"),
    "masked_lm_ids": np.dtype("<u2"),
    "masked_lm_offsets": np.dtype("<i8"),
    "next_sentence_labels": np.dtype("u1"),
}
_REMEDY = "copy or prepare the data set again"


@dataclass(frozen=True)
class DatasetInfo:
    """What the samples are and what they were made from; the same in every shard of a data set."""

    vocab_size: int
    max_seq_length: int
    max_predictions_per_seq: int
    vocabulary_md5: str
    vocabulary_sha256: str
    options: dict[str, int | float | bool | str]
    """The settings that made the samples, by name."""
    sources: dict[str, str]
    """SHA-256 of each text file, by name."""

    def __post_init__(self) -> None:
        limits = {"vocab_size": 1 << 16, "max_seq_length": (1 << 16) - 1, "max_predictions_per_seq": (1 << 16) - 1}
        for name, most in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} is {value!r}; expected 1 to {most:,}")
        for name, expected in (
            ("vocabulary_md5", str),
            ("vocabulary_sha256", str),
            ("options", dict),
            ("sources", dict),
        ):
            if not isinstance(getattr(self, name), expected):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {expected.__name__}")

    def to_json(self) -> str:
        """One line of JSON, keys sorted."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class ShardRecord:
    """One row of the manifest."""

    name: str
    samples: int
    tokens: int
    masked_tokens: int
    digest: str
    """`Samples.digest` of the content."""
    file_bytes: int

    def __post_init__(self) -> None:
        # A name, not a path: a manifest must not lead out of its folder.
        if not isinstance(self.name, str) or self.name in ("", "..") or Path(self.name).name != self.name:
            raise ValueError(f"shard name {self.name!r}; expected a file name such as part_00000_of_00001.hdf5")
        counts = (self.samples, self.tokens, self.masked_tokens, self.file_bytes)
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError(f"counts of {self.name} are {counts}; expected non-negative integers")
        if not isinstance(self.digest, str):
            raise ValueError(f"digest of {self.name} is {self.digest!r}; expected text")


def write_shard(path: Path, samples: Samples, info: DatasetInfo) -> ShardRecord:
    """Writes one shard; the file appears complete or not at all.

    The same samples and info give the same bytes. Needs as much memory as the file has bytes.

    Raises:
        ValueError: the samples break what ``info`` says of them.
        OSError: the disk is full, or will not be written for another reason.
    """
    _check_offsets(samples, path)
    _check_content(samples, info, path)
    digest = samples.digest()
    attributes = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "digest": digest, "info": info.to_json()}
    # Composed in memory and then written by Python: when the disk is full, the HDF5 library fails again as it closes the
    # file, hides the reason, and can take the process down with it.
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        file.attrs.update(attributes)
        for name, dtype in _DTYPES.items():
            file.create_dataset(name, data=getattr(samples, name), dtype=dtype)
    with atomic_path(path) as temporary:
        temporary.write_bytes(image.getbuffer())
    with open_shard(path) as shard:
        return shard.record


def open_shard(path: Path) -> "Shard":
    """Opens a shard for reading; checks its structure, and reads nothing but the offsets.

    Raises:
        ValueError: missing, truncated, not of this format and version, or inconsistent.
    """
    return Shard(path)


class Shard:
    """A shard that is open for reading; a context manager."""

    info: DatasetInfo
    digest: str
    """`Samples.digest` of the content, as the writer saw it."""
    record: ShardRecord
    """What a manifest says of this file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Python's own open(), and the library reads through it: opened by the library, the file would raise no audit event
        # "open", by which a timed run notices that data is touched. The signature keeps strange files from the library.
        try:
            with path.open("rb") as file:
                if file.read(len(_SIGNATURE)) != _SIGNATURE:
                    raise ValueError(f"{path}: not an HDF5 file, or its beginning is lost; {_REMEDY}")
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._samples = self._view_samples(file, content)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; {_REMEDY}") from None
        _check_offsets(self._samples, path)
        self.record = ShardRecord(
            name=path.name,
            samples=len(self._samples),
            tokens=len(self._samples.input_ids),
            masked_tokens=len(self._samples.masked_lm_ids),
            digest=self.digest,
            file_bytes=len(content),
        )

    def __len__(self) -> int:
        return len(self._samples)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] real tokens of each sample."""
        return self._samples.lengths

    @property
    def masked_counts(self) -> NDArray[np.int64]:
        """[n] masked tokens of each sample."""
        return self._samples.masked_counts

    def read(self, start: int, stop: int) -> Samples:
        """Samples ``start`` to ``stop``; IndexError outside the shard, ValueError for bad content.

        The arrays are read-only views of the file, which stays mapped as long as they live.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{self.path}: samples {start} to {stop} asked for; it holds {len(self):,}")
        samples = self._samples.slice(start, stop)
        _check_content(samples, self.info, self.path)
        return samples

    def take(self, indices: NDArray[np.int64]) -> Samples:
        """The samples at ``indices`` in that order, copied; errors as in `read`."""
        _check_indices(indices, len(self), self.path)
        samples = self._samples.take(indices)
        _check_content(samples, self.info, self.path)
        return samples

    def verify(self) -> None:
        """Reads everything; ValueError if the content is not what was written."""
        _check_content(self._samples, self.info, self.path)
        if (found := self._samples.digest()) != self.digest:
            raise ValueError(
                f"{self.path}: content has digest {found[:16]}..., expected {self.digest[:16]}...; {_REMEDY}"
            )

    def close(self) -> None:
        """Lets go of the file; samples that were read stay valid."""
        self.__dict__.pop("_samples", None)

    def _view_samples(self, opened: BinaryIO, content: mmap.mmap) -> Samples:
        """The arrays as views of the memory map, after a check of attributes, types, shapes and places in the file."""
        try:
            with h5py.File(opened, "r") as file:
                _check_version(file.attrs.get("format"), file.attrs.get("schema_version"))
                self.digest = str(file.attrs["digest"])
                self.info = DatasetInfo(**json.loads(str(file.attrs["info"])))
                return Samples(**{name: _view(content, file, name) for name in _DTYPES})
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: damaged or of another kind ({error}); {_REMEDY}") from None


def write_dataset(folder: Path, samples: Samples, *, shards: int, info: DatasetInfo) -> None:
    """Writes a data set of ``shards`` shards, the samples in order and evenly divided.

    The folder must be absent or empty; it appears complete or not at all.

    Raises:
        ValueError: the folder holds something, there are fewer samples than shards, or they break what ``info`` says.
    """
    folder = folder.absolute()
    require_absent_or_empty(folder)
    if not 1 <= shards <= len(samples):
        raise ValueError(f"shards is {shards} for {len(samples):,} samples; expected 1 to the number of samples")
    bounds = np.linspace(0, len(samples), shards + 1).astype(np.int64)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        records = []
        for index, (start, stop) in enumerate(pairwise(bounds.tolist())):
            path = partial / f"part_{index:05d}_of_{shards:05d}.hdf5"
            records.append(write_shard(path, samples.slice(start, stop), info))
        write_metadata(partial, records, samples.lengths, samples.masked_counts, info)
        partial.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_metadata(
    folder: Path,
    records: list[ShardRecord],
    lengths: NDArray[np.int64],
    masked_counts: NDArray[np.int64],
    info: DatasetInfo,
) -> None:
    """Writes the length index and then the manifest, which makes the shards in ``folder`` a data set.

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
    for name, content in ((LENGTHS_NAME, index.getvalue()), (MANIFEST_NAME, json.dumps(manifest, indent=1).encode())):
        with atomic_path(folder / name) as temporary:
            temporary.write_bytes(content)


def require_absent_or_empty(folder: Path) -> None:
    """ValueError unless a data set can be made at ``folder``."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; name a folder that does not exist or is empty")


def open_dataset(folder: Path) -> "Dataset":
    """Opens a data set: reads the manifest and the length index, and touches no shard.

    Raises:
        ValueError: metadata missing, damaged, of another version, or at odds with itself.
    """
    path = folder / MANIFEST_NAME
    content = _read_bounded(path, _MAX_MANIFEST_BYTES)
    try:
        manifest = json.loads(content)
        _check_version(manifest["format"], manifest["schema_version"])
        info = DatasetInfo(**manifest["info"])
        shards = tuple(ShardRecord(**record) for record in manifest["shards"])
        lengths_sha256 = manifest["lengths_sha256"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged or of another kind ({error}); {_REMEDY}") from None
    lengths = _read_lengths(folder / LENGTHS_NAME, sum(shard.samples for shard in shards), lengths_sha256)
    return Dataset(folder, info, shards, lengths)


class Dataset:
    """A folder of shards, read by global sample index: shard by shard in the order of the manifest.

    Shards are opened when first needed. An open shard is a read-only memory map, which a forked process may go on
    using; a pickled data set opens its shards anew.
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
        _check_indices(indices, len(self), self.folder)
        if not len(indices):
            return self._shard(0).take(indices)
        order = np.argsort(indices, kind="stable")
        ascending = indices[order]
        shard_of = np.searchsorted(self._first_samples, ascending, side="right") - 1
        used, starts = np.unique(shard_of, return_index=True)
        blocks = [
            self._shard(shard).take(part - self._first_samples[shard])
            for shard, part in zip(used, np.split(ascending, starts[1:]), strict=True)
        ]
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return concatenate(blocks).take(rank)

    def verify(self, progress: Callable[[ShardRecord], None] = lambda _: None) -> None:
        """Reads every shard and compares it with its digest and with the length index; ValueError at the first
        difference.

        ``progress`` is called after each shard.
        """
        for index, record in enumerate(self.shards):
            with self._open_listed(index) as shard:
                shard.verify()
                lengths = np.stack([shard.lengths, shard.masked_counts], axis=1)
            rows = self._length_index[self._first_samples[index] : self._first_samples[index + 1]]
            if not np.array_equal(rows, lengths):
                raise ValueError(
                    f"{self.folder / LENGTHS_NAME}: lengths of {record.name} differ from the shard; {_REMEDY}"
                )
            progress(record)

    def check_files(self) -> None:
        """ValueError unless every shard is there in its full size; looks at the folder and opens no shard."""
        for record in self.shards:
            path = self.folder / record.name
            size = path.stat().st_size if path.is_file() else None
            if size != record.file_bytes:
                found = "missing" if size is None else f"{size:,} bytes"
                raise ValueError(f"{path}: {found}, {MANIFEST_NAME} lists {record.file_bytes:,} bytes; {_REMEDY}")

    def close(self) -> None:
        """Closes every open shard; they open again when needed."""
        self._open_shards.clear()

    def _shard(self, index: int) -> Shard:
        """An open shard that agrees with the manifest; the one opened longest ago makes room for it."""
        if index not in self._open_shards:
            shard = self._open_listed(index)
            if self._verified_in_passing:
                shard.verify()
            if len(self._open_shards) >= _MAX_OPEN_SHARDS:
                del self._open_shards[next(iter(self._open_shards))]
            self._open_shards[index] = shard
        return self._open_shards[index]

    def _open_listed(self, index: int) -> Shard:
        """A shard, newly opened, that agrees with the manifest."""
        record = self.shards[index]
        shard = open_shard(self.folder / record.name)
        if shard.record != record or shard.info != self.info:
            raise ValueError(f"{shard.path}: not the shard that {MANIFEST_NAME} lists; {_REMEDY}")
        return shard


def _check_version(found_format: object, found_version: object) -> None:
    """ValueError unless a file says that it has this format and schema version."""
    if (str(found_format), str(found_version)) != (FORMAT, str(SCHEMA_VERSION)):
        raise ValueError(f"{found_format}, schema version {found_version}; expected {FORMAT}, {SCHEMA_VERSION}")


def _view(content: mmap.mmap, file: h5py.File, name: str) -> NDArray[Any]:
    """A dataset of an open file as an array over the map of the file's ``content``."""
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset) or dataset.dtype != _DTYPES[name] or dataset.ndim != 1:
        raise ValueError(f"{name} is {dataset}, expected a flat array of {_DTYPES[name]}")
    if len(dataset) == 0:
        return np.empty(0, _DTYPES[name])
    offset = dataset.id.get_offset()
    if dataset.chunks or offset is None or offset + dataset.nbytes > len(content):
        raise ValueError(f"{name} is not stored in one piece inside the file")
    return np.frombuffer(content, _DTYPES[name], len(dataset), offset)


def _check_indices(indices: NDArray[np.int64], count: int, path: Path) -> None:
    """IndexError unless every index is from 0 to ``count`` - 1."""
    if len(indices) and not (indices.min() >= 0 and indices.max() < count):
        raise IndexError(f"{path}: indices {indices.min()} to {indices.max()} asked for; it holds {count:,} samples")


def _check_offsets(samples: Samples, path: Path) -> None:
    """ValueError unless the arrays fit together: lengths agree, offsets rise from 0 to the end."""
    count, token_count, masked_count = len(samples), len(samples.input_ids), len(samples.masked_lm_ids)
    if len(samples.segment_ids) != token_count or len(samples.masked_lm_positions) != masked_count:
        raise ValueError(f"{path}: arrays of one kind differ in length; {_REMEDY}")
    for name, offsets, end in (
        ("sequence_offsets", samples.sequence_offsets, token_count),
        ("masked_lm_offsets", samples.masked_lm_offsets, masked_count),
    ):
        rises = (
            len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == end and (offsets[1:] >= offsets[:-1]).all()
        )
        if not rises:
            raise ValueError(f"{path}: {name} do not rise from 0 to {end:,} over {count:,} samples; {_REMEDY}")


def _check_content(samples: Samples, info: DatasetInfo, path: Path) -> None:
    """ValueError unless every value is in the range that ``info`` promises."""
    lengths, masked_counts = samples.lengths, samples.masked_counts
    room = np.repeat(lengths, masked_counts) - samples.masked_lm_positions
    for name, values, least, most in (
        ("sample length", lengths, 1, info.max_seq_length),
        ("masked tokens of a sample", masked_counts, 0, info.max_predictions_per_seq),
        ("input_ids", samples.input_ids, 0, info.vocab_size - 1),
        ("masked_lm_ids", samples.masked_lm_ids, 0, info.vocab_size - 1),
        ("segment_ids", samples.segment_ids, 0, 1),
        ("next_sentence_labels", samples.next_sentence_labels, 0, 1),
        ("tokens after a masked position", room, 1, info.max_seq_length),
    ):
        if len(values) and not (values.min() >= least and values.max() <= most):
            raise ValueError(f"{path}: {name}: {values.min()} to {values.max()}, expected {least} to {most}; {_REMEDY}")


def _read_lengths(path: Path, count: int, sha256: str) -> NDArray[np.uint16]:
    """The length index [count, 2], checked against its digest."""
    content = _read_bounded(path, 4 * count + 4096)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{path}: digest differs from {MANIFEST_NAME}; {_REMEDY}")
    try:
        lengths = np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {_REMEDY}") from None
    if lengths.dtype != np.dtype("<u2") or lengths.shape != (count, 2):
        raise ValueError(f"{path}: {lengths.dtype} {lengths.shape}, expected uint16 ({count}, 2); {_REMEDY}")
    return lengths


def _read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a file of at most ``limit`` bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise ValueError(f"{path}: {size:,} bytes, expected at most {limit:,}; {_REMEDY}")
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name a folder that `python -m dataloading prepare` made") from None


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that becomes ``path``, safely on disk, when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        # Writing to an open file fails without its name.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
