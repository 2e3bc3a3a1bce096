"""HDF5 files that are not trusted: an array is found to lie in its file, whole and within bounds, before any of it is read.

A file of a few kilobytes can promise gigabytes: chunks that were never written read as fill values, several chunks may
share their bytes, and filters expand. The HDF5 library does not bound what a chunk inflates to, hands out uninitialised
memory where that falls short, follows links into other files, and loads shared libraries for filters that it does not know.
So it is asked where things are, and what is there is taken from the file and unpacked here.
"""

import math
import mmap
import struct
import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Self

import h5py
import h5py.h5l
import h5py.h5o
import numpy as np
from numpy.typing import NDArray

MOST_EXPANSION = 128
"""All arrays of a file in memory against its size. Padded rows of 512 with five real tokens reach 75, the least of all, and
those of Wikipedia's lengths 4; gzip alone would allow 1,032."""

REFERENCE = np.dtype([("count", "<u4"), ("address", "<u8"), ("object", "<u4")])
"""How an element of variable length is stored: its number of values, the address of a heap collection, and an object in it
(HDF5 File Format Specification 3.0, section IV.A.2.d)."""

_ADDRESS_BYTES = 8
"""What the HDF5 library writes unless told otherwise."""

_FILTERS = (h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32)
"""Those that are known, in the order in which they can follow each other."""

_FLETCHER32_BYTES = 4


