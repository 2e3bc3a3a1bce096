"""The metadata of a data set: its manifest and its length index."""

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from console.files import read_json, sha256_of, shown, write_atomically
from dataloading.shards.native import FORMAT, SCHEMA_VERSION
from dataloading.shards.shard import REMEDY, DatasetInfo, ShardRecord

MANIFEST_NAME = "manifest.json"
LENGTHS_NAME = "lengths.npy"

_MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Manifest:
    """The content of a data set's manifest."""

    format: Literal["mlperf-bert-samples"]
    schema_version: Literal[1]
    samples: int
    lengths_sha256: str
    """Digest of the length index."""
    info: DatasetInfo
    shards: tuple[ShardRecord, ...]


def shard_name(index: int, count: int) -> str:
    """Return the file name of shard ``index`` of ``count``, in the form that published data sets use."""
    return f"part_{index:05d}_of_{count:05d}.hdf5"


def write_metadata(
    folder: Path,
    records: list[ShardRecord],
    lengths: NDArray[np.integer],
    masked_counts: NDArray[np.integer],
    info: DatasetInfo,
) -> None:
    """Turn the shards in ``folder`` into a data set: write the length index, and then the manifest.

    ``lengths`` and ``masked_counts``: [N], in the order of ``records``.
    """
    index = io.BytesIO()
    np.save(index, np.stack([lengths, masked_counts], axis=1).astype("<u2"), allow_pickle=False)
    digest = hashlib.sha256(index.getbuffer()).hexdigest()
    manifest = Manifest(FORMAT, SCHEMA_VERSION, sum(each.samples for each in records), digest, info, tuple(records))
    write_atomically(folder / LENGTHS_NAME, index.getvalue())
    write_atomically(folder / MANIFEST_NAME, json.dumps(asdict(manifest), indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a data set; ValueError if it is missing, damaged or has another version."""
    path = folder / MANIFEST_NAME
    found = read_json(path, _MAX_MANIFEST_BYTES, _remedy_without_manifest(folder))
    try:
        # Parsed with Python's json module, because file names need not be UTF-8.
        return msgspec.convert(found, Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or of another version ({shown(error)}); {REMEDY}") from None


def read_lengths(path: Path, manifest: Manifest) -> NDArray[np.uint16]:
    """Check the length index against its digest in the manifest, and return it as a memory map [samples, 2]."""
    try:
        if sha256_of(path) != manifest.lengths_sha256:
            raise ValueError(f"{path}: digest differs from {MANIFEST_NAME}; {REMEDY}")
        # allow_pickle=False, because an array of objects is a pickle, which can run code.
        lengths = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {REMEDY}") from None
    count = sum(shard.samples for shard in manifest.shards)
    if lengths.dtype != np.dtype("<u2") or lengths.shape != (count, 2):
        raise ValueError(f"{path}: {lengths.dtype} {lengths.shape}, expected uint16 ({count}, 2); {REMEDY}")
    return lengths


def _remedy_without_manifest(folder: Path) -> str:
    if folder.is_dir() and any(folder.glob("part*")):
        return "`python -m dataloading index` makes a data set of shards from elsewhere"
    return (
        "`python -m dataloading wikipedia` makes the benchmark's data (docs/data.md), `from-text` data of your own text"
    )
