"""Rewriting of a data set: shuffling, and conversion to another layout. Both can continue after an interruption.

A shuffle brings the samples into uniformly random order, with any number of shards and bounded memory. Its algorithm makes
two passes over the disk (Sandelius 1962; Rao 1961). Each sample is appended to a random one of B buckets; then each bucket,
which fits into memory, is permuted. The concatenated buckets are a uniformly random permutation of the whole set and are
divided into shards. The result depends only on (seed, data set).

    OUT/shuffle.json          description of the job
    OUT/buckets/00042         the samples of a bucket in the order of the source; deleted at the end
    OUT/part_00000_of_04320.hdf5 ... manifest.json, lengths.npy
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from console.files import read_json, write_atomically
from console.text import counted
from dataloading.batches.packing import pack_samples
from dataloading.dataset.folder import Dataset, index_shards, shard_name
from dataloading.jobs import Made, Report, begun, make_files
from dataloading.options import Layout
from dataloading.shards.formats import whole_shard, write_shard
from dataloading.shards.hdf5_layouts import write_packed
from dataloading.shards.samples import Samples, concatenate, offsets_of
from dataloading.shards.shard import REMEDY, DatasetInfo

SHUFFLE_JOB = "shuffle.json"
BUCKETS_NAME = "buckets"
_CONVERT_JOB = "convert.json"

# One bucket and one shard are in memory at a time. Together with the buffers, a shuffle needs less than 2 GiB.
_BUCKET_BYTES = 192 << 20
_BUFFERED_BYTES = 192 << 20
_SHARD_BYTES = 256 << 20
"""Maximum size of a shard in bytes. While a shard is written, its samples are in memory three times: as arrays, as the
file's image, and for the check."""
_BLOCK_SAMPLES = 1 << 15

STEPS = ("read", "written", "checked")
"""Steps of a shuffle. Each step processes all samples."""

StepReport = Callable[[str, int, int], None]
"""Function that is called with a step, the number of samples that it has processed, and the total number of samples."""


