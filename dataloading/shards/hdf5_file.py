"""Safe reading of untrusted HDF5 files. An array is read only if it is stored completely and within bounds in its file.

A file of a few kilobytes can claim gigabytes: chunks that were never written are read as fill values, chunks may share
bytes, and gzip expands. The HDF5 library also follows links into other files and loads shared libraries for unknown
filters. So this module uses h5py only to locate an array, and reads and unpacks the bytes itself.
"""

import io
import math
import mmap
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import h5py.h5l
import h5py.h5o
import numpy as np
from numpy.typing import NDArray

from console.files import write_atomically

MOST_EXPANSION = 128
"""Largest allowed ratio of unpacked arrays to file size. Rows of 512 slots with five real tokens reach a ratio of 75."""

REFERENCE = np.dtype([("count", "<u4"), ("address", "<u8"), ("object", "<u4")])
"""Reference to a row of variable length: number of values, address of a heap collection, and number of the object in it
(HDF5 File Format Specification 3.0, section IV.A.2.d)."""

_FILTERS = [h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE]
"""Supported filters, in the order in which HDF5 applies them when it writes."""


@contextmanager
def new_hdf5_file(path: Path) -> Iterator[h5py.File]:
    """Yield a new HDF5 file that is written atomically to ``path`` when the block ends without an error."""
    # Build the file in memory. If the HDF5 library writes to a full disk, it hides the reason and can crash the process.
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        yield file
    write_atomically(path, image.getbuffer())


@dataclass(frozen=True)
class HDF5Array:
    """An array of integers, or of references to rows of integers."""

    values: NDArray[Any]
    """The integers, or records of `REFERENCE`."""
    row_dtype: np.dtype[Any] | None
    """Type of the integers if ``values`` refers to rows of variable length, otherwise None."""
    in_place: bool
    """Whether ``values`` is a view of the file, which uses no memory."""


