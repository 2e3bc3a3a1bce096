"""A data set's samples in uniformly random order, over any number of shards, in bounded memory.

Two passes over the disk (Sandelius 1962; Rao 1961): each sample is thrown into one of B buckets at random, and then each
bucket, small enough for memory, is permuted. The buckets one after another are a uniformly random permutation of the whole,
and shards are cut from that stream wherever they end. Everything follows from (seed, data set), so a pass that was stopped
can be taken up again: the buckets once they are complete, and the shards one by one.

    OUT/shuffle.json          what is being made
    OUT/buckets/00042         the samples of a bucket, in the order met; deleted at the end
    OUT/part_00000_of_04320.hdf5 ... manifest.json, lengths.npy
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from console.files import read_json, write_atomically
from dataloading.dataset.folder import Dataset
from dataloading.dataset.manifest import shard_name
from dataloading.dataset.merge import index_shards
from dataloading.jobs import begun
from dataloading.options import Compression
from dataloading.shards.formats import whole_shard
from dataloading.shards.native import write_shard
from dataloading.shards.samples import Samples, concatenate, offsets_of
from dataloading.shards.shard import REMEDY, DatasetInfo

MEMORY_LIMIT = 2 << 30
"""Bytes that a shuffle stays below, whatever the size of the data set, as the system counts them."""

JOB_NAME = "shuffle.json"
BUCKETS_NAME = "buckets"

# One bucket is held at a time, beside the shard that is being made; the buffer only while buckets are filled.
_BUCKET_BYTES = 192 << 20
_BUFFERED_BYTES = 192 << 20
_SHARD_BYTES = 256 << 20
"""A shard is held three times while it is written: gathered, composed, and checked."""

_MAX_BUCKETS = 8192
_BLOCK_SAMPLES = 1 << 15
_BLOCK_ARRAYS = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")


@dataclass(frozen=True)
class ShuffleProgress:
    """Progress of a shuffle, for whoever waits."""

    step: str
    """``read`` while samples are thrown into buckets, ``written`` while shards are made, ``checked`` while they are read."""
    done: int
    total: int
    """Samples in all."""


def shuffle(
    source: Dataset,
    out: Path,
    *,
    shards: int,
    seed: int,
    compression: Compression = "none",
    report: Callable[[ShuffleProgress], None] = lambda _: None,
) -> Dataset:
    """Write the samples of ``source`` in random order to ``shards`` shards in ``out``; goes on where it was stopped.

    Takes as much disk as the result for the time being, and less than ``MEMORY_LIMIT`` bytes of memory. Every sample comes
    exactly once, which is checked by the digests of both multisets at the end.

    Raises:
        ValueError: the shards would be too large for memory, or empty; ``out`` holds something else; a source is damaged.
        OSError: the disk is full, or will not be written for another reason.
    """
    _check_shards(source, shards)
    buckets = _bucket_count(source)
    settings = {"shards": shards, "seed": seed, "compression": compression, "buckets": buckets}
    # With the number of buckets, which follows from bounds of this program: buckets of another number are of no use.
    description = {"info": asdict(source.info), "source": [record.digest for record in source.shards]} | settings
    with begun(out, JOB_NAME, description, finished=f"{BUCKETS_NAME}/*"):
        spill = out / BUCKETS_NAME
        if not (spill / "complete.json").exists():
            _fill_buckets(source, spill, buckets, seed, report)
        complete = read_json(spill / "complete.json", 1 << 24, "delete the folder and begin again")
        _write_shards(source.info, out, complete["samples"], shards, seed, compression, report)
        dataset = index_shards(out, [shard_name(index, shards) for index in range(shards)], source.info)
        _check_multiset(dataset, complete["digest"], report)
    # Buckets first: without the job's file nobody would know whose they are.
    shutil.rmtree(spill)
    (out / JOB_NAME).unlink()
    return dataset


def multiset_digest(blocks: Iterable[Samples]) -> int:
    """Sum of the samples' digests modulo 2^64: equal for the same samples in any order."""
    return sum(int(block.sample_digests().sum(dtype=np.uint64)) for block in blocks) % (1 << 64)


