"""Shuffled samples into batches: ``dataloading`` against a PyTorch ``DataLoader`` over variable-length HDF5.

    python benchmarks/data_stages/reading.py [--samples N] [--batch-size N] [--workers N] [--rounds N] [--out FILE]

The other side reads the layout that published submissions use (one variable-length row a sample) one sample at a time, makes
of each the rows of 512 that their models take (ids, segments, mask, labels) and stacks them, in worker processes; once by
h5py from the file, and once from whole shards loaded into memory as arrays of objects, as those submissions do, with the
loading counted. Our side reads at random from the native layout, and from the same variable-length files in place, in one
thread, into ``Batch``, with opening and verification counted. Lengths are those of Wikipedia (``benchmarks/data``), tokens
are random; every side reads each of its samples once, in random order, and runs alternate.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import h5py
import numpy as np
import torch
import tyro
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from benchmarks.conditions import write_figures
from benchmarks.inputs import write_made_up_set
from cluster.model.histogram import drawn_lengths
from dataloading.batches.loader import batch_of
from dataloading.dataset.convert import convert
from dataloading.dataset.folder import open_dataset

MAX_SEQ_LENGTH = 512
COLUMNS = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")


def main(
    samples: int = 80_000, batch_size: int = 56, workers: int = 2, rounds: int = 3, out: Path | None = None
) -> None:
    """Print the medians of all sides, and the ratios last.

    Args:
        samples: Samples in the data set.
        batch_size: Samples in a batch.
        workers: Worker processes of the DataLoader.
        rounds: Runs of each side.
        out: Write the figures here as JSON.
    """
    # One thread reads on our side; the other side's workers are processes of their own.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_made_up_set(Path(folder) / "native", drawn_lengths(np.random.default_rng(0), samples))
        native = open_dataset(Path(folder) / "native")
        varlength = convert(native, Path(folder) / "varlength", "varlength")
        paths = [varlength.folder / record.name for record in varlength.shards]
        some = min(samples, 8000)  # of the slowest side
        # Names are in the order in which the ratios below take their medians.
        sides: dict[str, tuple[int, Callable[[int], Iterator[object]]]] = {
            "DataLoader, a sample at a time from the file": (
                some,
                lambda seed: _from_file(paths, some, batch_size, workers, seed),
            ),
            "DataLoader, shards loaded into memory": (
                samples,
                lambda seed: _from_memory(paths, batch_size, workers, seed),
            ),
            "dataloading, native": (samples, lambda seed: _ours(native.folder, batch_size, seed)),
            "dataloading, varlength in place": (samples, lambda seed: _ours(varlength.folder, batch_size, seed)),
        }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(rounds + 1):
            for name, (count, batches) in sides.items():
                # Opening and verification are inside, as at the start of a run.
                started = time.perf_counter()
                for _ in batches(turn):
                    pass
                if turn:  # the first round fills the system's cache
                    rates[name].append(count / (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(f"{name}: median {medians[name]:,.0f} samples/s of {rounds} ({min(values):,.0f} to {max(values):,.0f})")
    first, second, ours, in_place = medians.values()
    if out:
        figures = {"samples": samples, "batch_size": batch_size, "workers": workers, "samples_per_s": rates}
        write_figures(out, figures, ("torch", "h5py", "numpy"))
    print(
        f"varlength in place: {in_place / first:.1f}x of a sample at a time, {in_place / second:.1f}x of shards in memory"
    )
    print(f"native: {ours / first:.1f}x of a sample at a time, {ours / second:.1f}x of shards in memory")


def _ours(folder: Path, batch_size: int, seed: int) -> Iterator[object]:
    dataset = open_dataset(folder)
    order = np.random.default_rng(seed).permutation(len(dataset))
    for start in range(0, len(order), batch_size):
        yield batch_of(dataset.take(order[start : start + batch_size]))


class _Rows(TorchDataset):
    """Padded samples, one at a time; ``columns`` are open datasets of a file, or arrays of objects in memory."""

    def __init__(self, paths: list[Path], in_memory: bool) -> None:
        self._paths = paths
        self._in_memory = in_memory
        self._files: list[dict[str, h5py.Dataset | np.ndarray]] = []
        sizes = []
        for path in paths:
            with h5py.File(path) as file:
                labels = file["next_sentence_labels"]
                assert isinstance(labels, h5py.Dataset)
                sizes.append(len(labels))
        # First row of each shard in the count over all shards.
        self._firsts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        # In the worker that reads: what HDF5 has open does not survive a fork.
        if not self._files:
            self._open()
        shard = int(np.searchsorted(self._firsts, index, side="right")) - 1
        columns, row = self._files[shard], index - int(self._firsts[shard])
        # Padded in the data set: so it is in the submissions, and part of their time.
        input_ids, segment_ids, input_mask, labels = np.zeros((4, MAX_SEQ_LENGTH), np.int64)
        length = len(columns["input_ids"][row])
        input_ids[:length] = columns["input_ids"][row]
        segment_ids[:length] = columns["segment_ids"][row]
        input_mask[:length] = 1
        labels[columns["masked_lm_positions"][row]] = columns["masked_lm_ids"][row]
        next_sentence_label = np.asarray(columns["next_sentence_labels"][row], np.int64)
        return [torch.from_numpy(array) for array in (input_ids, segment_ids, input_mask, labels, next_sentence_label)]

    def _open(self) -> None:
        for path in self._paths:
            file = h5py.File(path)
            self._files.append({name: file[name] for name in COLUMNS})  # pyright: ignore[reportArgumentType]
            if self._in_memory:
                self._files[-1] = {name: np.asarray(column[()]) for name, column in self._files[-1].items()}


def _from_file(paths: list[Path], count: int, batch_size: int, workers: int, seed: int) -> Iterator[object]:
    rows = _Rows(paths, in_memory=False)
    order = np.random.default_rng(seed).permutation(len(rows))[:count].tolist()
    yield from DataLoader(rows, batch_size=batch_size, sampler=order, num_workers=workers)


def _from_memory(paths: list[Path], batch_size: int, workers: int, seed: int) -> Iterator[object]:
    """Shard after shard, each in an order of its own."""
    rows = _Rows(paths, in_memory=True)
    order = np.random.default_rng(seed)
    for index, (first, stop) in enumerate(pairwise(rows._firsts.tolist())):
        shard = _Rows(paths[index : index + 1], in_memory=True)
        shard._open()
        yield from DataLoader(
            shard, batch_size=batch_size, sampler=order.permutation(stop - first).tolist(), num_workers=workers
        )


if __name__ == "__main__":
    tyro.cli(main)
