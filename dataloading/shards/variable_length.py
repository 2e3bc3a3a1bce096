"""Variable-length HDF5 data read in place.

An element of a variable-length dataset is a reference into the file's global heap: a count, the address of a heap
collection and the number of an object inside it (HDF5 File Format Specification 3.0, sections III.E and IV.A.2.d). The
HDF5 library follows one reference at a time and allocates memory for each. Here the references are taken as one array,
those that are asked for are followed by a compiled loop, and the objects are gathered from the map of the file: filters pack
references, never the heap.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloading.compiled import compiled
from dataloading.shards.hdf5_file import HDF5File
from dataloading.shards.samples import offsets_of, ragged_indices, row_blocks

_SIGNATURE = np.frombuffer(b"GCOL\x01", np.uint8)  # with the version


class VariableLengthColumn:
    """A one-dimensional array of variable-length integers, n rows.

    Raises:
        ValueError: not such an array, or more elements than the file holds.
    """

    counts: NDArray[np.int64]
    """[n] elements of each row."""

    def __init__(self, file: HDF5File, name: str) -> None:
        array = file.array(name)
        if not array.ragged or len(array.shape) != 1:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, expected rows of integers of variable length")
        if not file.plain_references:
            raise ValueError(f"{name} lies in a file with a user block or short addresses: write it again without")
        references = array.read()
        self.name = name
        self.dtype = array.dtype
        """Of the integers."""
        self.held_bytes = 0 if array.in_place else references.nbytes
        """Memory taken by the references, where they are packed."""
        self._bytes = np.frombuffer(file.content, np.uint8)
        self._view = memoryview(file.content)
        # Addresses of 2^63 or more become negative, and `_place_of` refuses them.
        self._addresses = references["address"].astype(np.int64)
        self._objects = references["object"].astype(np.int64)
        self.counts = references["count"].astype(np.int64)
        claimed = int(self.counts.sum()) * self.dtype.itemsize
        if claimed > len(file.content):  # some rows share an object, and would multiply it
            raise ValueError(f"{name} claims {claimed:,} bytes in a file of {len(file.content):,}")

    def take(self, rows: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[Any]:
        """Elements ``starts`` to ``starts + lengths`` of the chosen ``rows``, row after row.

        Raises:
            ValueError: the heap of the file is damaged.
        """
        size = self.dtype.itemsize
        places, bad = _follow(
            self._bytes, self._addresses[rows], self._objects[rows], self.counts[rows] * size, _SIGNATURE
        )
        if bad >= 0:
            raise ValueError(f"{self.name}: the reference of row {int(rows[bad])} leads to no such object in the heap")
        firsts = places + starts * size
        # Objects are padded to 8 bytes: where collections are aligned too, elements are gathered whole.
        if not (firsts % size).any():
            aligned = self._bytes[: len(self._bytes) // size * size].view(self.dtype)
            return _gather(aligned, firsts // size, lengths)
        return _gather(self._bytes, firsts, lengths * size).view(self.dtype)

    def row(self, index: int) -> memoryview:
        """The bytes of one row; errors as in `take`."""
        size = int(self.counts[index]) * self.dtype.itemsize
        if size == 0:
            return memoryview(b"")
        place = _place_of(self._bytes, int(self._addresses[index]), int(self._objects[index]), size, _SIGNATURE)
        if place < 0:
            raise ValueError(f"{self.name}: the reference of row {index} leads to no such object in the heap")
        return self._view[place : place + size]

    def all(self) -> NDArray[Any]:
        """All elements, row after row; errors as in `take`."""
        rows = np.arange(len(self.counts))
        return self.take(rows, np.zeros(len(rows), np.int64), self.counts)


def _gather(values: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[Any]:
    """Ragged rows of a flat array, one after another."""
    offsets = offsets_of(lengths)
    gathered = np.empty(offsets[-1], values.dtype)
    for block in row_blocks(offsets):
        chosen = slice(block.start, block.stop)
        gathered[offsets[block.start] : offsets[block.stop]] = values[ragged_indices(starts[chosen], lengths[chosen])]
    return gathered


@compiled
def _little_endian(content: NDArray[np.uint8], place: int, size: int) -> int:
    value = np.int64(0)
    for index in range(size):
        value |= np.int64(content[place + index]) << (8 * index)
    return int(value)


@compiled
def _place_of(content: NDArray[np.uint8], address: int, number: int, size: int, signature: NDArray[np.uint8]) -> int:
    """Find where in the file the bytes of an object of the heap collection at ``address`` start; -1 if it is not there.

    Objects of a collection follow one another, each with a header of 16 bytes (number, reference count, size), padded to
    8 bytes; number 0 is the free space at the end.
    """
    end = len(content)
    # The header of a collection has 16 bytes, and so has that of each object in it.
    if address < 0 or address > end - 16:
        return -1
    for index in range(len(signature)):
        if content[address + index] != signature[index]:
            return -1
    # Behind the signature, the version and three reserved bytes.
    collection_size = _little_endian(content, address + 8, 8)
    if collection_size < 16 or collection_size > end - address:
        return -1
    place = address + 16
    stop = address + collection_size
    while place + 16 <= stop:  # a collection has no index: objects are passed one by one
        found = _little_endian(content, place, 2)
        found_size = _little_endian(content, place + 8, 8)
        # Object 0 is the free space at the end of a collection; sizes are those of a file that may lie.
        if found == 0 or found_size < 0 or found_size > stop - place - 16:
            return -1
        if found == number:
            return place + 16 if found_size == size else -1
        place += 16 + (found_size + 7) // 8 * 8
    return -1


@compiled
def _follow(
    content: NDArray[np.uint8],
    addresses: NDArray[np.int64],
    objects: NDArray[np.int64],
    sizes: NDArray[np.int64],
    signature: NDArray[np.uint8],
) -> tuple:
    """Find where the bytes of each referenced object start, and the first row whose reference is bad, or -1.

    An empty row has no object.
    """
    places = np.zeros(len(addresses), np.int64)
    for row in range(len(addresses)):
        if sizes[row] > 0:
            places[row] = _place_of(content, addresses[row], objects[row], sizes[row], signature)
            if places[row] < 0:
                return places, row
    return places, -1
