"""The HDF5 layouts with rows of variable length: one sample per row (varlength) or several samples per row (packed).

    varlength  input_ids, segment_ids, masked_lm_positions, masked_lm_ids [n rows], next_sentence_labels [n]
    packed     the same columns with several concatenated samples in a row; next_sentence_labels, packed_input_len and
               packed_masked_lm_len have one number for each sample in a row

A row is stored as a reference into the file's global heap (HDF5 File Format Specification 3.0, section III.E). The HDF5
library follows one reference at a time and allocates memory for each row. This module reads rows from a map of the file.
"""

import mmap
import struct
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dataloading.shards.fixed import COLUMNS, narrow, one_value_a_row, unknown_info
from dataloading.shards.hdf5_file import HDF5File, new_hdf5_file
from dataloading.shards.native import DTYPES
from dataloading.shards.samples import SampleBuilder, Samples, offsets_of
from dataloading.shards.shard import REMEDY, DatasetInfo, Shard, check_content, check_offsets

_SIZES = {name: DTYPES[name].itemsize for name in COLUMNS}

_OBJECT_HEADER = struct.Struct("<H6xQ")
"""Header of an object in a heap collection: its number and size."""


class RaggedColumn:
    """Column whose rows are integer arrays of different lengths.

    Raises ``ValueError`` if the array ``name`` is not such a column, or if it claims more bytes than the file has.
    """

    def __init__(self, path: Path, file: HDF5File, name: str) -> None:
        array = file.array(name)
        if array.row_dtype is None or array.values.ndim != 1:
            raise ValueError(f"{name} has shape {array.values.shape}, expected rows of integers of variable length")
        self.counts = array.values["count"].astype(np.int64)
        """[rows] number of elements in each row."""
        self.held_bytes = 0 if array.in_place else array.values.nbytes
        self.dtype = array.row_dtype
        self._name = f"{path}: {name}"
        # Valid values have the same bytes in the stored signed type as in the unsigned type of `Samples`.
        self.is_as_in_samples = self.dtype.newbyteorder("<") == self.dtype and self.dtype.itemsize == _SIZES.get(name)
        self._addresses, self._numbers = array.values["address"], array.values["object"]
        self._content = memoryview(file.content)
        self._objects = lru_cache(maxsize=64)(partial(_objects_of, file.content))
        claimed = int(self.counts.sum()) * self.dtype.itemsize
        if claimed > len(file.content):  # rows that share one object could claim any amount of memory
            raise ValueError(f"{name} claims {claimed:,} bytes in a file of {len(file.content):,}")

    def row(self, index: int, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the bytes of a row, or of a range of its elements. Raises ``ValueError`` for an invalid reference."""
        size = int(self.counts[index]) * self.dtype.itemsize
        place, found = 0, 0
        if size:
            place, found = self._objects(int(self._addresses[index])).get(int(self._numbers[index]), (0, 0))
        if found != size:
            raise ValueError(f"{self._name}: the reference of row {index} leads to no such object; {REMEDY}")
        end = place + size if stop is None else place + stop * self.dtype.itemsize
        return self._content[place + start * self.dtype.itemsize : end]

    def narrowed(self, values: NDArray[Any], dtype: Any) -> NDArray[Any]:
        """Convert values of this column to another type. Raises ``ValueError`` if a value does not fit."""
        return narrow(values, dtype, self._name)


class RaggedShard(Shard):
    """A shard with rows of variable length, read from a map of the file."""

    row_offsets: NDArray[np.int64]
    """[R + 1] first sample of each row. A row is a pack in the packed layout, and one sample in the varlength layout."""

    def __init__(self, path: Path, file: HDF5File) -> None:
        super().__init__(path, unknown_info(), file.content)
        self.layout = "packed" if "packed_input_len" in file.names else "varlength"
        self._columns = {name: RaggedColumn(path, file, name) for name in COLUMNS}
        self.held_bytes = sum(column.held_bytes for column in self._columns.values())
        rows = len(self._columns["input_ids"].counts)
        if self.layout == "packed":
            names = ("packed_input_len", "packed_masked_lm_len", "next_sentence_labels")
            packed = [RaggedColumn(path, file, name) for name in names]
            samples_in_row = packed[0].counts
            if len(samples_in_row) != rows or any(not np.array_equal(each.counts, samples_in_row) for each in packed):
                raise ValueError(f"{', '.join(names)} disagree")
            lengths, masked_counts, labels = (
                column.narrowed(np.frombuffer(b"".join(map(column.row, range(rows))), column.dtype), np.uint16)
                for column in packed
            )
        else:
            samples_in_row = np.ones(rows, np.int64)
            lengths, masked_counts = (self._columns[name].counts for name in ("input_ids", "masked_lm_ids"))
            labels = one_value_a_row(file.array("next_sentence_labels"), rows)
        self.sequence_offsets, self.masked_lm_offsets = offsets_of(lengths), offsets_of(masked_counts)
        self._labels = narrow(labels, np.uint8, f"{path}: next_sentence_labels")
        self.row_offsets = offsets_of(samples_in_row)
        self._row_of = np.repeat(np.arange(rows), samples_in_row)
        # A row has as many elements as its samples in total.
        tokens, masked = (
            np.diff(offsets[self.row_offsets]) for offsets in (self.sequence_offsets, self.masked_lm_offsets)
        )
        for name, expected in zip(COLUMNS, (tokens, tokens, masked, masked), strict=True):
            if not np.array_equal(expected, self._columns[name].counts):
                raise ValueError(f"{name} has rows of other lengths than its neighbours")

    def add_to(self, builder: SampleBuilder, index: int) -> None:
        row = int(self._row_of[index])
        first_of_row = self.row_offsets[row]
        (start, stop), (first, last) = (
            (int(offsets[index] - offsets[first_of_row]), int(offsets[index + 1] - offsets[first_of_row]))
            for offsets in (self.sequence_offsets, self.masked_lm_offsets)
        )
        parts: list[memoryview | bytes] = []
        for name, begin, end in zip(COLUMNS, (start, start, first, first), (stop, stop, last, last), strict=True):
            column = self._columns[name]
            part = column.row(row, begin, end)
            shift = start if name == "masked_lm_positions" else 0  # stored positions are relative to the row
            if shift or not column.is_as_in_samples:
                values = np.frombuffer(part, column.dtype).astype(np.int64) - shift
                part = column.narrowed(values, DTYPES[name]).tobytes()
            parts.append(part)
        builder.add(*parts, next_sentence_label=int(self._labels[index]))


def write_packed(path: Path, samples: Samples, pack_offsets: NDArray[np.int64], info: DatasetInfo) -> None:
    """Write a file in the packed layout. Pack p holds samples ``pack_offsets[p]`` to ``pack_offsets[p + 1]``."""
    check_offsets(samples, path)
    check_content(samples, info, path)
    row_starts, masked_starts = samples.sequence_offsets[pack_offsets], samples.masked_lm_offsets[pack_offsets]
    inside = samples.sequence_offsets[:-1] - np.repeat(row_starts[:-1], np.diff(pack_offsets))
    if len(samples.masked_lm_positions) and samples.masked_lm_positions.min() == 0:
        raise ValueError(f"{path}: position 0 is masked, which marks padding in the packed layout; use native")
    columns: dict[str, tuple[NDArray[Any], str, NDArray[np.int64]]] = {
        "input_ids": (samples.input_ids, "<i2", row_starts),
        "segment_ids": (samples.segment_ids, "i1", row_starts),
        "masked_lm_positions": (
            samples.masked_lm_positions + np.repeat(inside, samples.masked_counts),
            "<i2",
            masked_starts,
        ),
        "masked_lm_ids": (samples.masked_lm_ids, "<i2", masked_starts),
        "packed_input_len": (samples.lengths, "<i2", pack_offsets),
        "packed_masked_lm_len": (samples.masked_counts, "<i2", pack_offsets),
        "next_sentence_labels": (samples.next_sentence_labels, "i1", pack_offsets),
    }
    for name, (values, dtype, _) in columns.items():
        if values.max(initial=0) > (most := np.iinfo(dtype).max):
            raise ValueError(f"{path}: {name} is up to {values.max():,}; the packed layout holds up to {most:,}")
    with new_hdf5_file(path) as file:
        for name, (values, dtype, offsets) in columns.items():
            rows = np.empty(len(offsets) - 1, h5py.vlen_dtype(np.dtype(dtype)))
            for row in range(len(rows)):
                rows[row] = values[offsets[row] : offsets[row + 1]].astype(dtype)
            column = file.create_dataset(name, rows.shape, rows.dtype)
            # Assignment by index would treat rows of equal length as a matrix.
            column.id.write(h5py.h5s.ALL, h5py.h5s.ALL, rows)


def _objects_of(content: mmap.mmap, address: int) -> dict[int, tuple[int, int]]:
    """Return the offset and size of each object in the heap collection at ``address``, by object number.

    The result is empty if there is no collection. Objects are stored consecutively. Each has a header of 16 bytes and is
    padded to 8 bytes. Number 0 marks the free space at the end.
    """
    objects: dict[int, tuple[int, int]] = {}
    if content[address : address + 5] != b"GCOL\x01" or address + 16 > len(content):
        return objects
    end = min(len(content), address + int.from_bytes(content[address + 8 : address + 16], "little"))
    place = address + 16
    while place + _OBJECT_HEADER.size <= end:
        number, size = _OBJECT_HEADER.unpack_from(content, place)
        place += _OBJECT_HEADER.size
        # Stop at a repeated number, because a hostile file could otherwise make the loop arbitrarily long.
        if number == 0 or size > end - place or number in objects:
            break
        objects[number] = (place, size)
        place += -(-size // 8) * 8
    return objects
