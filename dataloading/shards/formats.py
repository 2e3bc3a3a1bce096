"""Every layout that samples come in, recognised by a file's content."""

from collections.abc import Callable
from mmap import mmap
from pathlib import Path

from console.files import shown
from dataloading.shards.hdf5_file import HDF5File
from dataloading.shards.layouts import RaggedShard, open_fixed, unknown_info
from dataloading.shards.native import open_native
from dataloading.shards.shard import REMEDY, DatasetInfo, FlatShard, Shard, map_file

_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def open_shard(path: Path) -> Shard:
    """Open a file of samples for reading, whatever its layout, and check its structure.

    What can be read in place is not read before it is asked for; compressed files and TFRecord are unpacked into memory.

    Recognised are the native layout, the fixed, varlength and packed HDF5 layouts in circulation, and TFRecord files of the
    reference script.

    Raises:
        ValueError: missing, truncated, of no known layout, or inconsistent.
    """
    content = map_file(path)
    if content[: len(_SIGNATURE)] == _SIGNATURE:
        return _open_hdf5(path, content)
    # Numba comes with it, which takes half a second that HDF5 files need not spend.
    from dataloading.shards.tfrecord import is_tfrecord, read_tfrecord

    # A length and its checksum are all that the beginning of such a file offers.
    if is_tfrecord(content[:16]):
        samples, *sizes = read_tfrecord(path, content)
        return FlatShard(path, unknown_info(*sizes), "tfrecord", samples)
    if content[:2] == b"\x1f\x8b":
        raise ValueError(f"{path}: compressed with gzip; expected an HDF5 or TFRecord file as it is: gunzip it first")
    raise ValueError(f"{path}: not an HDF5 or TFRecord file, or its beginning is lost; {REMEDY}")


def whole_shard(path: Path, digest: str | None = None) -> tuple[DatasetInfo, int] | None:
    """Return what the shard that an earlier attempt left at ``path`` says of itself, and its number of samples.

    None where there is none, or a damaged one, or one whose content does not have ``digest``, by default that which the file
    carries. A digest says the same of samples in any layout.
    """
    if not path.exists():
        return None
    try:
        with open_shard(path) as shard:
            return shard.info, len(shard.verify(digest))
    except ValueError:
        return None


def _open_hdf5(path: Path, content: mmap) -> Shard:
    try:
        with HDF5File(path, content) as file:
            return _reader(file)(path, file)
    # What a damaged file makes the HDF5 library and NumPy raise is any of these.
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, IndexError, MemoryError) as error:
        complaint = str(error)
        if complaint.startswith(str(path)):
            raise ValueError(complaint) from None
        raise ValueError(f"{path}: damaged or of another kind ({shown(complaint)}); {REMEDY}") from None


def _reader(file: HDF5File) -> Callable[[Path, HDF5File], Shard]:
    """The reader for an HDF5 file, told by the names and types of its arrays."""
    names = file.names
    # A native file without its attribute is refused by the reader of that layout, which says what is missing.
    if file.attribute("format") is not None or "sequence_offsets" in names:
        return open_native
    if "input_ids" in names:
        input_ids = file.array("input_ids")
        if input_ids.ragged:
            return RaggedShard
        if len(input_ids.shape) == 2:
            return open_fixed
    raise ValueError(f"of no known layout: it holds {', '.join(names) or 'nothing'}")
