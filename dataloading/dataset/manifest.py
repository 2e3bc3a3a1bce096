"""The metadata of a data set: its manifest and its length index, and those of a part of one that is made in several."""

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from tokenize import TokenError

import numpy as np
from numpy.typing import NDArray

from console.files import read_json, sha256_of, shown, write_atomically
from dataloading.jobs import WorkPart
from dataloading.shards.native import FORMAT, SCHEMA_VERSION, check_version
from dataloading.shards.shard import REMEDY, DatasetInfo, ShardRecord

MANIFEST_NAME = "manifest.json"
LENGTHS_NAME = "lengths.npy"

_MAX_MANIFEST_BYTES = 64 << 20


def metadata_names(part: WorkPart | None) -> tuple[str, str]:
    """File names of the manifest and the length index of a data set, or of a part of one: parts may share a folder."""
    if part is None:
        return MANIFEST_NAME, LENGTHS_NAME
    return f"manifest_{part.index}_of_{part.count}.json", f"lengths_{part.index}_of_{part.count}.npy"


def shard_name(index: int, count: int) -> str:
    """File name of shard ``index`` of ``count``, as the data sets in circulation have it."""
    return f"part_{index:05d}_of_{count:05d}.hdf5"


def write_metadata(
    folder: Path,
    records: list[ShardRecord],
    lengths: NDArray[np.integer],
    masked_counts: NDArray[np.integer],
    info: DatasetInfo,
    part: WorkPart | None = None,
) -> None:
    """Write the length index and then the manifest, which makes the shards in ``folder`` a data set, or part of one.

    ``lengths`` and ``masked_counts``: [N], in the order of ``records``.
    """
    index = io.BytesIO()
    # Little-endian on every machine, as the digest goes over these bytes.
    np.save(index, np.stack([lengths, masked_counts], axis=1).astype("<u2"), allow_pickle=False)
    manifest = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "samples": sum(record.samples for record in records),
        "lengths_sha256": hashlib.sha256(index.getbuffer()).hexdigest(),
        "info": asdict(info),
        "shards": [asdict(record) for record in records],
    }
    manifest_name, lengths_name = metadata_names(part)
    write_atomically(folder / lengths_name, index.getvalue())
    write_atomically(folder / manifest_name, json.dumps(manifest, indent=1).encode())


@dataclass(frozen=True)
class Manifest:
    """The content of a data set's manifest."""

    info: DatasetInfo
    shards: tuple[ShardRecord, ...]
    lengths_sha256: str


def read_manifest(folder: Path, part: WorkPart | None = None) -> Manifest:
    """The manifest of a data set, or of one part of it; ValueError where it is missing, damaged or of another version."""
    path = folder / metadata_names(part)[0]
    found = read_json(path, _MAX_MANIFEST_BYTES, _remedy_without_manifest(folder))
    try:
        # The version first, as another one may have other fields.
        check_version(found["format"], found["schema_version"])
        shards = tuple(ShardRecord(**record) for record in found["shards"])
        return Manifest(DatasetInfo(**found["info"]), shards, found["lengths_sha256"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or of another kind ({shown(error)}); {REMEDY}") from None


def parts_in(folder: Path) -> list[WorkPart]:
    """The parts whose manifests lie in ``folder``."""
    found = []
    for path in sorted(folder.glob("manifest_*_of_*.json")):
        index, _, count = path.stem.removeprefix("manifest_").partition("_of_")
        if index.isdecimal() and count.isdecimal():
            found.append(WorkPart(int(index), int(count)))
    return found


def _remedy_without_manifest(folder: Path) -> str:
    if folder.is_dir() and parts_in(folder):
        return f"it holds parts of a data set: join them by `python -m dataloading merge {quote(str(folder))} ... --out DIR`"
    if folder.is_dir() and any(folder.glob("part*")):
        return "`python -m dataloading index` makes a data set of shards from elsewhere"
    return (
        "`python -m dataloading wikipedia` makes the benchmark's data (docs/data.md), `from-text` data of your own text"
    )


def read_lengths(path: Path, count: int, sha256: str) -> NDArray[np.uint16]:
    """The length index [count, 2], checked against its digest: a memory map, which the processes of a machine share."""
    limit = 4 * count + 4096  # two numbers of 16 bits a sample, and NumPy's header
    try:
        # Before it is read for its digest, as the file may be of any size.
        if (size := path.stat().st_size) > limit:
            raise ValueError(f"{path}: {size:,} bytes, expected at most {limit:,}; {REMEDY}")
        digest = sha256_of(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {REMEDY}") from None
    if digest != sha256:
        raise ValueError(f"{path}: digest differs from {MANIFEST_NAME}; {REMEDY}")
    try:
        # allow_pickle: an array of objects would be a pickle, which can run code.
        lengths = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError, TypeError, RecursionError, TokenError) as error:  # NumPy parses the header as Python
        raise ValueError(f"{path}: {error}; {REMEDY}") from None
    if lengths.dtype != np.dtype("<u2") or lengths.shape != (count, 2):
        raise ValueError(f"{path}: {lengths.dtype} {lengths.shape}, expected uint16 ({count}, 2); {REMEDY}")
    return lengths
