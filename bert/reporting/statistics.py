"""Statistics of training steps, summed where the steps run until the host fetches them."""

import torch
from torch import Tensor

from bert.parallel.collectives import all_reduce_sum_
from bert.parallel.mesh import Mesh


class Statistics:
    """Running sums over this rank's steps, on the device: mean losses, gradient norm, tokens, steps that were skipped."""

    NAMES = ("masked_lm_loss", "next_sentence_loss", "gradient_norm", "tokens", "skipped_steps")

    def __init__(self, mesh: Mesh) -> None:
        self.own_seconds = [0.0] * mesh.world_size
        """What each rank gave at the last fetch, by rank."""
        self._rank, self._counts = mesh.rank, mesh.counts_losses
        # One vector, so that one all-reduce sums it all: a place for each rank's own seconds, which others leave at 0,
        # then the sums by name, the number of steps, and the wish to stop. In fp64, so that numbers of
        # tokens stay exact.
        size = mesh.world_size + len(self.NAMES) + 2
        self._all = torch.zeros(size, dtype=torch.float64, device=mesh.device)
        self._sums = self._all[mesh.world_size :]

    def add_micro_batch(self, masked_lm_loss: Tensor, next_sentence_loss: Tensor, tokens: Tensor) -> None:
        """Add a micro-batch's share of the global batch's mean losses and its tokens, all [].

        Of the ranks that share a copy of the model one does.
        """
        if not self._counts:
            return
        self._sums[0] += masked_lm_loss.detach()
        self._sums[1] += next_sentence_loss.detach()
        self._sums[3] += tokens

    def add_step(self, gradient_norm: Tensor) -> None:
        """Count a step; the norm is the same on all ranks, so one of them adds it and counts.

        Optimizers skip a step whose norm is not finite; it has no part in the mean norm.
        """
        if self._rank == 0:
            taken = torch.isfinite(gradient_norm)
            self._sums[2] += torch.where(taken, gradient_norm, 0.0)
            self._sums[4] += ~taken
            self._sums[5] += 1

    def fetch(self, stop: bool = False, own_seconds: float = 0.0) -> tuple[dict[str, float], bool]:
        """Means over the steps since the last fetch, over all ranks, and whether any rank asks to ``stop``.

        ``skipped_steps`` is a number of steps; ``gradient_norm`` is the mean over the others. ``own_seconds`` is what this
        rank tells all others of its own work.
        The host waits for the device here; every rank must call it after the same step.
        """
        # Filled: an assignment copies from the host, which then waits for the device.
        self._sums[-1].fill_(float(stop))
        self._all[self._rank].fill_(own_seconds)
        values = all_reduce_sum_(self._all).tolist()
        ranks = len(self.own_seconds)
        self.own_seconds, (*sums, steps, stopping) = values[:ranks], values[ranks:]
        means = {name: total / max(1, steps) for name, total in zip(self.NAMES, sums, strict=True)}
        skipped = means["skipped_steps"] = sums[self.NAMES.index("skipped_steps")]
        # It was divided by all steps, but skipped ones have added nothing to it.
        means["gradient_norm"] *= max(1, steps) / max(1, steps - skipped)
        self._all.zero_()
        return means, stopping > 0
