"""Assembly of batches. A ``Batch`` is the flat token stream of one rank's micro-batch, assembled ahead of time.

Shape legend: the micro-batch has slots for T tokens, S sequences and M masked tokens, including padding.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataloading.batches.sampler import MicroBatch, ShapeBucket, fitting
from dataloading.shards.samples import SampleBuilder, Samples

PREFETCHED_STEPS = 4
"""Number of steps that a loader prepares in advance, so that one slow read does not delay a step."""

Item = TypeVar("Item")
RankBatches = Callable[[int], list[MicroBatch]]
"""Function that returns a rank's micro-batches for a step."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch: sequences concatenated into one flat stream, without padding between them.

    A batch that is padded to a ``ShapeBucket`` has inert slots at the end of each tensor: ids are 0, labels are -1,
    ``cu_seqlens`` repeats its last value, and ``masked_lm_positions`` points to the first row that no sequence uses.
    """

    input_ids: Tensor
    """int64 [T]"""
    segment_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], restarting at 0 in every sequence."""
    cu_seqlens: Tensor
    """int32 [S + 1], start of each sequence. Attention never crosses these boundaries."""
    masked_lm_positions: Tensor
    """int64 [M], ascending indices into the flat stream."""
    masked_lm_ids: Tensor
    """int64 [M], -1 in empty slots"""
    next_sentence_labels: Tensor
    """int64 [S], -1 in empty slots"""
    global_counts: Tensor
    """int64 [2], numbers of sequences and of masked tokens in the global batch (all ranks and accumulation steps)."""
    max_seqlen: int
    """Upper bound on the length of a sequence."""

    @property
    def tokens(self) -> int:
        """Number of token slots. ``cu_seqlens[-1]`` of them hold real tokens."""
        return self.input_ids.numel()

    @property
    def sequences(self) -> int:
        return self.next_sentence_labels.numel()

    @property
    def shape_bucket(self) -> ShapeBucket:
        """The shape of this batch. Batches of one CUDA graph have equal shapes."""
        return ShapeBucket(self.tokens, self.sequences, self.masked_lm_ids.numel(), self.max_seqlen)

    @property
    def tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to ``device``. Copies from pinned memory do not block the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        """Copy the batch to pinned memory, so that copies to a GPU are asynchronous."""
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
    """Return the first shape bucket that a batch of ``samples`` fits, or None if there are no shape buckets.

    With a ``micro_batch`` from a sampler, the micro-batches that the other ranks run at the same time must fit too, because
    NCCL requires all ranks to replay the same graph. A batch that fits no shape bucket gets a new shape bucket.
    """
    if not shape_buckets:
        return None
    tokens, masked = len(samples.input_ids), len(samples.masked_lm_ids)
    if micro_batch is not None:
        tokens, masked = max(tokens, micro_batch.largest_tokens), max(masked, micro_batch.largest_masked)
    # All shape buckets have the same max_seqlen, so a longer sample needs a new shape bucket.
    longest = max(int(samples.lengths.max()), shape_buckets[0].max_seqlen)
    return fitting(ShapeBucket.around(tokens, len(samples), masked, longest), shape_buckets)


def flat_arrays(
    samples: Samples, micro_batch: MicroBatch, shape_bucket: ShapeBucket | None
) -> dict[str, NDArray[np.generic]]:
    """Return the tensors of a ``Batch`` as NumPy arrays of narrow types, padded to ``shape_bucket`` if it is given."""
    tokens = len(samples.input_ids)
    starts = samples.sequence_offsets[:-1]
    arrays = {
        "input_ids": samples.input_ids,
        "segment_ids": samples.segment_ids,
        "position_ids": (np.arange(tokens) - np.repeat(starts, samples.lengths)).astype(np.uint16),
        "cu_seqlens": samples.sequence_offsets.astype(np.int32),
        # Positions in the flat stream, because the masked-LM head gathers rows of the flat stream.
        "masked_lm_positions": (samples.masked_lm_positions + np.repeat(starts, samples.masked_counts)).astype(
            np.int32
        ),
        "masked_lm_ids": samples.masked_lm_ids.astype(np.int32),
        "next_sentence_labels": samples.next_sentence_labels.astype(np.int8),
        # The counts become a tensor, because a captured step is replayed with the values that a tensor holds then.
        "global_counts": np.array([micro_batch.global_sequences, micro_batch.global_masked]),
    }
    if shape_bucket is None:
        return arrays
    # Padded size and padding value of each array. global_counts always has two numbers, so it is not padded.
    slots = {
        "input_ids": (shape_bucket.tokens, 0),
        "segment_ids": (shape_bucket.tokens, 0),
        "position_ids": (shape_bucket.tokens, 0),
        "cu_seqlens": (shape_bucket.sequences + 1, tokens),
        "masked_lm_positions": (shape_bucket.masked, tokens),
        "masked_lm_ids": (shape_bucket.masked, -1),
        "next_sentence_labels": (shape_bucket.sequences, -1),
    }
    # Empty masked slots point to row number `tokens`, so the shape bucket must have such a row.
    assert tokens < shape_bucket.tokens
    return arrays | {
        name: np.concatenate([arrays[name], np.full(size - len(arrays[name]), empty, arrays[name].dtype)])
        for name, (size, empty) in slots.items()
    }


