"""Plan to ``Batch``: the flat token stream of one rank's micro-batch, assembled ahead of time.

Shape legend: slots for T tokens, S sequences and M masked tokens of the micro-batch, padding included.
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
"""Returns a rank's micro-batches of a step."""


@dataclass(frozen=True)
class Batch:
    """Sequences one after another in one flat stream, without padding between them.

    A batch of a ``ShapeBucket`` has inert slots at the ends: ids are 0, labels -1, ``cu_seqlens`` repeats its last
    value, and ``masked_lm_positions`` points at the first row that no sequence owns.
    """

    input_ids: Tensor
    """int64 [T]"""
    segment_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], restarting at 0 in every sequence."""
    cu_seqlens: Tensor
    """int32 [S + 1], start of each sequence; attention never crosses a boundary."""
    masked_lm_positions: Tensor
    """int64 [M], indices into the flat stream, ascending."""
    masked_lm_ids: Tensor
    """int64 [M], -1 in empty slots"""
    next_sentence_labels: Tensor
    """int64 [S], -1 in empty slots"""
    global_counts: Tensor
    """int64 [2], sequences and masked tokens of the global batch, over all ranks and accumulation steps."""
    max_seqlen: int
    """Upper bound on the length of a sequence."""

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
        """The shape of this batch, equal for batches of one CUDA graph."""
        return ShapeBucket(self.tokens, self.sequences, self.masked_lm_ids.numel(), self.max_seqlen)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to ``device``; copies from pinned memory do not block the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        """Copy the batch to page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(self, **{name: change(value) for name, value in self.tensors.items()})


