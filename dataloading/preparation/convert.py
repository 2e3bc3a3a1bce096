"""Conversion of a data set to native shards or to packs, shard by shard, in several processes."""

from functools import partial
from pathlib import Path

import numpy as np

from dataloading.batches.packing import pack_samples
from dataloading.dataset.folder import Dataset, index_shards, shard_name
from dataloading.jobs import Made, Report, begun, make_files
from dataloading.options import Layout
from dataloading.shards.formats import whole_shard, write_shard
from dataloading.shards.hdf5_layouts import write_packed

JOB_NAME = "convert.json"


def convert(
    source: Dataset,
    out: Path,
    to: Layout,
    *,
    max_sequences: int = 3,
    seed: int = 24,
    jobs: int = 1,
    report: Report = lambda _: None,
) -> Dataset:
    """Convert each shard of ``source`` to a native or packed shard with the same samples.

    Native shards keep the order of the samples. The samples of each pack and the order of the packs are random within
    their shard, and determined by ``seed``. A pack has at most ``max_sequences`` samples and ``max_seq_length`` tokens. An
    interrupted conversion is continued: existing shards with the right samples are kept.
    """
    names = [shard_name(index, len(source.shards)) for index in range(len(source.shards))]
    # The processes get the source without its length index, which may be large.
    shards = Dataset(source.folder, source.info, source.shards, np.empty((0, 2), np.uint16))
    # The source is described by its digests, because its folder may hold other data when the job continues.
    description = {"source": [record.digest for record in source.shards], "to": to}
    description |= {"max_sequences": max_sequences, "seed": seed}
    with begun(out, JOB_NAME, description, finished="part_*"):
        make_files(partial(_convert_shard, shards, out, to, max_sequences, seed), range(len(names)), jobs, report)
        dataset = index_shards(out, names, source.info)
    # Deleted only after success, because a failed conversion needs the file to continue.
    (out / JOB_NAME).unlink()
    return dataset


def _convert_shard(source: Dataset, out: Path, to: Layout, max_sequences: int, seed: int, index: int) -> Made:
    samples = source.open_listed(index).verify(source.shards[index].digest)
    # The manifest lists the source texts of all shards.
    info = source.info.without_sources()
    write, path = write_shard, out / shard_name(index, len(source.shards))
    if to == "packed":
        packs = pack_samples(samples.lengths, info.max_seq_length, max_sequences, [seed, index])
        samples, write = samples.take(packs.samples), partial(write_packed, pack_offsets=packs.offsets)
    kept = whole_shard(path, samples.digest()) is not None
    if not kept:
        write(path, samples, info=info)
    return path.name, len(samples), kept