def _check_shards(source: Dataset, shards: int) -> None:
    if not 1 <= shards <= len(source):
        raise ValueError(f"shards is {shards} for {len(source):,} samples; expected 1 to the number of samples")
    size = _stored_bytes(source)
    least = -(-size // _SHARD_BYTES)
    if shards < least:
        raise ValueError(
            f"shards is {shards}: each would hold {size / shards / 1e6:,.0f} MB, more than the {_SHARD_BYTES >> 20} MiB "
            f"for which there is memory; expected at least {least}"
        )


def _stored_bytes(source: Dataset) -> int:
    """Bytes of all samples in flat arrays."""
    tokens = sum(record.tokens for record in source.shards)
    masked = sum(record.masked_tokens for record in source.shards)
    # An id of two bytes and a segment a token, a position and an id a masked one.
    return 3 * tokens + 4 * masked + 17 * len(source)  # two offsets of 8 bytes and a label a sample


def _bucket_count(source: Dataset) -> int:
    count = max(1, -(-_stored_bytes(source) // _BUCKET_BYTES))
    if count > _MAX_BUCKETS:
        raise ValueError(f"{source.folder}: {_stored_bytes(source) / 1e12:.1f} TB do not fit {_MAX_BUCKETS:,} buckets")
    return count


def _fill_buckets(
    source: Dataset, spill: Path, buckets: int, seed: int, report: Callable[[ShuffleProgress], None]
) -> None:
    """First pass: every sample to the end of a bucket that is drawn for it."""
    # Buckets without complete.json are those of a pass that was stopped.
    shutil.rmtree(spill, ignore_errors=True)
    spill.mkdir()
    files = _BucketFiles(spill, buckets)
    rng = np.random.default_rng([seed, 0])
    done = digest = 0
    counts = np.zeros(buckets, np.int64)
    for block in source.blocks(_BLOCK_SAMPLES):
        digest += multiset_digest([block])
        bucket_of = rng.integers(0, buckets, len(block))
        drawn = np.bincount(bucket_of, minlength=buckets)
        sorted_block = block.take(np.argsort(bucket_of, kind="stable"))  # each bucket's in one piece
        ends = offsets_of(drawn)
        for bucket in np.flatnonzero(drawn).tolist():
            files.append(bucket, sorted_block.slice(int(ends[bucket]), int(ends[bucket + 1])))
        counts += drawn
        done += len(block)
        report(ShuffleProgress("read", done, len(source)))
    files.flush()
    complete = {"samples": counts.tolist(), "digest": digest % (1 << 64)}
    # Last: with it there, whoever goes on takes the buckets for whole.
    write_atomically(spill / "complete.json", json.dumps(complete).encode())


def _write_shards(
    info: DatasetInfo,
    out: Path,
    counts: list[int],
    shards: int,
    seed: int,
    compression: Compression,
    report: Callable[[ShuffleProgress], None],
) -> None:
    """Second pass: shards cut from the permuted buckets, one after another."""
    firsts = offsets_of(np.array(counts))
    bounds = np.linspace(0, firsts[-1], shards + 1).astype(np.int64)
    info = info.without_sources()
    bucket, permuted = -1, None
    for index in range(shards):
        path = out / shard_name(index, shards)
        start, stop = int(bounds[index]), int(bounds[index + 1])
        if whole_shard(path) != (info, stop - start):  # seed and source are the same, or `begun` had refused
            pieces = []
            while start < stop:
                # side: an empty bucket begins where the next one does, which has the sample.
                needed = int(np.searchsorted(firsts, start, side="right")) - 1
                if needed != bucket or permuted is None:
                    permuted = None  # two buckets do not fit
                    bucket, permuted = needed, _permuted(out / BUCKETS_NAME, needed, counts[needed], seed)
                end = min(stop, int(firsts[bucket + 1]))
                rows = permuted[1][start - int(firsts[bucket]) : end - int(firsts[bucket])]
                pieces.append(permuted[0].take(rows))
                start = end
            write_shard(path, concatenate(pieces), info, compression)
        report(ShuffleProgress("written", stop, int(firsts[-1])))


def _permuted(spill: Path, bucket: int, count: int, seed: int) -> tuple[Samples, NDArray[np.int64]]:
    """A bucket's samples, and a random order of them."""
    samples = _read_bucket(spill / f"{bucket:05d}")
    # The numbers were taken while it was filled; since then the file may have been cut short.
    if len(samples) != count:
        raise ValueError(f"{spill}: bucket {bucket} holds {len(samples):,} of {count:,} samples; delete the folder")
    # A stream of numbers for each bucket: whoever goes on needs no bucket whose shards are there.
    return samples, np.random.default_rng([seed, 1, bucket]).permutation(count)


def _check_multiset(dataset: Dataset, expected: int, report: Callable[[ShuffleProgress], None]) -> None:
    """Read the result and compare its samples with those of the source."""

    def watched() -> Iterator[Samples]:
        done = 0
        for block in dataset.blocks(_BLOCK_SAMPLES):
            yield block
            done += len(block)
            report(ShuffleProgress("checked", done, len(dataset)))

    if (found := multiset_digest(watched())) != expected:
        raise ValueError(
            f"{dataset.folder}: its samples are not those of the source ({found:x}, {expected:x}); {REMEDY}"
        )


class _BucketFiles:
    """Files that blocks of samples are appended to, many at a time, through one bounded buffer."""

    def __init__(self, folder: Path, count: int) -> None:
        self._paths = [folder / f"{bucket:05d}" for bucket in range(count)]
        self._waiting: list[list[bytes]] = [[] for _ in range(count)]
        self._sizes = [0] * count
        # In equal shares: samples are thrown at random, so that buckets fill at one rate.
        self._most = _BUFFERED_BYTES // count
        # A bucket that no sample falls into is read like the others.
        for path in self._paths:
            path.touch()

    def append(self, bucket: int, samples: Samples) -> None:
        """Add samples to the end of a bucket."""
        # How much of each kind follows, as nothing in the block marks its parts.
        header = np.array([len(samples), len(samples.input_ids), len(samples.masked_lm_ids)], "<i8")
        parts = [
            header,
            samples.lengths.astype("<u2"),
            samples.masked_counts.astype("<u2"),
            samples.next_sentence_labels,
        ]
        # Bytes of its own: slices would keep their whole block in memory.
        block = b"".join(part.tobytes() for part in (*parts, *(getattr(samples, name) for name in _BLOCK_ARRAYS)))
        self._waiting[bucket].append(block)
        self._sizes[bucket] += len(block)
        if self._sizes[bucket] > self._most:
            self._write(bucket)

    def flush(self) -> None:
        """Write what waits."""
        for bucket in range(len(self._paths)):
            self._write(bucket)

    def _write(self, bucket: int) -> None:
        with self._paths[bucket].open("ab") as file:  # opened each time: there may be more buckets than descriptors
            file.writelines(self._waiting[bucket])
        self._waiting[bucket] = []
        self._sizes[bucket] = 0


def _read_bucket(path: Path) -> Samples:
    """All samples of a bucket, in the order in which they were appended."""
    content = np.fromfile(path, np.uint8)
    blocks = []
    place = 0

    def next_array(dtype: str, count: int) -> NDArray[Any]:
        nonlocal place
        size = np.dtype(dtype).itemsize * count
        values = np.frombuffer(content[place : place + size].data, dtype)
        place += size
        return values

    while place < len(content):
        count, tokens, masked = next_array("<i8", 3).tolist()
        lengths, masked_counts = (next_array("<u2", count) for _ in range(2))
        # In the order in which `append` wrote them.
        labels = next_array("u1", count)
        arrays = {
            name: next_array("u1" if name == "segment_ids" else "<u2", tokens if index < 2 else masked)
            for index, name in enumerate(_BLOCK_ARRAYS)
        }
        blocks.append(
            Samples(
                **arrays,
                sequence_offsets=offsets_of(lengths),
                masked_lm_offsets=offsets_of(masked_counts),
                next_sentence_labels=labels,
            )
        )
    return concatenate(blocks)