class SampleSource(Protocol):
    """Source of samples for a loader: an open data set, or samples in memory."""

    def take(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at ``indices``, in that order."""
        ...


def shape_bucket_of(
    samples: Samples, shape_buckets: Sequence[ShapeBucket], micro_batch: MicroBatch | None = None
) -> ShapeBucket | None:
    """Choose the first shape bucket that holds a batch of ``samples``, or None if there are no shape buckets.

    With a ``micro_batch`` of a plan, the shape bucket also holds what the other ranks run at the same time, because
    NCCL requires all ranks to replay the same graph. A batch that fits none gets a shape bucket of its own.
    """
    if not shape_buckets:
        return None
    tokens, masked = len(samples.input_ids), len(samples.masked_lm_ids)
    if micro_batch is not None:
        tokens, masked = max(tokens, micro_batch.largest_tokens), max(masked, micro_batch.largest_masked)
    # All shape buckets have the same max_seqlen; a longer sample needs a shape bucket of its own.
    longest = max(int(samples.lengths.max()), shape_buckets[-1].max_seqlen)
    return fitting(ShapeBucket.around(tokens, len(samples), masked, longest), shape_buckets)


def flat_arrays(
    samples: Samples, micro_batch: MicroBatch, shape_bucket: ShapeBucket | None = None
) -> dict[str, NDArray[np.generic]]:
    """Return the tensors of a ``Batch`` as NumPy arrays of narrow types, padded to ``shape_bucket``."""
    starts = samples.sequence_offsets[:-1]
    lengths = samples.lengths
    arrays = {
        "input_ids": samples.input_ids,
        "segment_ids": samples.segment_ids,
        "position_ids": (np.arange(len(samples.input_ids)) - np.repeat(starts, lengths)).astype(np.uint16),
        "cu_seqlens": samples.sequence_offsets.astype(np.int32),
        # Positions in the stream, where the heads gather their rows.
        "masked_lm_positions": (samples.masked_lm_positions + np.repeat(starts, samples.masked_counts)).astype(
            np.int32
        ),
        "masked_lm_ids": samples.masked_lm_ids.astype(np.int32),
        "next_sentence_labels": samples.next_sentence_labels.astype(np.int8),
        # A tensor, because a captured step is replayed with the counts of other batches.
        "global_counts": np.array([micro_batch.global_sequences, micro_batch.global_masked]),
    }
    return arrays if shape_bucket is None else arrays | _padded(arrays, shape_bucket)


def _padded(arrays: dict[str, NDArray[Any]], shape_bucket: ShapeBucket) -> dict[str, NDArray[Any]]:
    tokens = len(arrays["input_ids"])
    # All but global_counts, which always has two numbers.
    slots = {
        "input_ids": (shape_bucket.tokens, 0),
        "segment_ids": (shape_bucket.tokens, 0),
        "position_ids": (shape_bucket.tokens, 0),
        "cu_seqlens": (shape_bucket.sequences + 1, tokens),
        "masked_lm_positions": (shape_bucket.masked, tokens),
        "masked_lm_ids": (shape_bucket.masked, -1),
        "next_sentence_labels": (shape_bucket.sequences, -1),
    }
    assert tokens < shape_bucket.tokens  # a spare row, where empty masked slots point
    return {
        name: np.concatenate([arrays[name], np.full(size - len(arrays[name]), empty, arrays[name].dtype)])
        for name, (size, empty) in slots.items()
    }


def batch_of(samples: Samples, micro_batch: MicroBatch | None = None, shape_bucket: ShapeBucket | None = None) -> Batch:
    """Return the ``Batch`` of some samples, padded to ``shape_bucket``; without a plan, they are a global batch."""
    whole = micro_batch or MicroBatch(np.arange(len(samples)), len(samples), len(samples.masked_lm_ids))
    tensors = {
        # astype() copies, so that tensors do not share memory with a shard.
        name: torch.from_numpy(array.astype(np.int32 if name == "cu_seqlens" else np.int64))
        for name, array in flat_arrays(samples, whole, shape_bucket).items()
    }
    return Batch(**tensors, max_seqlen=max_seqlen(samples, shape_bucket))


def inert_batch(shape_bucket: ShapeBucket) -> Batch:
    """Return a batch of empty slots, which has no losses and no gradients. Its counts are 1, to divide by."""
    return batch_of(SampleBuilder().samples(), MicroBatch(np.empty(0, np.int64), 1, 1), shape_bucket)


def max_seqlen(samples: Samples, shape_bucket: ShapeBucket | None) -> int:
    """Return the batch's ``max_seqlen``: of the shape bucket, as it is part of the graph, or of the longest sample."""
    return int(samples.lengths.max()) if shape_bucket is None else shape_bucket.max_seqlen


class Loader(Protocol):
    """Endless iterator over optimizer steps that reads nothing before the first ``next()``."""

    def __next__(self) -> list[Batch]:
        """Return the micro-batches of the next step, on the loader's device."""
        ...

    def close(self) -> None:
        """Stop reading ahead."""
        ...


class Prefetcher(Generic[Item]):
    """Iterator that runs in a background thread, a bounded number of items ahead; ``next()`` raises its errors."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __next__(self) -> Item:
        """Return the next item; starts the thread on first use, because nothing may be read before the clock starts."""
        if self._thread is None:
            # daemon: a program can end without close().
            self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
            self._thread.start()
        item, error = self._ready.get()
        if error is not None:
            raise error
        assert item is not None
        return item

    def close(self) -> None:
        """Stop the thread and drop its items."""
        self._stop.set()
        # The thread may be waiting for room in the queue.
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
        except BaseException as error:  # raised in the thread that asks for the item
            self._ready.put((None, error))


Step = tuple[list[Batch], torch.cuda.Event | None]
"""Micro-batches of a step, and the event of their arrival on the GPU."""


class Uploads:
    """Copies of micro-batches to a GPU, on a stream of their own beside the running step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, batches: list[Batch]) -> Step:
        """Start the copies, from any thread. The allocator keeps the pinned memory until they are complete."""
        # A new thread uses the first GPU, where leaving a stream would create a context.
        torch.cuda.set_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            copies = [batch.pin().to(self._device) for batch in batches]
            # One event behind all copies of the step.
            arrived = torch.cuda.Event()
            arrived.record()
        return copies, arrived

    def finish(self, step: Step) -> list[Batch]:
        """Return the copies and let the current stream, not the host, wait for them."""
        copies, arrived = step
        assert arrived is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        for batch in copies:
            for tensor in batch.tensors.values():
                tensor.record_stream(current)  # or its memory might be reused while this stream reads it
        return copies


class NumpyLoader:
    """Batches assembled by NumPy in a background thread, ``prefetch`` steps ahead, and padded to ``shape_buckets``, if
    any."""

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
            # Allocates memory before the clock starts, for the steps read ahead and three more: one is being assembled,
            # one waits for room, and one is in use.
            step = [inert_batch(shape_buckets[-1])] * len(rank_batches(0))
            for arriving in [self._uploads.start(step) for _ in range(prefetch + 3)]:
                self._uploads.finish(arriving)
        self._prefetcher = Prefetcher(map(self._assemble, itertools.count()), prefetch)

    def __next__(self) -> list[Batch]:
        """Return the micro-batches of the next step, on the loader's device."""
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
