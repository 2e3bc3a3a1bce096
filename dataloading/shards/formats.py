"""Open shards in any layout, which is recognised by the content of the file, and write shards in the native layout.

The native layout is an HDF5 file with the flat arrays of `Samples`. Root attributes describe the samples. Each array is
stored contiguously and read through a memory map, so that reading a sample costs one copy.
"""

import json
import mmap
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import msgspec

from console.files import shown
from dataloading.shards.hdf5_file import HDF5File, new_hdf5_file
from dataloading.shards.hdf5_layouts import RaggedShard, open_fixed
from dataloading.shards.samples import DTYPES, Samples
from dataloading.shards.shard import REMEDY, DatasetInfo, FlatShard, Shard, check_content, check_offsets, map_file

FORMAT = "mlperf-bert-samples"
SCHEMA_VERSION = 1

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def open_shard(path: Path) -> Shard:
    """Open a file of samples in any layout for reading, and check its structure.

    The layouts are this program's own (native), three HDF5 layouts of other programs (fixed, varlength, packed), and the
    reference script's TFRecord files. TFRecord, fixed and compressed files are unpacked into memory; other files are
    read when samples are requested. Raises ``ValueError`` if the file is missing, truncated, inconsistent, or in an
    unknown layout.
    """
    content = map_file(path)
    if content[: len(_HDF5_SIGNATURE)] == _HDF5_SIGNATURE:
        return _open_hdf5(path, content)
    # Import this module only when needed, because only the TFRecord format needs the CRC library.
    from dataloading.shards.tfrecord import is_tfrecord, open_tfrecord

    if is_tfrecord(content[:16]):
        return open_tfrecord(path, content)
    if content[:2] == b"\x1f\x8b":
        raise ValueError(f"{path}: compressed with gzip; expected an HDF5 or TFRecord file: gunzip it first")
    raise ValueError(f"{path}: not an HDF5 or TFRecord file, or its beginning is lost; {REMEDY}")


def whole_shard(path: Path, digest: str | None = None) -> tuple[DatasetInfo, int] | None:
    """Return the description and the number of samples of a shard that an earlier attempt left at ``path``.

    Returns None if the shard is missing or damaged, or if its content does not match ``digest``. By default,
    ``digest`` is the one in the file, if there is one. Equal samples have equal digests in all layouts.
    """
    if not path.exists():
        return None
    try:
        shard = open_shard(path)
        return shard.info, len(shard.verify(digest))
    except ValueError:
        return None


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


def _open_hdf5(path: Path, content: mmap.mmap) -> Shard:
    try:
        with closing(HDF5File(path, content)) as file:
            names = file.names
            if "sequence_offsets" in names:
                return _open_native(path, file)
            if "input_ids" not in names:
                raise ValueError(f"its layout is unknown: it holds {', '.join(names) or 'nothing'}")
            return RaggedShard(path, file) if file.is_ragged("input_ids") else open_fixed(path, file)
    # For a damaged file, h5py and NumPy can raise any of these errors.
    except (OSError, RuntimeError, LookupError, TypeError, ValueError, MemoryError, msgspec.MsgspecError) as error:
        complaint = str(error)
        if complaint.startswith(str(path)):
            raise ValueError(complaint) from None
        raise ValueError(f"{path}: damaged or of another kind ({shown(complaint)}); {REMEDY}") from None


def _open_native(path: Path, file: HDF5File) -> FlatShard:
    """Open a file that `write_shard` wrote, and check its offsets.

    Raises ``ValueError`` if the file is damaged or has another version.
    """
    version = file.attribute("format"), file.attribute("schema_version")
    if version != (FORMAT, SCHEMA_VERSION):
        found = f"{version[0]}, schema version {version[1]}"
        raise ValueError(f"its format is {found}; expected {FORMAT}, {SCHEMA_VERSION}")
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