def shuffle(source: Dataset, out: Path, *, shards: int, seed: int, report: StepReport = lambda *_: None) -> Dataset:
    """Write the samples of ``source`` in random order to ``shards`` shards in ``out``. Continues an interrupted shuffle.

    A shuffle needs as much temporary disk space as its result. At the end, a digest of the result is compared with the
    source's digest, to check that no sample was lost or changed.
    """
    least = max(1, -(-_stored_bytes(source) // _SHARD_BYTES))
    if not least <= shards <= len(source):
        raise ValueError(
            f"--shards is {shards} for {counted(len(source), 'sample')}; expected {least} or more, so that a shard fits "
            "into memory, and at most the number of samples"
        )
    buckets = -(-_stored_bytes(source) // _BUCKET_BYTES)
    settings = {"shards": shards, "seed": seed, "buckets": buckets}
    description = {"info": asdict(source.info), "source": [record.digest for record in source.shards]} | settings
    with begun(out, SHUFFLE_JOB, description, finished=f"{BUCKETS_NAME}/*"):
        spill = out / BUCKETS_NAME
        if not (spill / "complete.json").exists():
            _fill_buckets(source, spill, buckets, seed, report)
        complete = read_json(spill / "complete.json", 1 << 24, "delete the folder and begin again")
        _write_shards(source.info.without_sources(), out, complete["samples"], shards, seed, report)
        dataset = index_shards(out, [shard_name(index, shards) for index in range(shards)], source.info)
        found = multiset_digest(_reported(dataset, report))
        if found != complete["digest"]:
            raise ValueError(f"{out}: its samples differ from the samples of {source.folder}; {REMEDY}")
    # Delete the buckets before the job's file, which identifies them.
    shutil.rmtree(spill)
    (out / SHUFFLE_JOB).unlink()
    return dataset


def multiset_digest(blocks: Iterable[Samples]) -> int:
    """Return the sum of the samples' digests modulo 2^64, which does not depend on the order of the samples."""
    return sum(int(block.sample_digests().sum(dtype=np.uint64)) for block in blocks) % (1 << 64)


def _stored_bytes(source: Dataset) -> int:
    tokens = sum(record.tokens for record in source.shards)
    masked = sum(record.masked_tokens for record in source.shards)
    # A token has an id of 2 bytes and a segment id of 1 byte. A masked token has an id and a position of 2 bytes each.
    # A sample has two offsets of 8 bytes and a label of 1 byte.
    return 3 * tokens + 4 * masked + 17 * len(source)


def _fill_buckets(source: Dataset, spill: Path, buckets: int, seed: int, report: StepReport) -> None:
    # Delete existing buckets: without complete.json, they are left over from an interrupted attempt.
    shutil.rmtree(spill, ignore_errors=True)
    spill.mkdir()
    waiting: list[list[Samples]] = [[] for _ in range(buckets)]
    rng = np.random.default_rng([seed, 0])
    done = digest = 0
    counts = np.zeros(buckets, np.int64)
    for block in source.blocks(_BLOCK_SAMPLES):
        digest += multiset_digest([block])
        bucket_of = rng.integers(0, buckets, len(block))
        drawn = np.bincount(bucket_of, minlength=buckets)
        rows_by_bucket = np.split(np.argsort(bucket_of, kind="stable"), np.cumsum(drawn)[:-1])
        for bucket, rows in enumerate(rows_by_bucket):
            waiting[bucket].append(block.take(rows))  # take() copies; a slice would keep the whole block in memory
            if sum(each.nbytes for each in waiting[bucket]) > _BUFFERED_BYTES // buckets:
                _append(spill, bucket, waiting[bucket])
        counts += drawn
        done += len(block)
        report("read", done, len(source))
    for bucket in range(buckets):
        _append(spill, bucket, waiting[bucket])
    complete = {"samples": counts.tolist(), "digest": digest % (1 << 64)}
    # This file is written last, because it marks the buckets as complete.
    write_atomically(spill / "complete.json", json.dumps(complete).encode())


def _append(spill: Path, bucket: int, waiting: list[Samples]) -> None:
    """Append samples to a bucket's file, one array after another, and clear the list."""
    # Open the file for each write, because there may be more buckets than descriptors.
    with (spill / f"{bucket:05d}").open("ab") as file:
        if waiting:
            block = concatenate(waiting)
            for field in fields(block):
                np.save(file, getattr(block, field.name), allow_pickle=False)
    waiting.clear()


def _write_shards(info: DatasetInfo, out: Path, counts: list[int], shards: int, seed: int, report: StepReport) -> None:
    firsts = offsets_of(np.array(counts))
    bounds = np.linspace(0, firsts[-1], shards + 1).astype(np.int64)
    bucket, permuted = -1, None
    for index in range(shards):
        path = out / shard_name(index, shards)
        start, stop = int(bounds[index]), int(bounds[index + 1])
        # Keep a finished shard of the right size: `begun` has checked that seed and source have not changed.
        if whole_shard(path) != (info, stop - start):
            pieces = []
            while start < stop:
                # side="right" skips empty buckets: one has the same start as the next bucket, which has the sample.
                needed = int(np.searchsorted(firsts, start, side="right")) - 1
                if needed != bucket or permuted is None:
                    permuted = None  # frees the bucket before the next one is read
                    bucket, permuted = needed, _permuted(out / BUCKETS_NAME / f"{needed:05d}", seed)
                end = min(stop, int(firsts[bucket + 1]))
                rows = permuted[1][start - int(firsts[bucket]) : end - int(firsts[bucket])]
                pieces.append(permuted[0].take(rows))
                start = end
            write_shard(path, concatenate(pieces), info)
        report("written", stop, int(firsts[-1]))


def _permuted(path: Path, seed: int) -> tuple[Samples, NDArray[np.int64]]:
    """Read a bucket's file, and return its samples and a random permutation of their numbers."""
    blocks = []
    with path.open("rb") as file:
        while file.tell() < path.stat().st_size:
            blocks.append(Samples(**{field.name: np.load(file, allow_pickle=False) for field in fields(Samples)}))
    samples = concatenate(blocks)
    # Each bucket has a separate random generator, so that a continued shuffle can skip buckets whose shards are complete.
    return samples, np.random.default_rng([seed, 1, int(path.name)]).permutation(len(samples))


def _reported(dataset: Dataset, report: StepReport) -> Iterator[Samples]:
    done = 0
    for block in dataset.blocks(_BLOCK_SAMPLES):
        yield block
        done += len(block)
        report("checked", done, len(dataset))


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
    # Pass the source without its length index, which the processes do not need and which takes memory.
    shards = Dataset(source.folder, source.info, source.shards, np.empty((0, 2), np.uint16))
    # Describe the source by its digests: its folder may hold other data when the job continues.
    description = {"source": [record.digest for record in source.shards], "to": to}
    description |= {"max_sequences": max_sequences, "seed": seed}
    with begun(out, _CONVERT_JOB, description, finished="part_*"):
        make_files(partial(_convert_shard, shards, out, to, max_sequences, seed), range(len(names)), jobs, report)
        dataset = index_shards(out, names, source.info)
    # Deleted only after success, because a failed conversion needs the file to continue.
    (out / _CONVERT_JOB).unlink()
    return dataset


def _convert_shard(source: Dataset, out: Path, to: Layout, max_sequences: int, seed: int, index: int) -> Made:
    samples = source.open_listed(index).verify(source.shards[index].digest)
    # Leave out the source texts, because the manifest lists them for all shards.
    info = source.info.without_sources()
    write, path = write_shard, out / shard_name(index, len(source.shards))
    if to == "packed":
        packs = pack_samples(samples.lengths, info.max_seq_length, max_sequences, [seed, index])
        samples, write = samples.take(packs.samples), partial(write_packed, pack_offsets=packs.offsets)
    kept = whole_shard(path, samples.digest()) is not None
    if not kept:
        write(path, samples, info=info)
    return path.name, len(samples), kept
