"""The native layout: an HDF5 file with the flat arrays of `Samples`. Root attributes describe the samples.

Each array is stored contiguously and read through a memory map, so that reading a sample costs one copy.
"""

import json
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np

from dataloading.shards.hdf5_file import HDF5File, new_hdf5_file
from dataloading.shards.samples import Samples
from dataloading.shards.shard import DatasetInfo, FlatShard, check_content, check_offsets

FORMAT = "mlperf-bert-samples"
SCHEMA_VERSION = 1

DTYPES = {
    "input_ids": np.dtype("<u2"),
    "segment_ids": np.dtype("u1"),
    "sequence_offsets": np.dtype("<i8"),
    "masked_lm_positions": np.dtype("<u2"),
    "masked_lm_ids": np.dtype("<u2"),
    "masked_lm_offsets": np.dtype("<i8"),
    "next_sentence_labels": np.dtype("u1"),
}


def write_shard(path: Path, samples: Samples, info: DatasetInfo) -> None:
    """Write one shard. The file appears complete or not at all.

    Equal samples and descriptions give identical files. Needs as much memory as the size of the file.
    """
    check_offsets(samples, path)
    check_content(samples, info, path)
    digest = samples.digest()
    with new_hdf5_file(path) as file:
        # Keys are sorted, so that equal descriptions make equal files.
        description = json.dumps(asdict(info), sort_keys=True)
        file.attrs.update({"format": FORMAT, "schema_version": SCHEMA_VERSION, "digest": digest, "info": description})
        for name, dtype in DTYPES.items():
            file.create_dataset(name, data=getattr(samples, name), dtype=dtype)


def open_native(path: Path, file: HDF5File) -> FlatShard:
    """Open a file that `write_shard` wrote, and check its offsets.

    Raises ``ValueError`` if the file is damaged or has another version.
    """
    version = file.attribute("format"), file.attribute("schema_version")
    if version != (FORMAT, SCHEMA_VERSION):
        raise ValueError(f"{version[0]}, schema version {version[1]}; expected {FORMAT}, {SCHEMA_VERSION}")
    arrays = {name: file.array(name) for name in DTYPES}
    for name, array in arrays.items():
        if array.row_dtype is not None or array.values.dtype != DTYPES[name] or array.values.ndim != 1:
            raise ValueError(f"{name} is {array.values.dtype} {array.values.shape}, expected a flat {DTYPES[name]}")
    samples = Samples(**{name: array.values for name, array in arrays.items()})
    in_place = all(array.in_place for array in arrays.values())
    info = msgspec.convert(json.loads(str(file.attribute("info"))), DatasetInfo)
    shard = FlatShard(path, info, "native", samples, file.content if in_place else None)
    shard.digest = str(file.attribute("digest"))
    return shard
