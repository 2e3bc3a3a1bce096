"""The native layout: an HDF5 file that holds the flat arrays of `Samples` as they are, described by root attributes.

Without compression each array is stored in one piece and read through a memory map: a sample costs one copy, and forked
readers share nothing that moves. With it the arrays are chunked, and opening the file unpacks it into memory: for
archives and transport.
"""

import io
import json
import mmap
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from dataloading.files import write_atomically
from dataloading.samples import Samples
from dataloading.shard import DatasetInfo, FlatShard, ShardRecord, check_content, check_offsets

FORMAT = "mlperf-bert-samples"
SCHEMA_VERSION = 1

Compression = Literal["none", "gzip"]

_CHUNK_ELEMENTS = 1 << 16
_MOST_EXPANSION = 1100
"""Deflate packs at most 1,032 bytes into one, so an array that claims to be larger is not what the file holds."""

DTYPES = {
    "input_ids": np.dtype("<u2"),
    "segment_ids": np.dtype("u1"),
    "sequence_offsets": np.dtype("<i8"),
    "masked_lm_positions": np.dtype("<u2"),
    "masked_lm_ids": np.dtype("<u2"),
    "masked_lm_offsets": np.dtype("<i8"),
    "next_sentence_labels": np.dtype("u1"),
}


def write_shard(path: Path, samples: Samples, info: DatasetInfo, compression: Compression = "none") -> ShardRecord:
    """Writes one shard; the file appears complete or not at all.

    The same samples and info give the same bytes. Needs as much memory as the file has bytes.

    Raises:
        ValueError: the samples break what ``info`` says of them.
        OSError: the disk is full, or will not be written for another reason.
    """
    check_offsets(samples, path)
    check_content(samples, info, path)
    digest = samples.digest()
    attributes = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "digest": digest, "info": info.to_json()}
    storage = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if compression == "gzip" else {}
    # Composed in memory and then written by Python: when the disk is full, the HDF5 library fails again as it closes the
    # file, hides the reason, and can take the process down with it.
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        file.attrs.update(attributes)
        for name, dtype in DTYPES.items():
            data = getattr(samples, name)
            chunks = {"chunks": (min(len(data), _CHUNK_ELEMENTS),)} if storage and len(data) else {}
            file.create_dataset(name, data=data, dtype=dtype, **(storage if chunks else {}), **chunks)
    write_atomically(path, image.getbuffer())
    return ShardRecord(
        name=path.name,
        samples=len(samples),
        tokens=len(samples.input_ids),
        masked_tokens=len(samples.masked_lm_ids),
        digest=digest,
        file_bytes=image.getbuffer().nbytes,
    )


def open_native(path: Path, file: h5py.File, content: mmap.mmap) -> FlatShard:
    """A file of `write_shard`, given open and mapped; checks its structure and reads nothing but the offsets.

    Raises:
        ValueError: not of this version, or inconsistent.
    """
    check_version(file.attrs.get("format"), file.attrs.get("schema_version"))
    digest = str(file.attrs["digest"])
    info = DatasetInfo(**json.loads(str(file.attrs["info"])))
    datasets = {name: _dataset(file, name) for name in DTYPES}
    compressed = datasets["input_ids"].get_create_plist().get_layout() == h5py.h5d.CHUNKED
    arrays = {name: _array(content, dataset, name, compressed) for name, dataset in datasets.items()}
    shard = FlatShard(path, info, "native", Samples(**arrays), None if compressed else content)
    shard.digest = digest
    return shard


def check_version(found_format: object, found_version: object) -> None:
    """ValueError unless a file says that it has this format and schema version."""
    if (str(found_format), str(found_version)) != (FORMAT, str(SCHEMA_VERSION)):
        raise ValueError(f"{found_format}, schema version {found_version}; expected {FORMAT}, {SCHEMA_VERSION}")


def view_contiguous(
    content: mmap.mmap, dataset: h5py.h5d.DatasetID, name: str, dtype: np.dtype[Any]
) -> NDArray[Any] | None:
    """A dataset of an open file as an array over the map of the file, or None where it is not stored in one piece.

    Raises:
        ValueError: it claims to lie outside the file.
    """
    shape = dataset.shape or (0,)
    size = int(np.prod(shape))
    if size == 0:
        return np.empty(shape, dtype)
    offset = dataset.get_offset()
    if offset is None:
        return None
    if offset + size * dtype.itemsize > len(content):
        raise ValueError(f"{name} is not inside the file")
    return np.frombuffer(content, dtype, size, offset).reshape(shape)


def read_bounded_dataset(dataset: h5py.h5d.DatasetID, name: str, file_bytes: int) -> NDArray[Any]:
    """A whole dataset in memory; ValueError where it claims more than a file of this size can hold."""
    shape, dtype = dataset.shape or (0,), dataset.dtype
    claimed = int(np.prod(shape)) * dtype.itemsize
    if claimed > _MOST_EXPANSION * file_bytes:
        raise ValueError(f"{name} claims {claimed:,} bytes in a file of {file_bytes:,}")
    values = np.empty(shape, dtype)
    if values.size:
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
    return values


def _dataset(file: h5py.File, name: str) -> h5py.h5d.DatasetID:
    """A flat array of the file, by the library's low-level interface: a run opens thousands, ten times as fast this way."""
    try:
        dataset = h5py.h5d.open(file.id, name.encode())
    except KeyError:
        raise ValueError(f"{name} is missing, expected a flat array of {DTYPES[name]}") from None
    if dataset.dtype != DTYPES[name] or len(dataset.shape or ()) != 1:
        raise ValueError(f"{name} is {dataset.dtype} {dataset.shape}, expected a flat array of {DTYPES[name]}")
    return dataset


def _array(content: mmap.mmap, dataset: h5py.h5d.DatasetID, name: str, compressed: bool) -> NDArray[Any]:
    if compressed:
        return read_bounded_dataset(dataset, name, len(content))
    view = view_contiguous(content, dataset, name, DTYPES[name])
    if view is None:
        raise ValueError(f"{name} is not stored in one piece inside the file")
    return view
