"""Variable-length HDF5 data read in place.

An element of a variable-length dataset is a reference into the file's global heap: a count, the address of a heap
collection and the number of an object inside it (HDF5 File Format Specification 3.0, sections III.E and IV.A.2.d). The
HDF5 library follows one reference at a time and allocates memory for each. Here the references are taken as one array,
those that are asked for are followed by a compiled loop, and the objects are gathered from the map of the file.
"""

import mmap
from typing import Any

import h5py
import numba
import numpy as np
from numpy.typing import NDArray

from dataloading.hdf5 import view_contiguous
from dataloading.samples import offsets_of, ragged_indices, row_blocks

_REFERENCE = np.dtype([("count", "<u4"), ("address", "<u8"), ("object", "<u4")])
_SIGNATURE = np.frombuffer(b"GCOL\x01", np.uint8)
_OFFSET_BYTES = 8
"""Bytes of a file address: what the HDF5 library writes unless told otherwise."""


class VariableLengthColumn:
    """A one-dimensional dataset of variable-length integers, n rows.

    Raises:
        ValueError: not such a dataset, or its references lead out of the file.
    """

    counts: NDArray[np.int64]
    """[n] elements of each row."""

    def __init__(self, content: mmap.mmap, file: h5py.File, name: str) -> None:
        dataset = file.get(name)
        base = h5py.check_vlen_dtype(dataset.dtype) if isinstance(dataset, h5py.Dataset) else None
        if not isinstance(dataset, h5py.Dataset) or base is None or base.kind not in "iu" or dataset.ndim != 1:
            raise ValueError(f"{name} is {dataset}, expected rows of integers of variable length")
        self.name = name
        self._dtype = base
        references = self._references(content, file, dataset)
        if references is None:
            self._hold(dataset)
            return
        self._bytes = np.frombuffer(content, np.uint8)
        self._view = memoryview(content)
        self._values = None
        self._addresses = references["address"].astype(np.int64)
        self._objects = references["object"].astype(np.int64)
        self.counts = references["count"].astype(np.int64)

    @property
    def element_bytes(self) -> int:
        """Bytes of one integer."""
        return self._dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Memory taken by rows that cannot be read in place."""
        return 0 if self._values is None else self._values.nbytes

    def take(self, rows: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[Any]:
        """Elements ``starts`` to ``starts + lengths`` of the chosen ``rows``, row after row.

        Raises:
            ValueError: the heap of the file is damaged.
        """
        if self._values is not None:
            return _gather(self._values, self._starts[rows] + starts, lengths)
        size = self._dtype.itemsize
        places, bad = _follow(
            self._bytes, self._addresses[rows], self._objects[rows], self.counts[rows] * size, _SIGNATURE
        )
        if bad >= 0:
            raise ValueError(f"{self.name}: the reference of row {int(rows[bad])} leads to no such object in the heap")
        firsts = places + starts * size
        if not (firsts % size).any():
            aligned = self._bytes[: len(self._bytes) // size * size].view(self._dtype)
            return _gather(aligned, firsts // size, lengths)
        return _gather(self._bytes, firsts, lengths * size).view(self._dtype)

    def row(self, index: int) -> memoryview:
        """The bytes of one row; errors as in `take`."""
        size = int(self.counts[index]) * self._dtype.itemsize
        if self._values is not None:
            start = int(self._starts[index]) * self._dtype.itemsize
            return self._values.data.cast("B")[start : start + size] if size else memoryview(b"")
        if size == 0:
            return memoryview(b"")
        place = _place_of(self._bytes, int(self._addresses[index]), int(self._objects[index]), size, _SIGNATURE)
        if place < 0:
            raise ValueError(f"{self.name}: the reference of row {index} leads to no such object in the heap")
        return self._view[place : place + size]

    def rows(self, first: int, stop: int) -> NDArray[Any]:
        """All elements of rows ``first`` to ``stop``."""
        rows = np.arange(first, stop)
        return self.take(rows, np.zeros(len(rows), np.int64), self.counts[rows])

    def _references(self, content: mmap.mmap, file: h5py.File, dataset: h5py.Dataset) -> NDArray[Any] | None:
        """[n] references, or None where they cannot be seen in place: stored in chunks, or in a file of another kind."""
        plain = file.userblock_size == 0 and file.id.get_create_plist().get_sizes()[0] == _OFFSET_BYTES
        return view_contiguous(content, dataset.id, self.name, _REFERENCE) if plain else None

    def _hold(self, dataset: h5py.Dataset) -> None:
        """Reads all rows through the library, for files whose references are compressed or unusual."""
        rows = dataset[()]
        self.counts = np.array([len(row) for row in rows], np.int64)
        self._starts = offsets_of(self.counts)[:-1]
        self._values = np.concatenate([np.empty(0, self._dtype), *rows]).astype(self._dtype)


def _gather(values: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[Any]:
    """Ragged rows of a flat array, one after another."""
    offsets = offsets_of(lengths)
    gathered = np.empty(offsets[-1], values.dtype)
    for block in row_blocks(offsets):
        chosen = slice(block.start, block.stop)
        gathered[offsets[block.start] : offsets[block.stop]] = values[ragged_indices(starts[chosen], lengths[chosen])]
    return gathered


@numba.njit(cache=True)
def _little_endian(content: NDArray[np.uint8], place: int, size: int) -> int:
    value = np.int64(0)
    for index in range(size):
        value |= np.int64(content[place + index]) << (8 * index)
    return int(value)


@numba.njit(cache=True)
def _place_of(content: NDArray[np.uint8], address: int, number: int, size: int, signature: NDArray[np.uint8]) -> int:
    """Where in the file the bytes of an object of the heap collection at ``address`` start, or -1 if it is not there.

    Objects of a collection follow one another, each with a header of 16 bytes (number, reference count, size), padded to
    8 bytes; number 0 is the free space at the end.
    """
    end = len(content)
    if address < 0 or address > end - 16:
        return -1
    for index in range(len(signature)):
        if content[address + index] != signature[index]:
            return -1
    collection_size = _little_endian(content, address + 8, 8)
    if collection_size < 16 or collection_size > end - address:
        return -1
    place = address + 16
    stop = address + collection_size
    while place + 16 <= stop:
        found = _little_endian(content, place, 2)
        found_size = _little_endian(content, place + 8, 8)
        if found == 0 or found_size < 0 or found_size > stop - place - 16:
            return -1
        if found == number:
            return place + 16 if found_size == size else -1
        place += 16 + (found_size + 7) // 8 * 8
    return -1


@numba.njit(cache=True)
def _follow(
    content: NDArray[np.uint8],
    addresses: NDArray[np.int64],
    objects: NDArray[np.int64],
    sizes: NDArray[np.int64],
    signature: NDArray[np.uint8],
) -> tuple:
    """Where the bytes of each referenced object start, and the first row whose reference is bad, or -1.

    An empty row has no object.
    """
    places = np.zeros(len(addresses), np.int64)
    for row in range(len(addresses)):
        if sizes[row] > 0:
            places[row] = _place_of(content, addresses[row], objects[row], sizes[row], signature)
            if places[row] < 0:
                return places, row
    return places, -1
