"""Write shards row by row with h5py, as other programs do, without this project's writers."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dataloading.shards.samples import Samples
from dataloading.shards.shard import DatasetInfo

RAGGED = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
PACKED = ("packed_input_len", "packed_masked_lm_len", "next_sentence_labels")


def array_of(file: h5py.File, name: str) -> h5py.Dataset:
    found = file[name]
    assert isinstance(found, h5py.Dataset)
    return found


def pack_rows(samples: Samples, packs: np.ndarray) -> Iterator[dict[str, list[int]]]:
    """Yield the rows of a packed file. Each is built sample by sample, as in published packing scripts."""
    for first, stop in pairwise(packs):
        row: dict[str, list[int]] = {name: [] for name in (*RAGGED, *PACKED)}
        for index in range(first, stop):
            one = samples.slice(index, index + 1)
            row["masked_lm_positions"] += (one.masked_lm_positions + len(row["input_ids"])).tolist()
            for name in ("input_ids", "segment_ids", "masked_lm_ids", "next_sentence_labels"):
                row[name] += getattr(one, name).tolist()
            row["packed_input_len"].append(len(one.input_ids))
            row["packed_masked_lm_len"].append(len(one.masked_lm_ids))
        yield row


def write_like_others(
    path: Path,
    layout: str,
    samples: Samples,
    info: DatasetInfo,
    packs: np.ndarray | None = None,
    integers: str = "i2",
    **storage: Any,
) -> None:
    small = "i1" if integers == "i2" else integers
    labels = samples.next_sentence_labels.astype(small)
    with h5py.File(path, "w") as file:
        if layout == "fixed":
            widths = dict.fromkeys(("input_ids", "input_mask", "segment_ids"), info.max_seq_length)
            widths |= dict.fromkeys(("masked_lm_positions", "masked_lm_ids"), info.max_predictions_per_seq)
            columns = {
                name: file.create_dataset(
                    name, (len(samples), width), small if name == "input_mask" else integers, **storage
                )
                for name, width in widths.items()
            }
            for index in range(len(samples)):
                one = samples.slice(index, index + 1)
                for name in RAGGED:
                    values = getattr(one, name)
                    columns[name][index, : len(values)] = values
                columns["input_mask"][index, : len(one.input_ids)] = 1
        else:
            names = (*RAGGED, *PACKED) if layout == "packed" else RAGGED
            packs = np.arange(len(samples) + 1) if packs is None or layout != "packed" else packs
            for name in names:
                kind = h5py.vlen_dtype(np.dtype(small if name in ("segment_ids", "next_sentence_labels") else integers))
                file.create_dataset(name, (len(packs) - 1,), kind, **storage)
            for index, row in enumerate(pack_rows(samples, packs)):
                for name in names:
                    array_of(file, name)[index] = row[name]
        if layout != "packed":
            columns = storage | {"chunks": bool(storage) or None} if layout == "fixed" else {}
            file.create_dataset("next_sentence_labels", data=labels, **columns)