class HDF5File:
    """An HDF5 file that is open for reading. ``content`` is a map of the whole file."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.content = content
        self._file = h5py.File(path, "r")
        self._room = MOST_EXPANSION * len(content)

    def close(self) -> None:
        """Close the file. Its arrays stay valid."""
        self._file.close()

    @property
    def names(self) -> list[str]:
        return sorted(self._file)

    def attribute(self, name: str) -> str | int:
        """Return a string or integer attribute of the root group.

        Raises ``ValueError`` if the attribute is missing, has another type, or claims more bytes than the file has.
        """
        key = name.encode()
        found = h5py.h5a.open(self._file.id, key) if h5py.h5a.exists(self._file.id, key) else None
        # Arrays are refused, because in a hostile file an array could repeat one string any number of times.
        if found is None or found.shape != () or found.dtype.kind not in "iuO":
            raise ValueError(f"the attribute {name} is missing or is neither a text nor an integer")
        if found.dtype.kind == "O":
            header = h5py.h5o.get_info(self._file.id).addr
            claimed = max(_text_sizes(self.content, header, key + b"\0"), default=len(self.content) + 1)
            if claimed > len(self.content):
                raise ValueError(f"the attribute {name} claims {claimed:,} bytes in a file of {len(self.content):,}")
        value: Any = np.empty((), found.dtype)
        found.read(value)
        return value.item().decode() if found.dtype.kind == "O" else value.item()

    def is_ragged(self, name: str) -> bool:
        return h5py.check_vlen_dtype(self._open(name).dtype) is not None

    def array(self, name: str) -> HDF5Array:
        """Return an array as a read-only view of the file, or unpacked into memory if it is stored in chunks.

        Raises ``ValueError`` if the array holds other values than integers or is not stored completely in this file.
        """
        dataset = self._open(name)
        row_dtype = h5py.check_vlen_dtype(dataset.dtype)
        dtype = dataset.dtype if row_dtype is None else row_dtype
        if dtype.kind not in "iu":
            raise ValueError(f"{name} holds {dtype}, expected integers")
        stored, shape = (dtype if row_dtype is None else REFERENCE), dataset.shape or (0,)
        has_short_addresses = self._file.id.get_create_plist().get_sizes()[0] != 8
        if row_dtype is not None and (self._file.userblock_size or has_short_addresses):
            raise ValueError(f"{name} lies in a file with a user block or short addresses: write it again without them")
        size = math.prod(shape) * stored.itemsize
        if not size:  # an empty array is not stored
            return HDF5Array(np.empty(shape, stored), row_dtype, in_place=True)
        storage = dataset.get_create_plist()
        if storage.get_external_count() or storage.get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED):
            raise ValueError(f"{name} is not stored in this file in one piece or in chunks")
        if storage.get_layout() == h5py.h5d.CHUNKED:
            return HDF5Array(self._unpacked(dataset, name, shape, stored), row_dtype, in_place=False)
        offset = dataset.get_offset()  # None if nothing was ever written
        if offset is None or offset + size > len(self.content):
            raise ValueError(f"{name} claims {size:,} bytes that are not inside the file")
        values = np.frombuffer(self.content, stored, size // stored.itemsize, offset)
        return HDF5Array(values.reshape(shape), row_dtype, in_place=True)

    def _open(self, name: str) -> h5py.h5d.DatasetID:
        group, key = self._file.id, name.encode()
        # Check the link's type before following the link, which could lead into another file.
        if key not in group or group.links.get_info(key).type != h5py.h5l.TYPE_HARD:
            raise ValueError(f"{name} is missing or a link to another object, expected an array in this file")
        return h5py.h5d.open(group, key)

    def _unpacked(
        self, dataset: h5py.h5d.DatasetID, name: str, shape: tuple[int, ...], stored: np.dtype[Any]
    ) -> NDArray[Any]:
        """Unpack a chunked array, after checking that all of its chunks are stored in this file."""
        storage = dataset.get_create_plist()
        chunk: tuple[int, ...] = storage.get_chunk()
        filters = [storage.get_filter(index)[0] for index in range(storage.get_nfilters())]
        if filters != [known for known in _FILTERS if known in filters]:
            raise ValueError(f"{name} uses the HDF5 filters {filters}, expected gzip, shuffle, both or none")
        expected = math.prod(-(-end // size) for end, size in zip(shape, chunk, strict=True))
        if (found := dataset.get_num_chunks()) != expected:
            raise ValueError(f"{name}: {found:,} of {expected:,} chunks were written")
        chunk_bytes = math.prod(chunk) * stored.itemsize
        self._room -= math.prod(shape) * stored.itemsize + chunk_bytes
        if self._room < 0 or dataset.get_storage_size() > len(self.content):
            raise ValueError(
                f"{name} would unpack to more than {MOST_EXPANSION} times the {len(self.content):,} bytes of the file"
            )
        values = np.empty(shape, stored)
        for corner in product(*(range(0, end, size) for end, size in zip(shape, chunk, strict=True))):
            # Each set bit of the mask marks a filter that was not applied to this chunk.
            skipped, content = dataset.read_direct_chunk(corner)
            applied = [known for place, known in enumerate(filters) if not skipped >> place & 1]
            try:
                block = _unpacked_chunk(content, applied, chunk_bytes, stored).reshape(chunk)
            except (ValueError, zlib.error) as error:
                raise ValueError(f"{name}: the chunk at {corner} is damaged ({error})") from None
            # Chunks at an edge are stored at full size, so cut them at the array's bounds.
            box = tuple(slice(at, min(at + size, end)) for at, size, end in zip(corner, chunk, shape, strict=True))
            values[box] = block[tuple(slice(side.stop - side.start) for side in box)]
        return values


def _unpacked_chunk(content: bytes, filters: list[int], size: int, stored: np.dtype[Any]) -> NDArray[Any]:
    """Unpack a chunk by undoing its filters, and return a flat array. ``size`` is the unpacked size in bytes."""
    if h5py.h5z.FILTER_DEFLATE in filters:
        content = zlib.decompressobj().decompress(content, size + 1)
    if len(content) != size:
        raise ValueError(f"it does not hold the {size:,} bytes that were expected")
    if h5py.h5z.FILTER_SHUFFLE in filters:
        # The shuffle filter stores the first bytes of all elements, then all second bytes, and so on.
        content = np.frombuffer(content, np.uint8).reshape(stored.itemsize, -1).T.tobytes()
    return np.frombuffer(content, stored)


_ATTRIBUTE, _CONTINUATION = 0x0C, 0x10
"""Types of header messages (HDF5 File Format Specification 3.0, sections IV.A.2.m and IV.A.2.q)."""
_MOST_MESSAGES = 4096


def _text_sizes(content: mmap.mmap | bytes, header: int, key: bytes) -> Iterator[int]:
    """Yield the size that each variable-length attribute ``key`` claims in an object header.

    Only headers of version 1, which h5py writes, are read. For other headers, nothing is yielded.
    """
    blocks = [(header + 16, int.from_bytes(content[header + 8 : header + 12], "little"))]
    found = 0
    # A header may continue in other blocks, which the loop appends to `blocks`.
    for start, size in blocks if content[header : header + 1] == b"\x01" else ():
        place, end = start, min(start + size, len(content))
        while place + 8 <= end and (found := found + 1) <= _MOST_MESSAGES:
            kind, length = struct.unpack_from("<HH", content, place)
            message = content[place + 8 : min(place + 8 + length, end)]
            place += 8 + length
            if kind == _CONTINUATION and len(message) >= 16:
                blocks.append(struct.unpack_from("<QQ", message))
            elif kind == _ATTRIBUTE and len(message) >= 9:
                version, *sizes = struct.unpack_from("<BxHHH", message)
                # Messages of version 3 have one more byte, the encoding. Version 1 pads each part to 8 bytes.
                begin, unit = (9 if version == 3 else 8), (8 if version == 1 else 1)
                data = begin + sum(-(-each // unit) * unit for each in sizes)
                if message[begin : begin + sizes[0]] == key and data + REFERENCE.itemsize <= len(message):
                    yield int.from_bytes(message[data : data + 4], "little")
