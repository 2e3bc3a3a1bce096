"""Detection of a shard's layout from the content of the file."""

import mmap
from contextlib import closing
from pathlib import Path

import msgspec

from console.files import shown
from dataloading.shards.fixed import open_fixed
from dataloading.shards.hdf5_file import HDF5File
from dataloading.shards.native import open_native
from dataloading.shards.ragged import RaggedShard
from dataloading.shards.shard import REMEDY, DatasetInfo, Shard, map_file

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def open_shard(path: Path) -> Shard:
    """Open a file of samples in any layout for reading, and check its structure.

    The layouts are native, the fixed, varlength and packed HDF5 layouts in circulation, and TFRecord files of the
    reference script. TFRecord, fixed and compressed files are unpacked into memory; other files are read when samples
    are requested. Raises ``ValueError`` if the file is missing, truncated, inconsistent, or in an unknown layout.
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

    Returns None if the shard is missing or damaged, or if its content does not match ``digest``. The default is the digest
    in the file, if there is one. Equal samples have equal digests in all layouts.
    """
    if not path.exists():
        return None
    try:
        shard = open_shard(path)
        return shard.info, len(shard.verify(digest))
    except ValueError:
        return None


def _open_hdf5(path: Path, content: mmap.mmap) -> Shard:
    try:
        with closing(HDF5File(path, content)) as file:
            names = file.names
            if "sequence_offsets" in names:
                return open_native(path, file)
            if "input_ids" not in names:
                raise ValueError(f"of no known layout: it holds {', '.join(names) or 'nothing'}")
            return RaggedShard(path, file) if file.is_ragged("input_ids") else open_fixed(path, file)
    # For a damaged file, h5py and NumPy can raise any of these errors.
    except (OSError, RuntimeError, LookupError, TypeError, ValueError, MemoryError, msgspec.MsgspecError) as error:
        complaint = str(error)
        if complaint.startswith(str(path)):
            raise ValueError(complaint) from None
        raise ValueError(f"{path}: damaged or of another kind ({shown(complaint)}); {REMEDY}") from None
