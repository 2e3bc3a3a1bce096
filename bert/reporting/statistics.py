"""Statistics of training steps, summed on the device until the host fetches them."""

import torch
from torch import Tensor

from bert.parallel.mesh import Mesh, all_reduce_


class Statistics:
    """Running sums over this rank's steps, kept on the device: mean losses, gradient norm, tokens and skipped steps."""

    NAMES = ("masked_lm_loss", "next_sentence_loss", "gradient_norm", "tokens", "skipped_steps")

    def __init__(self, mesh: Mesh) -> None:
        self.own_seconds = [0.0] * mesh.world_size
        """Seconds per step of each rank's own work, from the last fetch."""
        self._rank, self._counts = mesh.rank, mesh.counts_losses
        # One vector holds all values, so that one all-reduce is enough: the own seconds of each rank (each rank fills only
        # its own entry), one sum for each name, the number of steps, and the request to stop. It is fp64 so that token
        # counts stay exact.
        size = mesh.world_size + len(self.NAMES) + 2
        self._all = torch.zeros(size, dtype=torch.float64, device=mesh.device)
        self._sums = self._all[mesh.world_size :]

    def add_micro_batch(self, masked_lm_loss: Tensor, next_sentence_loss: Tensor, tokens: Tensor) -> None:
        """Add a micro-batch's contributions to the global batch's mean losses, and its number of tokens, all []."""
        if not self._counts:  # only one of the ranks that share a copy of the model counts
            return
        self._sums[0] += masked_lm_loss.detach()
        self._sums[1] += next_sentence_loss.detach()
        self._sums[3] += tokens

    def add_step(self, gradient_norm: Tensor) -> None:
        """Count a step and add its gradient norm. A norm that is not finite means that the step was skipped.

        Only rank 0 counts, because the norm is the same on all ranks.
        """
        if self._rank == 0:
            taken = torch.isfinite(gradient_norm)
            self._sums[2] += torch.where(taken, gradient_norm, 0.0)
            self._sums[4] += ~taken
            self._sums[5] += 1

    def fetch(self, stop: bool = False, own_seconds: float = 0.0) -> tuple[dict[str, float], bool]:
        """Return means over all steps since the last fetch and over all ranks, and whether any rank asks to ``stop``.

        ``skipped_steps`` is a count, and ``gradient_norm`` is the mean over the steps that were not skipped.
        ``own_seconds`` is sent to all ranks. The host waits for the device here. Every rank must call this after the same
        step.
        """
        # ``fill_`` does not block. An assignment would copy from the host and wait for the device.
        self._sums[-1].fill_(float(stop))
        self._all[self._rank].fill_(own_seconds)
        values = all_reduce_(self._all).tolist()
        ranks = len(self.own_seconds)
        self.own_seconds, (*sums, steps, stopping) = values[:ranks], values[ranks:]
        means = {name: total / max(1, steps) for name, total in zip(self.NAMES, sums, strict=True)}
        skipped = means["skipped_steps"] = sums[self.NAMES.index("skipped_steps")]
        # This mean was divided by the number of all steps, but skipped steps added nothing to the sum.
        means["gradient_norm"] *= max(1, steps) / max(1, steps - skipped)
        self._all.zero_()
        return means, stopping > 0
