"""A data set from one layout to another, in several processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataloading.batches.packing import Packs, stream_packs
from dataloading.dataset.folder import Dataset, new_folder, open_dataset
from dataloading.dataset.manifest import shard_name
from dataloading.dataset.merge import index_shards
from dataloading.jobs import begun, run_tasks
from dataloading.options import Compression, Layout
from dataloading.shards.formats import whole_shard
from dataloading.shards.layouts import write_fixed, write_packed, write_varlength
from dataloading.shards.native import write_shard

JOB_NAME = "convert.json"


def convert(
    source: Dataset,
    out: Path,
    layout: Layout,
    *,
    compression: Compression = "none",
    jobs: int = 1,
    report: Callable[[str], None] = lambda _: None,
) -> Dataset:
    """Write the samples of ``source`` to shards of another layout, one for each of its own, in their order.

    A conversion that was stopped goes on: shards that are there and hold the right samples are kept. ``report`` is called
    with each shard's name.

    Raises:
        ValueError: ``out`` holds something else, the samples do not fit the layout, or a shard is damaged.
    """
    count = len(source.shards)
    tasks: list[_Task] = [
        (source, index, out / shard_name(index, count), layout, compression) for index in range(count)
    ]
    # By its digests, as the folder may hold other data when the job goes on.
    description = {"source": [record.digest for record in source.shards], "to": layout, "compression": compression}
    with begun(out, JOB_NAME, description, finished="part_*"):
        for name in run_tasks(_convert_shard, tasks, jobs):
            report(name)
        dataset = index_shards(out, [path.name for _, _, path, _, _ in tasks], source.info)
    # After the block, since a conversion that fails keeps it and can go on.
    (out / JOB_NAME).unlink()
    return dataset


def convert_to_packed(
    source: Dataset, out: Path, *, max_sequences: int, seed: int, report: Callable[[str], None] = lambda _: None
) -> Dataset:
    """Write the samples of ``source`` as packs of at most ``max_sequences`` samples and ``max_seq_length`` tokens.

    Which samples share a pack is random, and so is the order of the packs. Errors as in `convert`; a conversion that was
    stopped begins again.
    """
    count = len(source.shards)

    def planned() -> Iterator[Packs]:
        return stream_packs([source.lengths], source.info.max_seq_length, max_sequences, seed)

    # Planned twice, so that the number of packs is known before the first is written and no plan has to be kept.
    bounds = np.linspace(0, sum(len(packs) for packs in planned()), count + 1).astype(np.int64)
    names = [shard_name(index, count) for index in range(count)]
    with new_folder(out) as aside:
        for name, (samples, offsets) in zip(names, _cut(planned(), bounds), strict=True):
            write_packed(aside / name, source.take(samples), offsets, source.info)
            report(name)
        index_shards(aside, names, source.info)
    return open_dataset(out)


def _cut(windows: Iterator[Packs], bounds: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The samples and offsets of packs ``bounds[i]`` to ``bounds[i + 1]``, for each i."""
    samples, lengths = np.empty(0, np.int64), np.empty(0, np.int64)
    for wanted in np.diff(bounds).tolist():
        while len(lengths) < wanted:
            window = next(windows)
            samples = np.concatenate([samples, window.samples])
            lengths = np.concatenate([lengths, np.diff(window.offsets)])
        offsets = np.concatenate([[0], np.cumsum(lengths[:wanted])]).astype(np.int64)
        yield samples[: offsets[-1]], offsets
        # What a window has left is the beginning of the next shard.
        samples, lengths = samples[offsets[-1] :], lengths[wanted:]


_Task = tuple[Dataset, int, Path, Layout, Compression]


def _convert_shard(task: _Task) -> str:
    """Write one shard, unless it is there, and return its name."""
    source, index, path, layout, compression = task
    if whole_shard(path, source.shards[index].digest) is None:
        with source.open_listed(index) as shard:
            samples = shard.verify(source.shards[index].digest)
            if layout == "native":
                # Which of the texts made which shard is not known any more; the manifest names all of them.
                write_shard(path, samples, source.info.without_sources(), compression)
            else:
                (write_fixed if layout == "fixed" else write_varlength)(path, samples, source.info)
    return path.name
