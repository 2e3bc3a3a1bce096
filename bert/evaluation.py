"""Measurement of the masked-LM accuracy, in exact integer counts, and of the perplexity over the evaluation set."""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bert.execution.cuda_graphs import BatchGraphs, CudaCapturer
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh, all_reduce_
from dataloading.batches.loader import Batch, batch_of, inert_batch, shape_bucket_of
from dataloading.batches.sampler import ShapeBucket, choose_shape_buckets
from dataloading.dataset.folder import Dataset
from kernels import IGNORED, only_capturable

_MOST_LOSS = 100.0


@dataclass(frozen=True)
class Accuracy:
    """Number of correct predictions and number of all masked tokens in the evaluation set, with their loss."""

    correct: int
    count: int
    loss: float
    """Sum of the cross-entropies of all masked tokens."""

    @property
    def value(self) -> float:
        return self.correct / self.count

    @property
    def perplexity(self) -> float:
        """Exponential of the mean cross-entropy. A choice among so many equally probable tokens is equally uncertain."""
        # Limit the mean, because the cross-entropy of a diverged model can be so large that its exponential overflows.
        return math.exp(min(self.loss / self.count, _MOST_LOSS))


class Evaluator:
    """Evaluator of the model on the evaluation set. Each rank processes its share of the set.

    Samples are sorted by length, and each copy of the model takes every ``data_size``-th sample. Shares are therefore
    balanced, and the samples of a batch have similar lengths. Samples are read only once, in the background after
    ``read_ahead``, and stay on the device. Masked tokens with the id ``ignored_id`` are not counted.
    """

    def __init__(self, dataset: Dataset, mesh: Mesh, batch_size: int, ignored_id: int | None = None) -> None:
        # The sort is stable so that samples of equal length have the same order on all ranks; otherwise some samples
        # would be evaluated twice and others never.
        by_length = np.argsort(-dataset.lengths.astype(np.int64), kind="stable")
        share = by_length[mesh.data_rank :: mesh.data_size]
        self.samples = len(dataset)
        self._ignored_id = ignored_id
        self._dataset, self._device, self._counted = dataset, mesh.device, mesh.counts_losses
        self._indices = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
        self._shape_buckets: list[ShapeBucket] = []
        # Counts of correct predictions and of masked tokens. Integer sums are exact in any order.
        self._counts = torch.zeros(2, dtype=torch.int64, device=mesh.device)
        self._loss = torch.zeros(1, dtype=torch.float64, device=mesh.device)
        self._captured: BatchGraphs | None = None
        self._read: Future[list[Batch]] | None = None
        self._batches: list[Batch] = []

    @torch.inference_mode()
    def warm_up(self, model: BertForPreTraining, autocast: torch.autocast, capturer: CudaCapturer | None) -> None:
        """Compile the evaluation's kernels on empty batches before the clock starts. Does nothing on a CPU.

        With a ``capturer``, the evaluation of this ``model`` is also captured for each shape bucket, and later
        evaluations replay the graphs.
        """
        if not self._indices or (capturer is None and self._device.type == "cpu"):
            return
        tokens_N, masked_N = (
            np.array([counts[indices].sum(dtype=np.int64) for indices in self._indices])
            for counts in (self._dataset.lengths, self._dataset.masked_counts)
        )
        sequences, longest = max(map(len, self._indices)), self._dataset.info.max_seq_length
        shape_buckets = choose_shape_buckets(tokens_N, masked_N, sequences, longest)
        batches = [inert_batch(shape_bucket).to(self._device) for shape_bucket in shape_buckets]
        count = partial(self._count, model, autocast)
        model.eval()
        if capturer is None:
            count(batches[-1])
        else:
            self._shape_buckets, self._captured = shape_buckets, BatchGraphs(count)
            with only_capturable():
                self._captured.prepare(batches, capturer)
                capturer.capture()
        model.train()

    def read_ahead(self) -> None:
        """Start to read this rank's share in the background. Call this only after the clock has started."""
        thread = ThreadPoolExecutor(1, "evaluation")
        self._read = thread.submit(self._read_all)
        # ``wait=False`` returns at once; the thread ends by itself after the task.
        thread.shutdown(wait=False)

    @torch.inference_mode()
    def __call__(
        self, model: BertForPreTraining, autocast: torch.autocast, report: Callable[[float], None] = lambda _: None
    ) -> Accuracy:
        """Evaluate the model without dropout and return the accuracy over all ranks.

        After each batch, ``report`` is called with the fraction of this rank's batches that have been queued. Raises
        ``ValueError`` on all ranks if every masked token is ignored.
        """
        if not self._batches:
            batches = self._read.result() if self._read is not None else self._read_all()
            self._batches = [batch.to(self._device) for batch in batches]
        count = self._captured or partial(self._count, model, autocast)
        self._counts.zero_()
        self._loss.zero_()
        model.eval()
        for done, batch in enumerate(self._batches, 1):
            count(batch)
            report(done / len(self._batches))
        model.train()
        correct, masked = all_reduce_(self._counts).tolist()
        accuracy = Accuracy(correct, masked, all_reduce_(self._loss).item())
        if self._ignored_id is not None and accuracy.count == 0:
            raise ValueError(
                f"{self._dataset.folder}: every masked token is [UNK], so the vocabulary does not fit the text: prepare the "
                "data with a vocabulary of this text, or set evaluation.unknown_tokens to count these tokens"
            )
        return accuracy

    def _count(self, model: BertForPreTraining, autocast: torch.autocast, batch: Batch) -> None:
        with autocast:
            # Ranks that share a copy of the model must all run it, because the model contains collectives.
            output = model(batch)
        assert output.masked_lm_correct is not None  # in evaluation mode, the model counts correct predictions
        # Only one of the ranks that share a copy of the model counts its predictions, so that none is counted twice.
        if not self._counted:
            return
        self._loss += output.masked_lm_loss
        self._counts[0] += output.masked_lm_correct
        self._counts[1] += (batch.masked_lm_ids >= 0).sum()

    def _read_all(self) -> list[Batch]:
        if self._device.type == "cuda":
            # A new thread would use the first GPU, which may belong to another rank.
            torch.cuda.set_device(self._device)
        batches = []
        for indices in self._indices:
            samples = self._dataset.take(indices)
            batch = batch_of(samples, shape_bucket=shape_bucket_of(samples, self._shape_buckets))
            if self._ignored_id is not None:
                batch.masked_lm_ids[batch.masked_lm_ids == self._ignored_id] = IGNORED
            batches.append(batch)
        return [batch.pin() for batch in batches] if self._device.type == "cuda" else batches
