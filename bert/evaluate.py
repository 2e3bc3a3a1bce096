"""Masked-LM accuracy over the evaluation set, as exact integer counts."""

from dataclasses import dataclass

import numpy as np
import torch

from bert.model import BertForPreTraining
from bert.parallel.collectives import all_reduce_sum_
from bert.parallel.mesh import Mesh
from dataloading.dataset import Dataset
from dataloading.loader import Batch, batch_of


@dataclass(frozen=True)
class Accuracy:
    """Correct predictions among all masked tokens of the evaluation set."""

    correct: int
    count: int

    @property
    def value(self) -> float:
        """The fraction, 0 to 1."""
        return self.correct / self.count


class Evaluator:
    """Evaluates the model on every sample of the set, each rank on its share.

    Ranks take every ``world_size``-th sample in order of length, so shares are alike and batches hold similar lengths. The
    batches stay on the device after the first evaluation.
    """

    def __init__(self, dataset: Dataset, mesh: Mesh, batch_size: int) -> None:
        by_length = np.argsort(-dataset.lengths.astype(np.int64), kind="stable")
        share = by_length[mesh.rank :: mesh.world_size]
        self.samples = len(dataset)
        self._dataset = dataset
        self._device = mesh.device
        self._indices = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
        self._batches: list[Batch] = []

    @torch.inference_mode()
    def __call__(self, model: BertForPreTraining, autocast: torch.autocast) -> Accuracy:
        """The accuracy over all ranks; dropout is off while it runs."""
        if not self._batches:
            self._batches = [batch_of(self._dataset.take(indices)).to(self._device) for indices in self._indices]
        counts = torch.zeros(2, dtype=torch.int64, device=self._device)
        model.eval()
        with autocast:
            for batch in self._batches:
                correct = model(batch).masked_lm_correct
                assert correct is not None  # in evaluation the model counts
                counts[0] += correct
                counts[1] += (batch.masked_lm_ids >= 0).sum()
        model.train()
        correct, count = all_reduce_sum_(counts).tolist()
        return Accuracy(correct, count)
