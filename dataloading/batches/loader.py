"""Plan to ``Batch``: the flat token stream of one rank's micro-batch, assembled ahead of time.

Shape legend: slots for T tokens, S sequences, M masked tokens of the micro-batch; unless padded, as many as there are.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataloading.batches.sampler import MicroBatch
from dataloading.batches.shape_buckets import ShapeBucket, fitting
from dataloading.shards.samples import SampleBuilder, Samples

Item = TypeVar("Item")
RankBatches = Callable[[int], list[MicroBatch]]
"""Gives a rank's micro-batches of a step."""


@dataclass(frozen=True)
class Batch:
    """Sequences one after another in one flat stream; no padding rows between them.

    A batch of some ``ShapeBucket`` has inert slots at the ends, which nothing in the model asks about: ids are 0, labels -1,
    ``cu_seqlens`` repeats its last value, and ``masked_lm_positions`` points at the first row that no sequence owns.
    """

    input_ids: Tensor
    """int64 [T]"""
    segment_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], restarting at 0 in every sequence."""
    cu_seqlens: Tensor
    """int32 [S + 1], where each sequence starts; attention never crosses a boundary."""
    masked_lm_positions: Tensor
    """int64 [M], indices into the flat stream, ascending."""
    masked_lm_ids: Tensor
    """int64 [M], -1 in empty slots"""
    next_sentence_labels: Tensor
    """int64 [S], -1 in empty slots"""
    global_counts: Tensor
    """int64 [2], sequences and masked tokens of the whole global batch, over all ranks and accumulation steps."""
    max_seqlen: int
    """No sequence is longer."""

    @property
    def tokens(self) -> int:
        """Token slots of this micro-batch; ``cu_seqlens[-1]`` of them are real."""
        return self.input_ids.numel()

    @property
    def sequences(self) -> int:
        """Sequence slots of this micro-batch."""
        return self.next_sentence_labels.numel()

    @property
    def shape_bucket(self) -> ShapeBucket:
        """The shape of this batch: equal for batches that one CUDA graph serves."""
        return ShapeBucket(self.tokens, self.sequences, self.masked_lm_ids.numel(), self.max_seqlen)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> "Batch":
        """The same batch on ``device``; copies from pinned memory do not block the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        """The same batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(self, **{name: change(value) for name, value in self.tensors.items()})


class SampleSource(Protocol):
    """Source that a loader reads: an opened data set, or samples in memory."""

    def take(self, indices: NDArray[np.int64]) -> Samples:
        """The samples at ``indices``, in that order."""
        ...


def shape_bucket_of(
    samples: Samples, shape_buckets: Sequence[ShapeBucket], micro_batch: MicroBatch | None = None
) -> ShapeBucket | None:
    """Choose what a batch of ``samples`` is padded to: the first shape bucket that holds it, or None where none are given.

    With a ``micro_batch`` of a plan, the shape bucket also holds what the other ranks run at the same time. All ranks then
    replay the same graph, as NCCL requires of graphs that contain collectives, and wait for the largest micro-batch anyway.
    A batch that fits none gets one of its own, which nothing was captured for.
    """
    if not shape_buckets:
        return None
    tokens, masked = len(samples.input_ids), len(samples.masked_lm_ids)
    if micro_batch is not None:
        tokens, masked = max(tokens, micro_batch.largest_tokens), max(masked, micro_batch.largest_masked)
    # All shape buckets have one max_seqlen, which only a sample that none of them was made for exceeds.
    longest = max(int(samples.lengths.max()), shape_buckets[-1].max_seqlen)
    return fitting(ShapeBucket.around(tokens, len(samples), masked, longest), shape_buckets)


def flat_arrays(
    samples: Samples, micro_batch: MicroBatch, shape_bucket: ShapeBucket | None = None
) -> dict[str, NDArray[np.generic]]:
    """The tensors of a ``Batch`` as NumPy arrays in the narrow types in which they are moved, padded to ``shape_bucket``."""
    starts = samples.sequence_offsets[:-1]
    lengths = samples.lengths
    arrays = {
        "input_ids": samples.input_ids,
        "segment_ids": samples.segment_ids,
        "position_ids": (np.arange(len(samples.input_ids)) - np.repeat(starts, lengths)).astype(np.uint16),
        "cu_seqlens": samples.sequence_offsets.astype(np.int32),
        # From positions inside samples to places in the stream, where the heads gather their rows.
        "masked_lm_positions": (samples.masked_lm_positions + np.repeat(starts, samples.masked_counts)).astype(
            np.int32
        ),
        "masked_lm_ids": samples.masked_lm_ids.astype(np.int32),
        "next_sentence_labels": samples.next_sentence_labels.astype(np.int8),
        # A tensor and not two numbers: a captured step is replayed with the counts of other batches.
        "global_counts": np.array([micro_batch.global_sequences, micro_batch.global_masked]),
    }
    return arrays if shape_bucket is None else arrays | _padded(arrays, shape_bucket)


def _padded(arrays: dict[str, NDArray[Any]], shape_bucket: ShapeBucket) -> dict[str, NDArray[Any]]:
    tokens = len(arrays["input_ids"])
    # All but global_counts, which has two numbers in any shape bucket.
    slots = {
        "input_ids": (shape_bucket.tokens, 0),
        "segment_ids": (shape_bucket.tokens, 0),
        "position_ids": (shape_bucket.tokens, 0),
        "cu_seqlens": (shape_bucket.sequences + 1, tokens),
        "masked_lm_positions": (shape_bucket.masked, tokens),
        "masked_lm_ids": (shape_bucket.masked, -1),
        "next_sentence_labels": (shape_bucket.sequences, -1),
    }
    assert tokens < shape_bucket.tokens  # the row that empty masked slots point at is there
    return {
        name: np.concatenate([arrays[name], np.full(size - len(arrays[name]), empty, arrays[name].dtype)])
        for name, (size, empty) in slots.items()
    }


def batch_of(samples: Samples, micro_batch: MicroBatch | None = None, shape_bucket: ShapeBucket | None = None) -> Batch:
    """The ``Batch`` of some samples, padded to ``shape_bucket``; without a plan they are a global batch of their own."""
    whole = micro_batch or MicroBatch(np.arange(len(samples)), len(samples), len(samples.masked_lm_ids))
    tensors = {
        # astype() copies, so that no tensor shares its memory with a shard.
        name: torch.from_numpy(array.astype(np.int32 if name == "cu_seqlens" else np.int64))
        for name, array in flat_arrays(samples, whole, shape_bucket).items()
    }
    return Batch(**tensors, max_seqlen=max_seqlen(samples, shape_bucket))


def inert_batch(shape_bucket: ShapeBucket) -> Batch:
    """A batch of empty slots alone: no losses, no gradients. Its counts are 1, which nothing is divided by in earnest."""
    return batch_of(SampleBuilder().samples(), MicroBatch(np.empty(0, np.int64), 1, 1), shape_bucket)


def max_seqlen(samples: Samples, shape_bucket: ShapeBucket | None) -> int:
    """Return that of the batch of ``samples``: the shape bucket's, as it is part of what is captured, or the longest's."""
    return int(samples.lengths.max()) if shape_bucket is None else shape_bucket.max_seqlen


class Loader(Protocol):
    """An endless iterator over optimizer steps; nothing is read before the first ``next()``."""

    def __next__(self) -> list[Batch]:
        """The micro-batches of the next step, on the loader's device."""
        ...

    def close(self) -> None:
        """Stop reading ahead."""
        ...


