"""The fixed HDF5 layout of NVIDIA's submissions: padded rows, one sample each.

    input_ids, input_mask, segment_ids [n, 512], masked_lm_positions, masked_lm_ids [n, 76], next_sentence_labels [n]

The layout contains neither a digest nor the name of the vocabulary. Position 0 holds [CLS], which is never masked, so 0
marks padding among the masked positions. This module also contains helpers that the fixed and ragged layouts share.
"""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloading.shards.hdf5_file import HDF5Array, HDF5File
from dataloading.shards.samples import Samples, concatenate, offsets_of
from dataloading.shards.shard import MAX_ID, REMEDY, DatasetInfo, FlatShard, Shard

COLUMNS = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
_ROWS_AT_A_TIME = 4096


def unknown_info(max_seq_length: int = MAX_ID, max_predictions_per_seq: int = MAX_ID) -> DatasetInfo:
    """Return the description of a file that contains no description."""
    return DatasetInfo(MAX_ID + 1, max_seq_length, max_predictions_per_seq, "", "", {}, {})


class FixedShard(Shard):
    """A shard with padded rows."""

    layout = "fixed"

    def __init__(self, path: Path, columns: dict[str, NDArray[Any]], content: mmap.mmap | None) -> None:
        info = unknown_info(columns["input_ids"].shape[1], columns["masked_lm_ids"].shape[1])
        super().__init__(path, info, content)
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns["next_sentence_labels"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] number of real tokens in each sample. Reads the mask of every row."""
        return self._columns["input_mask"].sum(axis=1, dtype=np.int64)

    @property
    def masked_counts(self) -> NDArray[np.int64]:
        """[n] number of masked tokens in each sample. Reads the positions of every row."""
        return np.count_nonzero(self._columns["masked_lm_positions"], axis=1).astype(np.int64)

    def _between(self, start: int, stop: int) -> Samples:
        columns = {name: column[start:stop] for name, column in self._columns.items()}
        real, masked = columns["input_mask"] != 0, columns["masked_lm_positions"] != 0
        for name, marked in (("input_mask", real), ("masked_lm_positions", masked)):
            if (marked[:, 1:] > marked[:, :-1]).any():
                raise ValueError(f"{self.path}: {name} has a gap: real entries after padding; {REMEDY}")
        chosen = dict(zip(COLUMNS, (real, real, masked, masked), strict=True))
        values = {name: columns[name][where] for name, where in chosen.items()}
        values["next_sentence_labels"] = columns["next_sentence_labels"]
        kinds = {name: np.uint8 if name in ("segment_ids", "next_sentence_labels") else np.uint16 for name in values}
        return Samples(
            **{name: narrow(array, kinds[name], f"{self.path}: {name}") for name, array in values.items()},
            sequence_offsets=offsets_of(real.sum(axis=1)),
            masked_lm_offsets=offsets_of(masked.sum(axis=1)),
        )


def open_fixed(path: Path, file: HDF5File) -> Shard:
    """Open a shard of the fixed layout; ValueError if it is damaged. A compressed file is read into memory without
    padding."""
    names = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids")
    arrays = {name: file.array(name) for name in names}
    shape, masked_shape = (arrays[name].values.shape for name in ("input_ids", "masked_lm_ids"))
    for name, array in arrays.items():
        wanted = masked_shape if name.startswith("masked") else shape
        if array.values.shape != wanted or len(wanted) != 2 or wanted[0] != shape[0]:
            raise ValueError(f"{name} has shape {array.values.shape}, input_ids {shape}")
    labels = file.array("next_sentence_labels")
    columns = {name: array.values for name, array in arrays.items()}
    columns["next_sentence_labels"] = one_value_a_row(labels, shape[0])
    if all(array.in_place for array in (*arrays.values(), labels)):
        return FixedShard(path, columns, file.content)
    rows = FixedShard(path, columns, None)
    starts = range(0, max(1, len(rows)), _ROWS_AT_A_TIME)
    blocks = [rows.read(start, min(start + _ROWS_AT_A_TIME, len(rows))) for start in starts]
    return FlatShard(path, rows.info, "fixed", concatenate(blocks))


def narrow(values: NDArray[Any], dtype: Any, name: str) -> NDArray[Any]:
    """Cast non-negative integers to another type; ValueError if a value does not fit."""
    most = np.iinfo(dtype).max
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {values.dtype}, expected integers; {REMEDY}")
    if len(values) and not (values.min() >= 0 and values.max() <= most):
        raise ValueError(f"{name}: {values.min()} to {values.max()}, expected 0 to {most}; {REMEDY}")
    return values.astype(dtype, copy=False)


def one_value_a_row(array: HDF5Array, rows: int) -> NDArray[Any]:
    """Return next-sentence labels, stored as [n] or [n, 1]; ValueError if their number is not ``rows``."""
    if array.row_dtype is not None or array.values.size != rows:
        raise ValueError(f"next_sentence_labels has shape {array.values.shape}, expected {rows} integers")
    return array.values.reshape(-1)
