"""One training step: forward, loss, backward, reduction, update.

Nothing here reads the device: the rate and the step count live there, losses and norms are summed there, and the host
fetches the sums once an interval.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bert.config import Config
from bert.metrics import Stopwatch
from bert.model import BertForPreTraining, initialize_
from bert.optimizer import FlatParameters, Lamb
from bert.parallel.collectives import all_reduce_sum_
from bert.parallel.mesh import Mesh
from dataloading.loader import Batch


class Statistics:
    """Running sums over this rank's steps, on the device: mean losses, gradient norm, tokens."""

    NAMES = ("masked_lm_loss", "next_sentence_loss", "gradient_norm", "tokens")

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(self.NAMES) + 2, dtype=torch.float64, device=device)

    def add_micro_batch(self, masked_lm_loss: Tensor, next_sentence_loss: Tensor, tokens: Tensor) -> None:
        """Add a micro-batch's share of the global batch's mean losses and its tokens, all []."""
        self._sums[0] += masked_lm_loss.detach()
        self._sums[1] += next_sentence_loss.detach()
        self._sums[3] += tokens

    def add_step(self, gradient_norm: Tensor, main: bool) -> None:
        """Count a step; the norm is the same on all ranks, so one of them adds it and counts."""
        if main:
            self._sums[2] += gradient_norm
            self._sums[4] += 1

    def fetch(self, stop: bool = False) -> tuple[dict[str, float], bool]:
        """Means over the steps since the last fetch, over all ranks, and whether any rank asks to ``stop``.

        The one place where the host waits for the device; every rank must call it after the same step.
        """
        self._sums[-1] = float(stop)
        *sums, steps, stopping = all_reduce_sum_(self._sums).tolist()
        means = {name: total / max(1, steps) for name, total in zip(self.NAMES, sums, strict=True)}
        self._sums.zero_()
        return means, stopping > 0


class TrainingStep:
    """Model, optimizer and what one step does with a global batch."""

    def __init__(self, model: BertForPreTraining, config: Config, mesh: Mesh, stopwatch: Stopwatch) -> None:
        self.model = model
        self.flat = FlatParameters.of(model)
        self.optimizer = Lamb(self.flat, config.optimizer)
        self.statistics = Statistics(mesh.device)
        self._mesh = mesh
        self._stopwatch = stopwatch
        self._low_precision = config.training.precision == "bf16"

    def __call__(self, micro_batches: Sequence[Batch]) -> None:
        """Train on this rank's micro-batches of one global batch."""
        with self._stopwatch.time("forward_backward"):
            for batch in micro_batches:
                self._accumulate(batch)
        with self._stopwatch.time("reduce"):
            all_reduce_sum_(self.flat.gradients_P)
        with self._stopwatch.time("update"):
            norm = self.optimizer.step()
        self.statistics.add_step(norm, self._mesh.is_main)

    def _accumulate(self, batch: Batch) -> None:
        with self.autocast():
            output = self.model(batch)
        masked_lm_loss, next_sentence_loss = output.mean_losses(batch)
        (masked_lm_loss + next_sentence_loss).backward()
        self.statistics.add_micro_batch(masked_lm_loss, next_sentence_loss, batch.cu_seqlens[-1])

    def autocast(self) -> torch.autocast:
        """The context in which the model computes."""
        return torch.autocast(self._mesh.device.type, torch.bfloat16, enabled=self._low_precision)

    def warm_up(self, micro_batches: Sequence[Batch], steps: int) -> None:
        """Run steps on synthetic batches, then restore weights, optimizer, statistics and random states."""
        weights_P, dropout_state = self.flat.weights_P.clone(), self.model.dropout_state.clone()
        devices = [self._mesh.device] if self._mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            for _ in range(steps):
                self(micro_batches)
        self.statistics.fetch()
        self.optimizer.reset()
        with torch.no_grad():
            self.flat.weights_P.copy_(weights_P)
            self.model.dropout_state.copy_(dropout_state)
        self._stopwatch.reset()


def build_model(config: Config, mesh: Mesh, seed: int) -> BertForPreTraining:
    """The model on its device, from random weights."""
    model = BertForPreTraining(config.model)
    initialize_(model, torch.Generator().manual_seed(seed))
    return model.to(mesh.device).train()
