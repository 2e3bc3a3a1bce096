"""Masked-LM accuracy over the evaluation set, as exact integer counts."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bert.execution.cuda_graphs import BatchGraphs, CudaCapturer
from bert.model import BertForPreTraining
from bert.parallel.collectives import all_reduce_sum_
from bert.parallel.mesh import Mesh
from dataloading.batches.loader import Batch, batch_of, inert_batch, shape_bucket_of
from dataloading.batches.shape_buckets import ShapeBucket, choose_shape_buckets, fitting
from dataloading.dataset.folder import Dataset
from kernels import captured


@dataclass(frozen=True)
class Accuracy:
    """Correct predictions among all masked tokens of the evaluation set."""

    correct: int
    count: int

    @property
    def value(self) -> float:
        """The fraction, 0 to 1."""
        return self.correct / self.count


class PendingAccuracy:
    """A queued evaluation, whose counts are copied to the host while the next step runs."""

    def __init__(self, counts: Tensor, host_counts: Tensor | None) -> None:
        """Sum ``counts`` over all ranks; on a GPU, copy them to the page-locked ``host_counts``."""
        # On the training stream: on another one, this sum and the reductions of the next step would run on two
        # communicators in an order that differs between ranks, which can deadlock NCCL.
        all_reduce_sum_(counts)
        self._host_counts, self._arrived = counts, None
        if host_counts is not None:
            self._host_counts = host_counts.copy_(counts, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def result(self) -> Accuracy:
        """Wait for the accuracy over all ranks and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return Accuracy(*self._host_counts.tolist())


class Evaluator:
    """Evaluation of the model on the evaluation set, each rank on its share.

    Copies of the model take every ``data_size``-th sample in order of length, so shares are alike and batches hold similar
    lengths. Samples are read once, in the background after ``read_ahead``, and stay on the device.
    """

    def __init__(self, dataset: Dataset, mesh: Mesh, batch_size: int) -> None:
        # Stable: equal lengths must have the same order on all ranks, or samples would be missed.
        by_length = np.argsort(-dataset.lengths.astype(np.int64), kind="stable")
        share = by_length[mesh.data_rank :: mesh.data_size]
        self.samples = len(dataset)
        self._dataset, self._device, self._counted = dataset, mesh.device, mesh.counts_losses
        self._indices = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
        self._shape_buckets: list[ShapeBucket] = []
        # Integers, so that sums are exact in any order.
        self._counts = torch.zeros(2, dtype=torch.int64, device=mesh.device)
        self._host_counts: Tensor | None = None
        if mesh.device.type == "cuda":
            self._host_counts = torch.empty(2, dtype=torch.int64, pin_memory=True)
        self._reserved: list[tuple[Batch, Batch]] = []
        """Page-locked and device memory for this rank's share, until it is read."""
        self._captured: BatchGraphs | None = None
        self._read: Future[list[Batch]] | None = None
        self._batches: list[Batch] = []

    @torch.inference_mode()
    def warm_up(self, model: BertForPreTraining, autocast: torch.autocast, capturer: CudaCapturer | None) -> None:
        """Compile an evaluation's kernels on empty batches, before the clock starts; on a CPU do nothing.

        With a ``capturer`` the evaluation is captured for each shape bucket and replayed from now on, for this ``model``.
        """
        if not self._indices or (capturer is None and self._device.type == "cpu"):
            return
        tokens_N, masked_N = (
            np.array([counts[indices].sum(dtype=np.int64) for indices in self._indices])
            for counts in (self._dataset.lengths, self._dataset.masked_counts)
        )
        sequences, longest = max(map(len, self._indices)), self._dataset.info.max_seq_length
        shape_buckets = choose_shape_buckets(tokens_N, masked_N, sequences, longest)
        shapes = [
            fitting(ShapeBucket.around(int(tokens), len(indices), int(masked), longest), shape_buckets)
            for tokens, indices, masked in zip(tokens_N, self._indices, masked_N, strict=True)
        ]
        batches = [inert_batch(shape_bucket).to(self._device) for shape_bucket in shape_buckets]
        count = partial(self._count, model, autocast)
        model.eval()
        if capturer is None:
            count(batches[-1])
        else:
            self._shape_buckets, self._captured = shape_buckets, BatchGraphs(count)
            with captured():
                self._captured.prepare(batches, capturer)
                capturer.capture()
        model.train()
        # Allocations take long, so they happen before the clock starts; last, since a capture empties the allocators'
        # caches.
        pinned = [inert_batch(shape).pin() for shape in shapes] if self._device.type == "cuda" else []
        self._reserved = [(batch, batch.to(self._device)) for batch in pinned]

    def read_ahead(self) -> None:
        """Start reading this rank's share in the background, once the data may be touched."""
        self._reserved.clear()  # the allocators keep the memory
        reader = ThreadPoolExecutor(1, "evaluation")
        self._read = reader.submit(self._read_all)
        # The thread ends with its one task.
        reader.shutdown(wait=False)

    def __call__(self, model: BertForPreTraining, autocast: torch.autocast) -> Accuracy:
        """Wait for the accuracy over all ranks and return it."""
        return self.start(model, autocast).result()

    @torch.inference_mode()
    def start(
        self, model: BertForPreTraining, autocast: torch.autocast, report: Callable[[float], None] = lambda _: None
    ) -> PendingAccuracy:
        """Queue an evaluation, without dropout. The previous result must have been read.

        ``report`` gets the share of this rank's batches that have been queued, after each batch.
        """
        if not self._batches:
            batches = self._read.result() if self._read is not None else self._read_all()
            self._batches = [batch.to(self._device) for batch in batches]
        count = self._captured or partial(self._count, model, autocast)
        self._counts.zero_()
        model.eval()
        for done, batch in enumerate(self._batches, 1):
            count(batch)
            report(done / len(self._batches))
        model.train()
        return PendingAccuracy(self._counts, self._host_counts)

    def _count(self, model: BertForPreTraining, autocast: torch.autocast, batch: Batch) -> None:
        with autocast:
            # On all ranks, because ranks that share the model meet in its collectives.
            correct = model(batch).masked_lm_correct
        assert correct is not None  # in evaluation the model counts
        if not self._counted:  # another rank of the same copy counts
            return
        self._counts[0] += correct
        self._counts[1] += (batch.masked_lm_ids >= 0).sum()

    def _read_all(self) -> list[Batch]:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread starts on the first GPU
        batches = []
        for indices in self._indices:
            samples = self._dataset.take(indices)
            batches.append(batch_of(samples, shape_bucket=shape_bucket_of(samples, self._shape_buckets)))
        return [batch.pin() for batch in batches] if self._device.type == "cuda" else batches
