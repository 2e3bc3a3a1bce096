"""Conversion of a data set to the native layout, or to packs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataloading.batches.packing import Packs, stream_packs
from dataloading.dataset.folder import Dataset, new_folder, open_dataset
from dataloading.dataset.manifest import shard_name
from dataloading.dataset.scan import index_shards
from dataloading.jobs import begun, run_tasks
from dataloading.shards.formats import whole_shard
from dataloading.shards.native import write_shard
from dataloading.shards.ragged import write_packed

JOB_NAME = "convert.json"


def convert(source: Dataset, out: Path, *, jobs: int = 1, report: Callable[[str], None] = lambda _: None) -> Dataset:
    """Convert each shard of ``source`` to a native shard with the same samples, in ``jobs`` processes.

    An interrupted conversion is continued: existing shards with the right samples are kept. ``report`` is called with the
    name of each finished shard.

    Raises:
        ValueError: ``out`` holds other files, or a shard is damaged.
    """
    count = len(source.shards)
    tasks: list[_Task] = [(source, index, out / shard_name(index, count)) for index in range(count)]
    # The source is described by its digests, because its folder may hold other data when the job continues.
    description = {"source": [record.digest for record in source.shards]}
    with begun(out, JOB_NAME, description, finished="part_*"):
        for name in run_tasks(_convert_shard, tasks, jobs):
            report(name)
        dataset = index_shards(out, [path.name for _, _, path in tasks], source.info)
    # Deleted only after success, because a failed conversion needs the file to continue.
    (out / JOB_NAME).unlink()
    return dataset


def convert_to_packed(
    source: Dataset, out: Path, *, max_sequences: int, seed: int, report: Callable[[str], None] = lambda _: None
) -> Dataset:
    """Write the samples of ``source`` as packs of at most ``max_sequences`` samples and ``max_seq_length`` tokens.

    The samples of each pack and the order of the packs are random. Raises the same errors as `convert`, and ``ValueError``
    if the samples do not fit the layout. An interrupted conversion starts again.
    """
    count = len(source.shards)

    def planned() -> Iterator[Packs]:
        return stream_packs(source.lengths, source.info.max_seq_length, max_sequences, seed)

    # The packs are planned twice. The first plan only counts them, so that no plan has to be kept in memory.
    bounds = np.linspace(0, sum(len(packs) for packs in planned()), count + 1).astype(np.int64)
    names = [shard_name(index, count) for index in range(count)]
    with new_folder(out) as aside:
        for name, (samples, offsets) in zip(names, _cut(planned(), bounds), strict=True):
            write_packed(aside / name, source.take(samples), offsets, source.info)
            report(name)
        index_shards(aside, names, source.info)
    return open_dataset(out)


def _cut(windows: Iterator[Packs], bounds: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each i, yield the samples and offsets of packs ``bounds[i]`` to ``bounds[i + 1]``."""
    samples, lengths = np.empty(0, np.int64), np.empty(0, np.int64)
    for wanted in np.diff(bounds).tolist():
        while len(lengths) < wanted:
            window = next(windows)
            samples = np.concatenate([samples, window.samples])
            lengths = np.concatenate([lengths, np.diff(window.offsets)])
        offsets = np.concatenate([[0], np.cumsum(lengths[:wanted])]).astype(np.int64)
        yield samples[: offsets[-1]], offsets
        samples, lengths = samples[offsets[-1] :], lengths[wanted:]


_Task = tuple[Dataset, int, Path]


def _convert_shard(task: _Task) -> str:
    """Write one shard unless it exists; return its name."""
    source, index, path = task
    digest = source.shards[index].digest
    if whole_shard(path, digest) is None:
        samples = source.open_listed(index).verify(digest)
        # The manifest lists the source texts of all shards.
        write_shard(path, samples, source.info.without_sources())
    return path.name