class HDF5File:
    """A file that is open for reading; a context manager.

    Raises:
        OSError: no HDF5 file, or damaged.
    """

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        """The whole file, which arrays in one piece are views of."""
        # For the description of what is stored where: the bytes themselves are taken from `content`.
        self._file = h5py.File(path, "r")
        self._room = MOST_EXPANSION * len(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def names(self) -> list[str]:
        """Names in the root group, sorted."""
        return sorted(self._file)

    @property
    def plain_references(self) -> bool:
        """Tell whether addresses are what `REFERENCE` says, and count from the beginning of the file."""
        sizes = self._file.id.get_create_plist().get_sizes()
        return self._file.userblock_size == 0 and sizes[0] == _ADDRESS_BYTES

    def attribute(self, name: str) -> str | int | None:
        """A text or an integer, or None where there is no such attribute; ValueError for anything else."""
        try:
            found = h5py.h5a.open(self._file.id, name.encode())
        except KeyError:
            return None
        dtype = found.dtype
        # Only a single value: an attribute may hold an array as large as it likes.
        if found.shape != () or (dtype.kind not in "iu" and h5py.check_string_dtype(dtype) is None):
            raise ValueError(f"the attribute {name} is {dtype} {found.shape}, expected a text or an integer")
        if dtype.kind == "O":  # a text of variable length
            self._require_inside(name)
        value: Any = np.empty((), dtype)
        found.read(value)
        return value.item().decode() if dtype.kind in "OS" else value.item()

    def array(self, name: str) -> "HDF5Array":
        """The array of a name; errors as of `HDF5Array`."""
        return HDF5Array(self, self._open(name), name)

    def reserve(self, size: int, name: str) -> None:
        """Count ``size`` bytes of memory for an array that is unpacked; ValueError beyond what such a file can need."""
        self._room -= size
        if self._room < 0:
            raise ValueError(
                f"{name} claims {size:,} bytes in a file of {len(self.content):,}; all arrays may take at most "
                f"{MOST_EXPANSION} times the file"
            )

    def _require_inside(self, name: str) -> None:
        """Raise ``ValueError`` if a text attribute claims more bytes than the file has, all of which would be allocated."""
        header = h5py.h5o.get_info(self._file.id).addr
        sizes = list(_text_sizes(self.content, header, name)) if self.plain_references else []
        if not sizes:
            raise ValueError(
                f"the attribute {name} is stored in an unknown way, expected it in the root's object header"
            )
        if max(sizes) > len(self.content):
            raise ValueError(f"the attribute {name} claims {max(sizes):,} bytes in a file of {len(self.content):,}")

    def _open(self, name: str) -> h5py.h5d.DatasetID:
        """An object of the root group, by the library's low-level interface: a run opens thousands of files."""
        group, key = self._file.id, name.encode()
        # Asked before the link is followed, which could lead into another file.
        try:
            kind = group.links.get_info(key).type
        except (KeyError, RuntimeError):
            raise ValueError(f"{name} is missing, expected an array") from None
        if kind != h5py.h5l.TYPE_HARD:
            raise ValueError(f"{name} is a link to another place or file, expected an array in this file")
        try:
            return h5py.h5d.open(group, key)
        except KeyError:
            raise ValueError(f"{name} is of another kind, expected an array") from None


class HDF5Array:
    """An array of integers, or of rows of integers of variable length, that lies in the file.

    Raises:
        ValueError: of another type, not stored as that, or larger than the file can hold.
    """

    def __init__(self, file: HDF5File, dataset: h5py.h5d.DatasetID, name: str) -> None:
        self.name = name
        self.shape: tuple[int, ...] = (0,) if dataset.shape is None else dataset.shape
        dtype = dataset.dtype
        base = h5py.check_vlen_dtype(dtype)
        self.ragged = base is not None
        """Whether elements are rows, of which `read` gives the references."""
        self.dtype: np.dtype[Any] = dtype if base is None else base
        """Of the integers."""
        if self.dtype.kind not in "iu":
            raise ValueError(f"{name} holds {self.dtype}, expected integers")
        self._file = file
        self._dataset = dataset
        self._stored = self.dtype if base is None else REFERENCE
        self._size = math.prod(self.shape) * self._stored.itemsize
        self._chunk: tuple[int, ...] | None = None
        self._pipeline: list[int] = []
        if self._size:  # an empty array is stored nowhere
            self._check_storage()

    @property
    def in_place(self) -> bool:
        """Tell whether `read` gives a view of the file, which takes no memory."""
        return self._chunk is None

    def read(self) -> NDArray[Any]:
        """The whole array: a read-only view of the file's map, or unpacked into memory.

        Raises:
            ValueError: a chunk is damaged.
        """
        if self._size == 0:
            return np.empty(self.shape, self._stored)
        if self._chunk is None:
            count = self._size // self._stored.itemsize
            return np.frombuffer(self._file.content, self._stored, count, self._dataset.get_offset()).reshape(
                self.shape
            )
        self._file.reserve(self._size, self.name)
        values = np.empty(self.shape, self._stored)
        # A chunk at an edge is stored whole; what of it lies beyond the array is left out.
        for corner, chunk in self._chunks(self._chunk):
            inside = zip(corner, chunk.shape, self.shape, strict=True)
            box = tuple(slice(first, min(first + size, end)) for first, size, end in inside)
            values[box] = chunk[tuple(slice(side.stop - side.start) for side in box)]
        return values

    def _check_storage(self) -> None:
        """Raise ``ValueError`` unless every byte that the array claims is stored, and in this file."""
        storage = self._dataset.get_create_plist()
        layout, file_bytes = storage.get_layout(), len(self._file.content)
        # Others lie in the object's header, or in other files.
        if storage.get_external_count() or layout not in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED):
            raise ValueError(f"{self.name} is not stored in this file in one piece or in chunks")
        if layout == h5py.h5d.CONTIGUOUS:
            offset = self._dataset.get_offset()
            # None: no byte of it was ever written.
            if offset is None or offset + self._size > file_bytes:
                raise ValueError(f"{self.name} claims {self._size:,} bytes that are not inside the file")
            return
        chunk: tuple[int, ...] = storage.get_chunk()
        self._pipeline = [storage.get_filter(index)[0] for index in range(storage.get_nfilters())]
        if self._pipeline != [known for known in _FILTERS if known in self._pipeline]:
            raise ValueError(
                f"{self.name} is packed by the HDF5 filters {self._pipeline}, expected shuffle, gzip and fletcher32 "
                f"{list(_FILTERS)}, or some of them in this order: write the file again with these"
            )
        # As many as the array needs: a chunk that was never written would be read as fill values, from no bytes at all.
        expected = math.prod(-(-end // size) for end, size in zip(self.shape, chunk, strict=True))
        if (found := self._dataset.get_num_chunks()) != expected:
            raise ValueError(
                f"{self.name} claims {self._size:,} bytes, but {found:,} of {expected:,} chunks were written"
            )
        if (stored := self._dataset.get_storage_size()) > file_bytes:  # chunks share their bytes
            raise ValueError(f"{self.name} claims {stored:,} bytes in a file of {file_bytes:,}")
        self._chunk = chunk
        self._file.reserve(self._chunk_bytes(chunk), self.name)  # of the chunk that is being unpacked

    def _chunk_bytes(self, chunk: tuple[int, ...]) -> int:
        return math.prod(chunk) * self._stored.itemsize

    def _chunks(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], NDArray[Any]]]:
        """Yield where each chunk begins, and its values."""
        for corner in product(*(range(0, end, size) for end, size in zip(self.shape, shape, strict=True))):
            # As stored: the library undoes no filter.
            skipped, content = self._dataset.read_direct_chunk(corner)
            # Each bit is a filter that this chunk has not passed: an optional one that fails is left out.
            filters = [known for place, known in enumerate(self._pipeline) if not skipped >> place & 1]
            try:
                yield corner, self._unpacked(content, filters, self._chunk_bytes(shape)).reshape(shape)
            except (ValueError, zlib.error) as error:
                raise ValueError(f"{self.name}: the chunk at {corner} is damaged ({error})") from None

    def _unpacked(self, content: bytes, filters: list[int], size: int) -> NDArray[Any]:
        """The ``size`` bytes that a chunk stands for, as a flat array."""
        # In the reverse of the order in which they were applied.
        if h5py.h5z.FILTER_FLETCHER32 in filters:
            content = _without_checksum(content)
        if h5py.h5z.FILTER_DEFLATE in filters:
            content = zlib.decompressobj().decompress(content, size + 1)  # a byte more shows that there is more
        if len(content) != size:
            raise ValueError(f"it does not hold the {size:,} bytes that were expected")
        if h5py.h5z.FILTER_SHUFFLE in filters:
            # The filter puts the first bytes of all elements first, then their second ones.
            content = np.frombuffer(content, np.uint8).reshape(self._stored.itemsize, -1).T.tobytes()
        return np.frombuffer(content, self._stored)


