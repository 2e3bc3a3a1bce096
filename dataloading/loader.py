"""Plan to ``Batch``: the flat token stream of one rank's micro-batch, assembled ahead of time.

Shape legend: T tokens, S sequences, M masked tokens of the micro-batch.
"""

import importlib.util
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataloading.sampler import MicroBatch
from dataloading.samples import Samples

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """Real tokens only: sequences one after another in one flat stream, no padding rows."""

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
    """int64 [M]"""
    next_sentence_labels: Tensor
    """int64 [S]"""
    max_seqlen: int
    global_sequences: int
    """Sequences of the whole global batch, over all ranks and accumulation steps."""
    global_masked: int
    """Masked tokens of the whole global batch."""

    @property
    def tokens(self) -> int:
        """Real tokens of this micro-batch."""
        return self.input_ids.numel()

    @property
    def sequences(self) -> int:
        """Sequences of this micro-batch."""
        return self.next_sentence_labels.numel()

    def to(self, device: torch.device) -> "Batch":
        """The same batch on ``device``; copies from pinned memory do not block the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        """The same batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in tensors.items() if isinstance(value, Tensor)})


class SampleSource(Protocol):
    """What a loader reads from: an opened data set, or samples in memory."""

    def take(self, indices: NDArray[np.int64]) -> Samples:
        """The samples at ``indices``, in that order."""
        ...


def flat_arrays(samples: Samples) -> dict[str, NDArray[np.generic]]:
    """The tensors of a ``Batch`` as NumPy arrays in the narrow types in which they are stored and moved."""
    starts = samples.sequence_offsets[:-1]
    lengths = samples.lengths
    return {
        "input_ids": samples.input_ids,
        "segment_ids": samples.segment_ids,
        "position_ids": (np.arange(len(samples.input_ids)) - np.repeat(starts, lengths)).astype(np.uint16),
        "cu_seqlens": samples.sequence_offsets.astype(np.int32),
        "masked_lm_positions": (samples.masked_lm_positions + np.repeat(starts, samples.masked_counts)).astype(
            np.int32
        ),
        "masked_lm_ids": samples.masked_lm_ids,
        "next_sentence_labels": samples.next_sentence_labels,
    }


def to_batch(tensors: Mapping[str, Tensor], max_seqlen: int, micro_batch: MicroBatch) -> Batch:
    """A ``Batch`` from its tensors, which have the types that it says."""
    return Batch(
        **tensors,
        max_seqlen=max_seqlen,
        global_sequences=micro_batch.global_sequences,
        global_masked=micro_batch.global_masked,
    )


def batch_of(samples: Samples, micro_batch: MicroBatch | None = None) -> Batch:
    """The ``Batch`` of some samples; without a plan they are a global batch of their own."""
    whole = micro_batch or MicroBatch(np.arange(len(samples)), len(samples), len(samples.masked_lm_ids))
    tensors = {
        name: torch.from_numpy(array.astype(np.int32 if name == "cu_seqlens" else np.int64))
        for name, array in flat_arrays(samples).items()
    }
    return to_batch(tensors, int(samples.lengths.max()), whole)


class Loader(Protocol):
    """An endless iterator over optimizer steps; nothing is read before the first ``next()``."""

    def __next__(self) -> list[Batch]:
        """The micro-batches of the next step, on the loader's device."""
        ...

    def close(self) -> None:
        """Stop reading ahead."""
        ...


class Prefetcher(Generic[Item]):
    """Runs an iterator in a background thread, a bounded number of items ahead; its errors surface in ``next()``."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __next__(self) -> Item:
        """The next item; starts the thread on first use."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
            self._thread.start()
        item, error = self._ready.get()
        if error is not None:
            raise error
        assert item is not None
        return item

    def close(self) -> None:
        """Stop the thread and drop what it has made."""
        self._stop.set()
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


class NumpyLoader:
    """Batches assembled by NumPy in a background thread, ``prefetch`` steps ahead.

    ``rank_batches(step)`` gives the micro-batches of a step: ``Plan.rank_batches`` with the rank filled in.
    """

    def __init__(
        self,
        source: SampleSource,
        rank_batches: Callable[[int], list[MicroBatch]],
        device: torch.device,
        prefetch: int = 4,
    ) -> None:
        self._source = source
        self._rank_batches = rank_batches
        self._device = device
        self._prefetcher = Prefetcher(map(self._assemble, itertools.count()), prefetch)

    def __next__(self) -> list[Batch]:
        """The micro-batches of the next step, on the loader's device."""
        return [batch.to(self._device) for batch in next(self._prefetcher)]

    def close(self) -> None:
        """Stop the background thread."""
        self._prefetcher.close()

    def _assemble(self, step: int) -> list[Batch]:
        batches = [batch_of(self._source.take(micro.indices), micro) for micro in self._rank_batches(step)]
        return [batch.pin() for batch in batches] if self._device.type == "cuda" else batches


def choose_loader(kind: str, device: torch.device) -> str:
    """ "numpy" or "dali": what ``data.loader`` stands for on this machine.

    Raises ``ValueError`` when DALI is asked for and not installed.
    """
    installed = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
    if kind == "dali" and not installed:
        raise ValueError(
            "data.loader is dali, but nvidia-dali is not installed: install it, or set data.loader to numpy"
        )
    if kind == "auto":
        return "dali" if installed and device.type == "cuda" else "numpy"
    return kind