def batch_of(samples: Samples, micro_batch: MicroBatch | None = None, shape_bucket: ShapeBucket | None = None) -> Batch:
    """Make a ``Batch`` of ``samples``, padded to ``shape_bucket``.

    Without a ``micro_batch``, the samples are the whole global batch.
    """
    whole = micro_batch or MicroBatch(np.arange(len(samples)), len(samples), len(samples.masked_lm_ids))
    tensors = {
        # astype() copies, so that the tensors do not share memory with a shard.
        name: torch.from_numpy(array.astype(np.int32 if name == "cu_seqlens" else np.int64))
        for name, array in flat_arrays(samples, whole, shape_bucket).items()
    }
    return Batch(**tensors, max_seqlen=max_seqlen(samples, shape_bucket))


def inert_batch(shape_bucket: ShapeBucket) -> Batch:
    """Return a batch of empty slots, whose losses and gradients are 0.

    Its ``global_counts`` are 1 instead of 0, because the losses are divided by them.
    """
    return batch_of(SampleBuilder().samples(), MicroBatch(np.empty(0, np.int64), 1, 1), shape_bucket)


def max_seqlen(samples: Samples, shape_bucket: ShapeBucket | None) -> int:
    """Return the ``max_seqlen`` of the shape bucket, or the length of the longest sample without a shape bucket."""
    return int(samples.lengths.max()) if shape_bucket is None else shape_bucket.max_seqlen


class Loader(Protocol):
    """Endless iterator over the batches of optimizer steps. It reads nothing before the first ``next()``."""

    def __next__(self) -> list[Batch]:
        """Return the micro-batches of the next step, on the loader's device."""
        ...

    def close(self) -> None:
        """Stop reading ahead."""
        ...


class Prefetcher(Generic[Item]):
    """Iterator that reads ``depth`` items ahead in a background thread. ``next()`` raises the thread's errors."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[Item]] = deque()

    def __next__(self) -> Item:
        """Return the next item. The first call starts the thread, because no data may be read before the clock starts."""
        while len(self._ahead) <= self._depth:
            self._ahead.append(self._thread.submit(next, self._items))
        return self._ahead.popleft().result()

    def close(self) -> None:
        """Stop the thread after the item that it is reading, and discard all items."""
        self._thread.shutdown(cancel_futures=True)


Step = tuple[list[Batch], torch.cuda.Event | None]
"""Micro-batches of a step, and the event that marks their arrival on the GPU."""


class Uploads:
    """Copies of micro-batches to a GPU, on a separate stream that runs concurrently with the training step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, batches: list[Batch]) -> Step:
        """Start to copy ``batches`` to the GPU, from any thread, without waiting for the copies."""
        # Select the GPU. A new thread uses GPU 0, so the end of the `with` block would create a CUDA context on GPU 0.
        torch.cuda.set_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            # No reference to the pinned batches is needed: PyTorch keeps their memory until the copies are complete.
            copies = [batch.pin().to(self._device) for batch in batches]
            arrived = torch.cuda.Event()
            arrived.record()
        return copies, arrived

    def finish(self, step: Step) -> list[Batch]:
        """Return the copies that `start` began. The current stream waits for the copies, but the host does not."""
        copies, arrived = step
        assert arrived is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        for batch in copies:
            for tensor in batch.tensors.values():
                tensor.record_stream(current)  # keeps the memory from reuse while this stream reads it
        return copies


class NumpyLoader:
    """Loader that assembles batches with NumPy in a background thread, ``PREFETCHED_STEPS`` ahead.

    Batches are padded to ``shape_buckets``, if there are any.
    """

    def __init__(
        self,
        source: SampleSource,
        rank_batches: RankBatches,
        device: torch.device,
        shape_buckets: Sequence[ShapeBucket] = (),
    ) -> None:
        self.shape_buckets = shape_buckets
        self._source = source
        self._rank_batches = rank_batches
        self._uploads = Uploads(device) if device.type == "cuda" else None
        if self._uploads is not None and shape_buckets:
            # Allocate GPU memory before the clock starts. It must hold the prefetched steps, the step that is being
            # assembled and the step that is in use.
            step = [inert_batch(shape_buckets[-1])] * len(rank_batches(0))
            for arriving in [self._uploads.start(step) for _ in range(PREFETCHED_STEPS + 2)]:
                self._uploads.finish(arriving)
        self._prefetcher = Prefetcher(map(self._assemble, itertools.count()), PREFETCHED_STEPS)

    def __next__(self) -> list[Batch]:
        step = next(self._prefetcher)
        return step[0] if self._uploads is None else self._uploads.finish(step)

    def close(self) -> None:
        self._prefetcher.close()

    def _assemble(self, step: int) -> Step:
        batches = []
        for micro in self._rank_batches(step):
            samples = self._source.take(micro.indices)
            batches.append(batch_of(samples, micro, shape_bucket_of(samples, self.shape_buckets, micro)))
        return (batches, None) if self._uploads is None else self._uploads.start(batches)
