"""The HDF5 layouts of other programs.

    fixed      padded rows with one sample per row, as in NVIDIA's submissions: input_ids, input_mask, segment_ids [n, 512],
               masked_lm_positions, masked_lm_ids [n, 76], next_sentence_labels [n]
    varlength  rows of variable length with one sample per row: input_ids, segment_ids, masked_lm_positions, masked_lm_ids
               [n rows], next_sentence_labels [n]
    packed     the same columns with several concatenated samples in a row; next_sentence_labels, packed_input_len and
               packed_masked_lm_len have one number for each sample in a row

The layouts contain neither a digest nor the name of the vocabulary. Position 0 holds [CLS], which is never masked, so 0
marks padding among the masked positions of the fixed layout.

A row of variable length is stored as a reference into the file's global heap (HDF5 File Format Specification 3.0, section
III.E). The HDF5 library follows one reference at a time and allocates memory for each row. This module reads such rows
from a map of the file.
"""

import mmap
import struct
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dataloading.shards.hdf5_file import HDF5Array, HDF5File, new_hdf5_file
from dataloading.shards.samples import DTYPES, SampleBuilder, Samples, concatenate, offsets_of
from dataloading.shards.shard import (
    REMEDY,
    DatasetInfo,
    FlatShard,
    Shard,
    check_content,
    check_offsets,
    narrow,
    unknown_info,
)

_COLUMNS = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
_ROWS_AT_A_TIME = 4096
_SIZES = {name: DTYPES[name].itemsize for name in _COLUMNS}

_OBJECT_HEADER = struct.Struct("<H6xQ")
"""Header of an object in a heap collection: its number and size."""


def open_fixed(path: Path, file: HDF5File) -> FlatShard:
    """Read a shard of the fixed layout into memory without its padding. Raises ``ValueError`` if it is damaged."""
    names = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids")
    columns = {name: file.array(name).values for name in names}
    shape, masked_shape = columns["input_ids"].shape, columns["masked_lm_ids"].shape
    for name, values in columns.items():
        wanted = masked_shape if name.startswith("masked") else shape
        if values.shape != wanted or len(wanted) != 2 or wanted[0] != shape[0]:
            raise ValueError(f"{name} has shape {values.shape}, but input_ids has {shape}")
    columns["next_sentence_labels"] = _one_value_a_row(file.array("next_sentence_labels"), shape[0])
    starts = range(0, max(1, shape[0]), _ROWS_AT_A_TIME)
    blocks = [
        _without_padding({name: values[start : start + _ROWS_AT_A_TIME] for name, values in columns.items()}, path)
        for start in starts
    ]
    return FlatShard(path, unknown_info(shape[1], masked_shape[1]), "fixed", concatenate(blocks))


def _without_padding(columns: dict[str, NDArray[Any]], path: Path) -> Samples:
    real, masked = columns["input_mask"] != 0, columns["masked_lm_positions"] != 0
    for name, marked in (("input_mask", real), ("masked_lm_positions", masked)):
        if (marked[:, 1:] > marked[:, :-1]).any():
            raise ValueError(f"{path}: {name} has a gap: real entries after padding; {REMEDY}")
    values = {name: columns[name][where] for name, where in zip(_COLUMNS, (real, real, masked, masked), strict=True)}
    values["next_sentence_labels"] = columns["next_sentence_labels"]
    return Samples(
        **{name: narrow(array, DTYPES[name], f"{path}: {name}") for name, array in values.items()},
        sequence_offsets=offsets_of(real.sum(axis=1)),
        masked_lm_offsets=offsets_of(masked.sum(axis=1)),
    )


def _one_value_a_row(array: HDF5Array, rows: int) -> NDArray[Any]:
    """Return next-sentence labels [n], stored as [n] or [n, 1]. Raises ``ValueError`` if n is not ``rows``."""
    if array.row_dtype is not None or array.values.size != rows:
        raise ValueError(f"next_sentence_labels has shape {array.values.shape}, expected {rows} integers")
    return array.values.ravel()


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
        self.name = f"{path}: {name}"
        # Ignore the sign, because a valid value has the same bytes in a signed and in an unsigned type.
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
            raise ValueError(
                f"{self.name}: row {index} refers to an object that is missing or does not have the row's size; {REMEDY}"
            )
        end = place + size if stop is None else place + stop * self.dtype.itemsize
        return self._content[place + start * self.dtype.itemsize : end]


