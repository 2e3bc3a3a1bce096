"""The native layout: an HDF5 file that holds the flat arrays of `Samples` as they are, described by root attributes.

Without compression each array is stored in one piece and read through a memory map: a sample costs one copy, and forked
readers share nothing that moves. With it the arrays are chunked, and opening the file unpacks it into memory: for
archives and transport.
"""

import io
import json
from pathlib import Path

import h5py
import numpy as np

from console.files import write_atomically
from dataloading.options import Compression
from dataloading.shards.hdf5_file import HDF5Array, HDF5File
from dataloading.shards.samples import Samples
from dataloading.shards.shard import DatasetInfo, FlatShard, ShardRecord, check_content, check_offsets

FORMAT = "mlperf-bert-samples"
SCHEMA_VERSION = 1

_CHUNK_ELEMENTS = 1 << 16

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
    """Write one shard; the file appears complete or not at all.

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
            # An empty array cannot have chunks.
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


def open_native(path: Path, file: HDF5File) -> FlatShard:
    """A file of `write_shard`, given open; checks its structure and, without compression, reads nothing but the offsets.

    Raises:
        ValueError: not of this version, or inconsistent.
    """
    check_version(file.attribute("format"), file.attribute("schema_version"))
    digest, info = file.attribute("digest"), file.attribute("info")
    if not isinstance(digest, str) or not isinstance(info, str):
        raise ValueError("the attributes digest and info are missing")
    arrays = {name: _array(file, name) for name in DTYPES}
    samples = Samples(**{name: array.read() for name, array in arrays.items()})
    in_place = all(array.in_place for array in arrays.values())
    shard = FlatShard(path, DatasetInfo(**json.loads(info)), "native", samples, file.content if in_place else None)
    shard.digest = digest
    return shard


def check_version(found_format: object, found_version: object) -> None:
    """Raise ``ValueError`` unless a file says that it has this format and schema version."""
    # As text: what an attribute or a manifest holds may be of any type.
    if (str(found_format), str(found_version)) != (FORMAT, str(SCHEMA_VERSION)):
        raise ValueError(f"{found_format}, schema version {found_version}; expected {FORMAT}, {SCHEMA_VERSION}")


def _array(file: HDF5File, name: str) -> HDF5Array:
    array = file.array(name)
    if array.ragged or array.dtype != DTYPES[name] or len(array.shape) != 1:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, expected a flat array of {DTYPES[name]}")
    return array