class Prefetcher(Generic[Item]):
    """Iterator run in a background thread, a bounded number of items ahead; its errors surface in ``next()``."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __next__(self) -> Item:
        """The next item; starts the thread on first use."""
        # Here, and not when it is made: a loader is built before the clock starts, and must not read until then.
        if self._thread is None:
            # A program that ends without close() is not held up.
            self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
            self._thread.start()
        # Items are endless: the thread ends by an error, which it puts here, or by close().
        item, error = self._ready.get()
        if error is not None:
            raise error
        assert item is not None
        return item

    def close(self) -> None:
        """Stop the thread and drop what it has made."""
        self._stop.set()
        # The thread may be waiting for room, and looks for the stop only after it has found some.
        while self._thread is not None and self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                self._thread.join(timeout=0.05)

    def _work(self) -> None:
        try:
            for item in self._items:
                self._ready.put((item, None))
                if self._stop.is_set():
                    return
        except BaseException as error:  # belongs to the thread that asks for the item
            self._ready.put((None, error))


Step = tuple[list[Batch], torch.cuda.Event | None]
"""Micro-batches of a step, and what tells that they have arrived on the GPU."""


class Uploads:
    """Copies of micro-batches to a GPU, on a stream of their own: they take place beside the step that runs meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, batches: list[Batch]) -> Step:
        """Hand over the copies, from any thread. The allocator keeps the pinned memory until they have taken place."""
        # A thread begins on the first GPU, and leaving a stream goes back there: that would make a context on it.
        torch.cuda.set_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            copies = [batch.pin().to(self._device) for batch in batches]
            # Behind the copies of all micro-batches, so that one wait serves the step.
            arrived = torch.cuda.Event()
            arrived.record()
        return copies, arrived

    def finish(self, step: Step) -> list[Batch]:
        """The copies, for the current stream, which waits for them; the host does not."""
        copies, arrived = step
        assert arrived is not None
        # That of the thread that asks, which is not the one that the copies were begun on.
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        for batch in copies:
            for tensor in batch.tensors.values():
                tensor.record_stream(current)  # else its memory may be written again while this stream reads it
        return copies


class NumpyLoader:
    """Batches assembled by NumPy in a background thread, ``prefetch`` steps ahead.

    ``rank_batches`` is ``BatchPlan.rank_batches`` with the rank filled in. Micro-batches are padded
    to ``shape_buckets``, ascending, where some are given.
    """

    def __init__(
        self,
        source: SampleSource,
        rank_batches: RankBatches,
        device: torch.device,
        prefetch: int = 4,
        shape_buckets: Sequence[ShapeBucket] = (),
    ) -> None:
        self.shape_buckets = shape_buckets
        self._source = source
        self._rank_batches = rank_batches
        self._uploads = Uploads(device) if device.type == "cuda" else None
        if self._uploads is not None and shape_buckets:
            # Allocations take long: here they come before the clock starts. The allocators keep the memory. Besides the
            # steps read ahead, one is being assembled, one waits for room, and one is in use.
            step = [inert_batch(shape_buckets[-1])] * len(rank_batches(0))
            for arriving in [self._uploads.start(step) for _ in range(prefetch + 3)]:
                self._uploads.finish(arriving)
        # map() is lazy: nothing is assembled before the first next().
        self._prefetcher = Prefetcher(map(self._assemble, itertools.count()), prefetch)

    def __next__(self) -> list[Batch]:
        """The micro-batches of the next step, on the loader's device."""
        step = next(self._prefetcher)
        return step[0] if self._uploads is None else self._uploads.finish(step)

    def close(self) -> None:
        """Stop the background thread."""
        self._prefetcher.close()

    def _assemble(self, step: int) -> Step:
        batches = []
        for micro in self._rank_batches(step):
            samples = self._source.take(micro.indices)
            batches.append(batch_of(samples, micro, shape_bucket_of(samples, self.shape_buckets, micro)))
        return (batches, None) if self._uploads is None else self._uploads.start(batches)