class RaggedShard(Shard):
    """A shard with rows of variable length, read from a map of the file."""

    row_offsets: NDArray[np.int64]
    """[R + 1] first sample of each row. A row is a pack in the packed layout, and one sample in the varlength layout."""

    def __init__(self, path: Path, file: HDF5File) -> None:
        super().__init__(path, unknown_info(), file.content)
        self.layout = "packed" if "packed_input_len" in file.names else "varlength"
        self._columns = {name: RaggedColumn(path, file, name) for name in _COLUMNS}
        self.held_bytes = sum(column.held_bytes for column in self._columns.values())
        rows = len(self._columns["input_ids"].counts)
        if self.layout == "packed":
            names = ("packed_input_len", "packed_masked_lm_len", "next_sentence_labels")
            packed = [RaggedColumn(path, file, name) for name in names]
            samples_in_row = packed[0].counts
            if len(samples_in_row) != rows or any(not np.array_equal(each.counts, samples_in_row) for each in packed):
                raise ValueError(f"{', '.join(names)} disagree about the number of samples")
            lengths, masked_counts, labels = (
                narrow(np.frombuffer(b"".join(map(column.row, range(rows))), column.dtype), np.uint16, column.name)
                for column in packed
            )
        else:
            samples_in_row = np.ones(rows, np.int64)
            lengths, masked_counts = (self._columns[name].counts for name in ("input_ids", "masked_lm_ids"))
            labels = _one_value_a_row(file.array("next_sentence_labels"), rows)
        self.sequence_offsets, self.masked_lm_offsets = offsets_of(lengths), offsets_of(masked_counts)
        self._labels = narrow(labels, np.uint8, f"{path}: next_sentence_labels")
        self.row_offsets = offsets_of(samples_in_row)
        self._row_of = np.repeat(np.arange(rows), samples_in_row)
        # A row has as many elements as all its samples together.
        tokens, masked = (
            np.diff(offsets[self.row_offsets]) for offsets in (self.sequence_offsets, self.masked_lm_offsets)
        )
        for name, expected in zip(_COLUMNS, (tokens, tokens, masked, masked), strict=True):
            if not np.array_equal(expected, self._columns[name].counts):
                raise ValueError(f"the lengths of the rows of {name} disagree with the other columns")

    def add_to(self, builder: SampleBuilder, index: int) -> None:
        row = int(self._row_of[index])
        first_of_row = self.row_offsets[row]
        (start, stop), (first, last) = (
            (int(offsets[index] - offsets[first_of_row]), int(offsets[index + 1] - offsets[first_of_row]))
            for offsets in (self.sequence_offsets, self.masked_lm_offsets)
        )
        parts: list[memoryview | bytes] = []
        for name, begin, end in zip(_COLUMNS, (start, start, first, first), (stop, stop, last, last), strict=True):
            column = self._columns[name]
            part = column.row(row, begin, end)
            shift = start if name == "masked_lm_positions" else 0  # stored positions are relative to the row
            if shift or not column.is_as_in_samples:
                values = np.frombuffer(part, column.dtype).astype(np.int64) - shift
                part = narrow(values, DTYPES[name], column.name).tobytes()
            parts.append(part)
        builder.add(*parts, next_sentence_label=int(self._labels[index]))


def write_packed(path: Path, samples: Samples, pack_offsets: NDArray[np.int64], info: DatasetInfo) -> None:
    """Write a file in the packed layout. Pack p holds samples ``pack_offsets[p]`` to ``pack_offsets[p + 1]``."""
    check_offsets(samples, path)
    check_content(samples, info, path)
    row_starts, masked_starts = samples.sequence_offsets[pack_offsets], samples.masked_lm_offsets[pack_offsets]
    inside = samples.sequence_offsets[:-1] - np.repeat(row_starts[:-1], np.diff(pack_offsets))
    if len(samples.masked_lm_positions) and samples.masked_lm_positions.min() == 0:
        raise ValueError(f"{path}: position 0 is masked, but 0 marks padding in the packed layout; use --to native")
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
            raise ValueError(
                f"{path}: {name} is up to {values.max():,}; the packed layout holds up to {most:,}: use --to native"
            )
    with new_hdf5_file(path) as file:
        for name, (values, dtype, offsets) in columns.items():
            rows = np.empty(len(offsets) - 1, h5py.vlen_dtype(np.dtype(dtype)))
            for row in range(len(rows)):
                rows[row] = values[offsets[row] : offsets[row + 1]].astype(dtype)
            column = file.create_dataset(name, rows.shape, rows.dtype)
            # Assignment by index would treat rows of equal length as a matrix.
            column.id.write(h5py.h5s.ALL, h5py.h5s.ALL, rows)


def _objects_of(content: mmap.mmap | bytes, address: int) -> dict[int, tuple[int, int]]:
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
