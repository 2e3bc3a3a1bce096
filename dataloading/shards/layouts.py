"""The HDF5 layouts in circulation: what NVIDIA's submissions write and other code bases read.

    fixed      padded rows: input_ids, input_mask, segment_ids [n, 512], masked_lm_positions, masked_lm_ids [n, 76]
    varlength  the same without padding and mask, as variable-length rows
    packed     several samples a row, one after another, with packed_input_len and packed_masked_lm_len [samples in the row]

None says which vocabulary its ids belong to, nor carries a digest. Position 0 holds [CLS] and is never masked, so it marks
padding among the masked positions.
"""

import io
import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from console.files import write_atomically
from dataloading.shards.hdf5_file import HDF5Array, HDF5File
from dataloading.shards.samples import SampleBuilder, Samples, concatenate, offsets_of
from dataloading.shards.shard import MAX_ID, REMEDY, DatasetInfo, FlatShard, Shard, check_content, check_offsets

_MOST_ID = (1 << 15) - 1
"""Ids and positions are signed 16-bit integers in these layouts."""

_ROWS_AT_A_TIME = 4096

_WRAPPED = (
    "no row has 128 to 383 tokens, as where NumPy 2 added up a mask of int8 in int8 (convert_fixed2variable.py in NVIDIA's "
    "submissions): convert the fixed shards again, by python -m dataloading convert --to varlength"
)

_RAGGED = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
_FIXED = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")


def unknown_info(max_seq_length: int = MAX_ID, max_predictions_per_seq: int = MAX_ID) -> DatasetInfo:
    """Describe a file that does not say what it was made from."""
    return DatasetInfo(MAX_ID + 1, max_seq_length, max_predictions_per_seq, "", "", {}, {})