_ATTRIBUTE, _CONTINUATION = 0x0C, 0x10
"""Types of header messages (HDF5 File Format Specification 3.0, sections IV.A.2.m and IV.A.2.q)."""
_MOST_MESSAGES = 4096


def _text_sizes(content: mmap.mmap, header: int, name: str) -> Iterator[int]:
    """Yield the size that the attribute ``name`` of an object header claims, if its text has variable length.

    Yields nothing if the header is not of version 1, or stores its attributes elsewhere: h5py writes neither by default.
    """
    key = name.encode() + b"\0"
    for kind, message in _messages(content, header):
        if kind == _ATTRIBUTE and len(message) >= 9:
            version, name_bytes, type_bytes, space_bytes = struct.unpack_from("<BxHHH", message)
            # Version 3 adds an encoding; version 1 pads each part to 8 bytes.
            start, unit = (9 if version == 3 else 8), (8 if version == 1 else 1)
            data = start + sum(-(-size // unit) * unit for size in (name_bytes, type_bytes, space_bytes))
            if message[start : start + name_bytes] == key and data + REFERENCE.itemsize <= len(message):
                yield int.from_bytes(message[data : data + 4], "little")


def _messages(content: mmap.mmap, header: int) -> Iterator[tuple[int, bytes]]:
    """Yield the type and the body of each message of an object header of version 1 (section IV.A.1.a)."""
    if header + 16 > len(content) or content[header] != 1:
        return
    blocks = [(header + 16, int.from_bytes(content[header + 8 : header + 12], "little"))]
    found = 0
    for start, size in blocks:  # continuations are appended meanwhile
        place, end = start, min(start + size, len(content))
        while place + 8 <= end and (found := found + 1) <= _MOST_MESSAGES:
            kind, length = struct.unpack_from("<HH", content, place)
            message = content[place + 8 : min(place + 8 + length, end)]
            if kind == _CONTINUATION and len(message) >= 16:
                blocks.append(struct.unpack_from("<QQ", message))
            yield kind, message
            place += 8 + length


def _without_checksum(content: bytes) -> bytes:
    """A chunk without its Fletcher-32 checksum: sums modulo 65,535 of big-endian words, and of their sums so far."""
    stored = int.from_bytes(content[-_FLETCHER32_BYTES:], "little")
    content = content[:-_FLETCHER32_BYTES]
    # A single byte at the end counts as a word with a zero.
    words = np.frombuffer(content + bytes(len(content) % 2), ">u2").astype(np.uint64)
    weights = np.arange(len(words), 0, -1, dtype=np.uint64) % np.uint64(0xFFFF)
    sums = int((words * weights).sum()), int(words.sum())
    # Compared modulo 65,535: which of 0 and 65,535 a writer stores is its own affair.
    if any((found - said) % 0xFFFF for found, said in zip(sums, (stored >> 16, stored & 0xFFFF), strict=True)):
        raise ValueError("another checksum")
    return content
