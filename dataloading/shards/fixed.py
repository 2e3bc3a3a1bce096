"""The fixed HDF5 layout of NVIDIA's submissions: padded rows with one sample per row.

    input_ids, input_mask, segment_ids [n, 512], masked_lm_positions, masked_lm_ids [n, 76], next_sentence_labels [n]

The layout contains neither a digest nor the name of the vocabulary. Position 0 holds [CLS], which is never masked, so 0
marks padding among the masked positions. This module also contains helpers that the fixed and ragged layouts share.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloading.shards.hdf5_file import HDF5Array, HDF5File
from dataloading.shards.samples import Samples, concatenate, offsets_of
from dataloading.shards.shard import MAX_ID, REMEDY, DatasetInfo, FlatShard

COLUMNS = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
_ROWS_AT_A_TIME = 4096


def unknown_info(max_seq_length: int = MAX_ID, max_predictions_per_seq: int = MAX_ID) -> DatasetInfo:
    """Return the description of a file that contains none: no vocabulary, and by default the largest possible sizes."""
    return DatasetInfo(MAX_ID + 1, max_seq_length, max_predictions_per_seq, "", "", {}, {})


def open_fixed(path: Path, file: HDF5File) -> FlatShard:
    """Read a shard of the fixed layout into memory without its padding. Raises ``ValueError`` if it is damaged."""
    names = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids")
    columns = {name: file.array(name).values for name in names}
    shape, masked_shape = columns["input_ids"].shape, columns["masked_lm_ids"].shape
    for name, values in columns.items():
        wanted = masked_shape if name.startswith("masked") else shape
        if values.shape != wanted or len(wanted) != 2 or wanted[0] != shape[0]:
            raise ValueError(f"{name} has shape {values.shape}, input_ids {shape}")
    columns["next_sentence_labels"] = one_value_a_row(file.array("next_sentence_labels"), shape[0])
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
    values = {name: columns[name][where] for name, where in zip(COLUMNS, (real, real, masked, masked), strict=True)}
    values["next_sentence_labels"] = columns["next_sentence_labels"]
    kinds = {name: np.uint8 if name in ("segment_ids", "next_sentence_labels") else np.uint16 for name in values}
    return Samples(
        **{name: narrow(array, kinds[name], f"{path}: {name}") for name, array in values.items()},
        sequence_offsets=offsets_of(real.sum(axis=1)),
        masked_lm_offsets=offsets_of(masked.sum(axis=1)),
    )


def narrow(values: NDArray[Any], dtype: Any, name: str) -> NDArray[Any]:
    """Cast non-negative integers to another type. Raises ``ValueError`` if a value does not fit."""
    most = np.iinfo(dtype).max
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {values.dtype}, expected integers; {REMEDY}")
    if len(values) and not (values.min() >= 0 and values.max() <= most):
        raise ValueError(f"{name}: {values.min()} to {values.max()}, expected 0 to {most}; {REMEDY}")
    return values.astype(dtype, copy=False)


def one_value_a_row(array: HDF5Array, rows: int) -> NDArray[Any]:
    """Return next-sentence labels [n], stored as [n] or [n, 1]. Raises ``ValueError`` if n is not ``rows``."""
    if array.row_dtype is not None or array.values.size != rows:
        raise ValueError(f"next_sentence_labels has shape {array.values.shape}, expected {rows} integers")
    return array.values.reshape(-1)