class FixedShard(Shard):
    """Padded rows, read in place."""

    layout = "fixed"

    def __init__(self, path: Path, columns: dict[str, NDArray[Any]], content: mmap.mmap | None) -> None:
        super().__init__(path, unknown_info(columns["input_ids"].shape[1], columns["masked_lm_ids"].shape[1]))
        self._columns = columns
        self._content = content
        self._as_in_samples = _as_in_samples([columns[name].dtype for name in _RAGGED])

    def __len__(self) -> int:
        return len(self._columns["next_sentence_labels"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] real tokens of each sample; reads the mask of every row."""
        return self._columns["input_mask"].sum(axis=1, dtype=np.int64)

    @property
    def masked_counts(self) -> NDArray[np.int64]:
        """[n] masked tokens of each sample; reads the positions of every row."""
        return np.count_nonzero(self._columns["masked_lm_positions"], axis=1).astype(np.int64)

    def _between(self, start: int, stop: int) -> Samples:
        return self._rows(slice(start, stop))

    def _at(self, indices: NDArray[np.int64]) -> Samples:
        return self._rows(indices)

    def add_to(self, builder: SampleBuilder, index: int) -> bool:
        """Add one sample, unchecked, to ``builder``; False for a mask with gaps, and for integers of another size."""
        # All but the labels, which are one a sample.
        rows = {name: column[index] for name, column in self._columns.items() if column.ndim == 2}
        length, masked = (int(np.count_nonzero(rows[name])) for name in ("input_mask", "masked_lm_positions"))
        # Where they are not, the slow way finds the gap, and names it.
        solid = rows["input_mask"][:length].all() and rows["masked_lm_positions"][:masked].all()
        if not solid or not self._as_in_samples:
            return False
        sizes = (length, length, masked, masked)
        parts = (memoryview(rows[name][:size].tobytes()) for name, size in zip(_RAGGED, sizes, strict=True))
        builder.add(*parts, next_sentence_label=int(self._columns["next_sentence_labels"][index]))
        return True

    def _rows(self, rows: NDArray[np.int64] | slice) -> Samples:
        columns = {name: column[rows] for name, column in self._columns.items()}
        real = _prefix(columns["input_mask"] != 0, "input_mask", self.path)
        masked = _prefix(columns["masked_lm_positions"] != 0, "masked_lm_positions", self.path)
        chosen = dict(zip(_RAGGED, (real, real, masked, masked), strict=True))
        values = {name: columns[name][where] for name, where in chosen.items()}
        return _samples(values, real.sum(axis=1), masked.sum(axis=1), columns["next_sentence_labels"], self.path)


class RaggedShard(Shard):
    """Rows of variable length, of one sample (varlength) or several (packed), read in place."""

    row_offsets: NDArray[np.int64]
    """[R + 1] first sample of each row; a row is a pack in the packed layout, and one sample otherwise."""

    def __init__(self, path: Path, file: HDF5File) -> None:
        super().__init__(path, unknown_info())
        # Numba comes with it, which takes half a second that other layouts need not spend.
        from dataloading.shards.variable_length import VariableLengthColumn

        self._content = file.content
        self.layout = "packed" if "packed_input_len" in file.names else "varlength"
        self._columns = {name: VariableLengthColumn(file, name) for name in _RAGGED}
        rows = len(self._columns["input_ids"].counts)
        if self.layout == "packed":
            packed = ("packed_input_len", "packed_masked_lm_len", "next_sentence_labels")
            sizes = {name: VariableLengthColumn(file, name) for name in packed}
            counts = sizes["packed_input_len"].counts
            # narrow() also refuses negative ones, though nothing is narrower here.
            self._lengths, self._masked_counts, labels = (
                narrow(column.all(), np.int64, name, path) for name, column in sizes.items()
            )
            if any(not np.array_equal(column.counts, counts) for column in sizes.values()) or len(counts) != rows:
                # Without the path, which `dataloading.shards.formats` adds.
                raise ValueError("packed_input_len, packed_masked_lm_len and next_sentence_labels disagree")
        else:
            counts = np.ones(rows, np.int64)
            self._lengths = self._columns["input_ids"].counts
            self._masked_counts = self._columns["masked_lm_ids"].counts
            labels = _one_value_a_row(file.array("next_sentence_labels"), rows)
            self.remedy = _WRAPPED if _may_have_wrapped(self._lengths) else REMEDY
        self._labels = narrow(labels, np.uint8, "next_sentence_labels", path)
        self.row_offsets = offsets_of(counts)
        self._row_of = np.repeat(np.arange(rows), counts)
        self._starts = self._inside_rows(self._lengths)
        self._masked_starts = self._inside_rows(self._masked_counts)
        # A row is as long as its samples together. bincount adds weights up in float64, exact to 2^53.
        tokens, masked = (
            np.bincount(self._row_of, lengths, minlength=rows) for lengths in (self._lengths, self._masked_counts)
        )
        for name, in_rows in zip(_RAGGED, (tokens, tokens, masked, masked), strict=True):
            if not np.array_equal(in_rows, self._columns[name].counts):
                raise ValueError(f"{name} has rows of other lengths than its neighbours")
        self.held_bytes = sum(column.held_bytes for column in self._columns.values())
        self._rows_are_samples = self.layout == "varlength" and _as_in_samples(
            [self._columns[name].dtype for name in _RAGGED]
        )

    def __len__(self) -> int:
        return len(self._lengths)

    def add_to(self, builder: SampleBuilder, index: int) -> bool:
        """Add one sample, unchecked, to ``builder``; False for packs, and for integers of another size."""
        if not self._rows_are_samples:
            return False
        parts = (self._columns[name].row(index) for name in _RAGGED)
        builder.add(*parts, next_sentence_label=int(self._labels[index]))
        return True

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] real tokens of each sample."""
        return self._lengths

    @property
    def masked_counts(self) -> NDArray[np.int64]:
        """[n] masked tokens of each sample."""
        return self._masked_counts

    def _between(self, start: int, stop: int) -> Samples:
        return self._at(np.arange(start, stop))

    def _at(self, indices: NDArray[np.int64]) -> Samples:
        rows = self._row_of[indices]
        tokens = rows, self._starts[indices], self._lengths[indices]
        masked = rows, self._masked_starts[indices], self._masked_counts[indices]
        try:
            chosen = dict(zip(_RAGGED, (tokens, tokens, masked, masked), strict=True))
            values = {name: self._columns[name].take(*where) for name, where in chosen.items()}
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}; {REMEDY}") from None
        # Positions count from the beginning of the row.
        inside = np.repeat(tokens[1], masked[2])
        values["masked_lm_positions"] = values["masked_lm_positions"].astype(np.int64) - inside  # below 0: refused next
        return _samples(values, tokens[2], masked[2], self._labels[indices], self.path)

    def _inside_rows(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] where each sample starts inside its row."""
        starts = offsets_of(lengths)
        # From the beginning of the row, where the flat starts count through all rows.
        return starts[:-1] - starts[self.row_offsets[self._row_of]]


def write_fixed(path: Path, samples: Samples, info: DatasetInfo) -> None:
    """Write a file of the fixed layout, ``info.max_seq_length`` tokens and ``info.max_predictions_per_seq`` masked ones a
    row; it appears complete or not at all.

    Raises:
        ValueError: the samples break what ``info`` says, or do not fit the layout.
    """
    _check_writable(samples, info, path)
    count = len(samples)
    # [n, width]: which places of each padded row are filled.
    real = np.arange(info.max_seq_length) < samples.lengths[:, None]
    masked = np.arange(info.max_predictions_per_seq) < samples.masked_counts[:, None]

    def padded(values: NDArray[Any], where: NDArray[np.bool_], dtype: str) -> NDArray[Any]:
        # Zeros, with which the reference pads.
        rows = np.zeros((count, where.shape[1]), dtype)
        rows[where] = values
        return rows

    # Integers of the types that the shards in circulation have.
    columns = {
        "input_ids": padded(samples.input_ids, real, "<i2"),
        "input_mask": real.astype("i1"),
        "segment_ids": padded(samples.segment_ids, real, "i1"),
        "masked_lm_positions": padded(samples.masked_lm_positions, masked, "<i2"),
        "masked_lm_ids": padded(samples.masked_lm_ids, masked, "<i2"),
        "next_sentence_labels": samples.next_sentence_labels.astype("i1"),
    }
    # Composed in memory, for the reason that `dataloading.shards.native` gives.
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        for name, column in columns.items():
            file.create_dataset(name, data=column)
    write_atomically(path, image.getbuffer())


def write_varlength(path: Path, samples: Samples, info: DatasetInfo) -> None:
    """Write a file of the varlength layout; errors and completeness as in `write_fixed`."""
    _check_writable(samples, info, path)
    columns = _ragged_columns(samples, samples.sequence_offsets, samples.masked_lm_offsets)
    _write_ragged(path, columns, samples.next_sentence_labels.astype("i1"))


def write_packed(path: Path, samples: Samples, pack_offsets: NDArray[np.int64], info: DatasetInfo) -> None:
    """Write a file of the packed layout; pack p holds samples ``pack_offsets[p]`` to ``pack_offsets[p + 1]``.

    Errors and completeness as in `write_fixed`.
    """
    _check_writable(samples, info, path)
    row_starts = samples.sequence_offsets[pack_offsets]
    if np.diff(row_starts).max(initial=0) > _MOST_ID:
        raise ValueError(
            f"{path}: a pack has {np.diff(row_starts).max():,} tokens, at most {_MOST_ID:,} fit its positions"
        )
    inside = samples.sequence_offsets[:-1] - np.repeat(row_starts[:-1], np.diff(pack_offsets))
    shifted = samples.masked_lm_positions + np.repeat(inside, samples.masked_counts)
    columns = _ragged_columns(samples, row_starts, samples.masked_lm_offsets[pack_offsets])
    columns["masked_lm_positions"] = (shifted.astype("<i2"), columns["masked_lm_positions"][1])
    columns["packed_input_len"] = (samples.lengths.astype("<i2"), pack_offsets)
    columns["packed_masked_lm_len"] = (samples.masked_counts.astype("<i2"), pack_offsets)
    columns["next_sentence_labels"] = (samples.next_sentence_labels.astype("i1"), pack_offsets)
    _write_ragged(path, columns, None)


def narrow(values: NDArray[Any], dtype: Any, name: str, path: Path) -> NDArray[Any]:
    """Cast integers to another type; ValueError where one does not fit it."""
    limits = np.iinfo(dtype)
    if values.dtype.kind not in "iu":
        raise ValueError(f"{path}: {name} holds {values.dtype}, expected integers; {REMEDY}")
    # Nothing in a sample is negative, though these layouts are of signed integers.
    if len(values) and not (values.min() >= max(limits.min, 0) and values.max() <= limits.max):
        raise ValueError(f"{path}: {name}: {values.min()} to {values.max()}, expected 0 to {limits.max}; {REMEDY}")
    return values.astype(dtype, copy=False)


def _samples(
    values: dict[str, NDArray[Any]],
    lengths: NDArray[np.int64],
    masked_counts: NDArray[np.int64],
    labels: NDArray[Any],
    path: Path,
) -> Samples:
    """Samples of the flat ``values`` of `_RAGGED`, in the types of `Samples`; errors as of `narrow`."""
    arrays = values | {"next_sentence_labels": labels}
    kinds = {name: np.uint8 if name in ("segment_ids", "next_sentence_labels") else np.uint16 for name in arrays}
    return Samples(
        **{name: narrow(array, kinds[name], name, path) for name, array in arrays.items()},
        sequence_offsets=offsets_of(lengths),
        masked_lm_offsets=offsets_of(masked_counts),
    )


def open_fixed(path: Path, file: HDF5File) -> Shard:
    """A shard of the fixed layout, given open; ValueError where it is damaged."""
    arrays = {name: file.array(name) for name in _FIXED}
    shape, masked_shape = arrays["input_ids"].shape, arrays["masked_lm_ids"].shape
    expected = dict.fromkeys(("input_ids", "input_mask", "segment_ids"), shape)
    expected |= {"masked_lm_positions": masked_shape, "masked_lm_ids": masked_shape}
    for name, wanted in expected.items():
        if arrays[name].ragged or arrays[name].shape != wanted or len(wanted) != 2 or wanted[0] != shape[0]:
            raise ValueError(f"{name} has shape {arrays[name].shape}, input_ids {shape}")
    labels = _one_value_a_row(arrays["next_sentence_labels"], shape[0])
    columns = {name: arrays[name].read() for name in expected} | {"next_sentence_labels": labels}
    if all(array.in_place for array in arrays.values()):
        return FixedShard(path, columns, file.content)
    rows = FixedShard(path, columns, None)
    # What has been unpacked is kept without its padding.
    blocks = [
        rows.read(start, min(start + _ROWS_AT_A_TIME, len(rows))) for start in range(0, len(rows), _ROWS_AT_A_TIME)
    ]
    return FlatShard(path, rows.info, "fixed", concatenate(blocks))


def _may_have_wrapped(lengths: NDArray[np.int64]) -> bool:
    """Tell whether these may be lengths of padded rows of 512 cut at int8: a negative one counts from the end."""
    # Of n tokens int8 keeps n, n - 256 or n - 512, and what is negative cuts a row of 512 from its end: neither leaves
    # 128 to 383 tokens.
    return bool((lengths > 383).any() and (lengths < 512).all() and ((lengths < 128) | (lengths > 383)).all())


def _as_in_samples(dtypes: Sequence[np.dtype[Any]]) -> bool:
    """Tell whether the integers of `_RAGGED` are stored as `Samples` has them, so that bytes can be taken as they are."""
    sizes = [dtype.itemsize for dtype in dtypes]
    # Of one byte there is no order, so that segment ids pass either way.
    return sizes == [2, 1, 2, 2] and all(dtype.newbyteorder("<") == dtype for dtype in dtypes)


def _prefix(marked: NDArray[np.bool_], name: str, path: Path) -> NDArray[np.bool_]:
    """``marked``; ValueError unless the marks of every row stand at its beginning."""
    if (marked[:, 1:] > marked[:, :-1]).any():
        raise ValueError(f"{path}: {name} has a gap: real entries after padding; {REMEDY}")
    return marked


def _one_value_a_row(array: HDF5Array, rows: int) -> NDArray[Any]:
    if array.ragged or math.prod(array.shape) != rows:
        raise ValueError(f"{array.name} has shape {array.shape}, expected {rows} integers")
    # Labels come as [n] and as [n, 1].
    return array.read().reshape(-1)


def _check_writable(samples: Samples, info: DatasetInfo, path: Path) -> None:
    check_offsets(samples, path)
    check_content(samples, info, path)
    for name, values in (("input_ids", samples.input_ids), ("masked_lm_ids", samples.masked_lm_ids)):
        if values.max(initial=0) > _MOST_ID:
            raise ValueError(
                f"{path}: {name} up to {values.max():,}; this layout holds ids up to {_MOST_ID:,}: use native"
            )
    if samples.lengths.max(initial=0) > _MOST_ID:
        raise ValueError(f"{path}: a sample of {samples.lengths.max():,} tokens; this layout holds up to {_MOST_ID:,}")
    if len(samples.masked_lm_positions) and samples.masked_lm_positions.min() == 0:
        raise ValueError(f"{path}: position 0 is masked, which marks padding in this layout: use native")


_Columns = dict[str, tuple[NDArray[Any], NDArray[np.int64]]]
"""Flat values and the offsets of their rows, by name."""


def _ragged_columns(samples: Samples, offsets: NDArray[np.int64], masked_offsets: NDArray[np.int64]) -> _Columns:
    return {
        "input_ids": (samples.input_ids.astype("<i2"), offsets),
        "segment_ids": (samples.segment_ids.astype("i1"), offsets),
        "masked_lm_positions": (samples.masked_lm_positions.astype("<i2"), masked_offsets),
        "masked_lm_ids": (samples.masked_lm_ids.astype("<i2"), masked_offsets),
    }


def _write_ragged(path: Path, columns: _Columns, labels: NDArray[Any] | None) -> None:
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        for name, (values, offsets) in columns.items():
            rows = np.empty(len(offsets) - 1, h5py.vlen_dtype(values.dtype))
            for row in range(len(rows)):
                rows[row] = values[offsets[row] : offsets[row + 1]]
            column = file.create_dataset(name, rows.shape, rows.dtype)
            # Assigned by index, rows that happen to have equal lengths are taken for a matrix.
            column.id.write(h5py.h5s.ALL, h5py.h5s.ALL, rows)
        if labels is not None:
            file.create_dataset("next_sentence_labels", data=labels)
    write_atomically(path, image.getbuffer())
