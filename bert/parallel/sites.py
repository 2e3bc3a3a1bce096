"""Training on several sites, which are groups of hosts with slow links between them. Each site takes steps by itself.

A site takes ``site_steps`` steps of LAMB on its share of the global batches. Then the sites exchange how far their weights
have moved since the last exchange, and a Nesterov momentum moves the shared weights by the mean of these changes (DiLoCo,
arXiv 2311.08105). The exchange runs beside the next ``site_delay`` steps. Then each site continues from the shared weights,
to which it adds its own steps since the exchange began. The delay is a number of steps, so that results do not depend on the
speed of the link.

Shape legend: P elements of this rank's parameters, K elements of a piece, B = K / 256 blocks, C bytes.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from bert.configuration.sections import SiteDtype, TrainingConfig
from bert.execution.phases import SITE_WAIT
from bert.execution.stopwatch import Stopwatch
from bert.parallel.mesh import Mesh, all_reduce_
from bert.parallel.reduction.between_sites import BetweenSites
from bert.parallel.reduction.gradients import CommunicationStream
from bert.parallel.single import all_gather_single

BLOCK = 256
"""Number of int8 elements that share a scale of 4 bytes."""


def encoded(change_K: Tensor, dtype: SiteDtype) -> Tensor:
    """Encode a vector of fp32 as bytes, uint8 [C]. In int8, K must be a multiple of ``BLOCK``."""
    if dtype != "int8":
        return change_K.to(torch.bfloat16 if dtype == "bf16" else torch.float32).view(torch.uint8)
    change_BK = change_K.view(-1, BLOCK)
    scale_B1 = change_BK.abs().amax(1, keepdim=True) / 127
    # The quotients of a block of zeros are NaN, because its scale is 0. Encode them as zeros.
    code_BK = (change_BK / scale_B1).nan_to_num(0.0).round().to(torch.int8)
    return torch.cat([code_BK.view(-1).view(torch.uint8), scale_B1.view(-1).view(torch.uint8)])


def decoded(code_C: Tensor, dtype: SiteDtype) -> Tensor:
    """Decode bytes from ``encoded`` to a vector, fp32 [K], whose elements are rounded to ``dtype``."""
    if dtype != "int8":
        return code_C.view(torch.bfloat16 if dtype == "bf16" else torch.float32).float()
    blocks = len(code_C) // (BLOCK + 4)
    code_BK = code_C[: blocks * BLOCK].view(torch.int8).view(blocks, BLOCK)
    return (code_BK * code_C[blocks * BLOCK :].view(torch.float32)[:, None]).view(-1)


class SiteExchange:
    """Exchanges of weights between sites. ``after_step`` begins and applies them. ``settle`` completes them at once."""

    def __init__(self, weights_P: Tensor, config: TrainingConfig, mesh: Mesh, stopwatch: Stopwatch) -> None:
        """``weights_P``, which the exchanges update, must be equal in all sites now. All ranks must call this together."""
        self._weights_P, self._config, self._stopwatch = weights_P, config, stopwatch
        sites = mesh.by_site(mesh.data_ranks)
        self._between = BetweenSites(sites, mesh)
        # Padding at the end lets every piece be divided into blocks.
        length = BLOCK * -(-len(weights_P) // (BLOCK * self._between.pieces))
        self._slices = self._between.slices(length * self._between.pieces)
        self._shared_N, self._sent_N, self._momentum_N = weights_P.new_zeros(3, length * self._between.pieces)
        """In this order: the weights that all sites share, this site's weights when the last exchange began, and the
        momentum of the shared weights. A rank knows only the pieces of the momentum that it owns."""
        self._residuals = {place: weights_P.new_zeros(length) for place in self._between.owned}
        """Rounding errors of the last exchange for each piece that this rank owns. The next exchange sends them too."""
        share_of = {rank: len(ranks) / mesh.data_size for ranks in sites for rank in ranks}
        self._share = share_of[mesh.rank]
        """This site's share of the samples."""
        self._shares = {
            place: [share_of[rank] for rank in dist.get_process_group_ranks(group)]
            for place, group in self._between.owned.items()
        }
        self._stream = CommunicationStream(weights_P.device)
        self._in_progress = False
        self._steps = 0
        """Number of steps since the last exchange began."""
        lengths = torch.tensor([length, len(encoded(weights_P.new_zeros(length), config.site_dtype))])
        sent = (len(sites) - 1) * len(self._between.owned) * lengths.to(weights_P.device)
        self._elements, self._bytes = all_reduce_(sent).tolist()
        """Number of elements that all ranks together send between sites in one exchange, and their bytes after encoding."""
        self._bytes_sent = 0
        self.restore_()
        # Exchange equal weights. This changes no weight, but opens the connections before the clock starts.
        self._begin()
        self._end()
        self.take_bytes()

    def begins_after(self, steps: int) -> bool:
        return steps % self._config.site_steps == 0

    def after_step(self, steps: int) -> bool:
        """Begin or apply an exchange if one is due after ``steps`` steps of the run; return whether weights have changed."""
        self._steps += 1
        is_due = self._in_progress and self._steps == self._config.site_delay
        if is_due:
            self._end()
        if self.begins_after(steps):
            self._begin()
        return is_due

    def settle(self) -> bool:
        """Give all sites the same weights now, by an exchange of everything that they have changed.

        Returns whether weights have changed.
        """
        changes = self._in_progress or self._steps > 0
        if self._in_progress:
            self._end()
        if self._steps:  # no exchange has included these steps yet
            self._begin()
            self._end()
        return changes

    def mean(self, vector_P: Tensor) -> Tensor:
        """Return the mean of a vector over the sites, weighted by the sites' shares of the samples."""
        mean_P = vector_P * self._share
        with self._stopwatch.time(SITE_WAIT):
            self._between.all_reduce_(mean_P, lambda piece, group: all_reduce_(piece, group=group))
        # An all-reduce sends each fp32 element twice: to be summed, and as part of the sum.
        self._bytes_sent += 2 * 4 * self._elements // len(next(iter(self._shares.values())))
        return mean_P

    def momentum(self) -> Tensor:
        """Return the momentum of the shared weights, [P], and clear the residuals, which checkpoints do not store.

        So a run that goes on and a run that continues from the checkpoint both have no residuals, and get equal results.
        """
        for residual_K in self._residuals.values():
            residual_K.zero_()
        self._between.spread(self._momentum_N, self._slices)
        return self._momentum_N[: len(self._weights_P)]

    @torch.no_grad()
    def restore_(self, momentum_P: Tensor | None = None) -> None:
        """Make this rank's weights, which are equal in all sites, the shared weights. Overwrite the momentum if given."""
        self._shared_N[: len(self._weights_P)] = self._weights_P
        if momentum_P is not None:
            self._momentum_N[: len(momentum_P)] = momentum_P

    def take_bytes(self) -> int:
        """Return the bytes that all ranks have sent between sites since the last call."""
        taken, self._bytes_sent = self._bytes_sent, 0
        return taken

    @torch.no_grad()
    def _begin(self) -> None:
        self._sent_N[: len(self._weights_P)] = self._weights_P
        self._in_progress, self._steps = True, 0
        self._stream.run(self._exchange)
        self._bytes_sent += self._bytes

    @torch.no_grad()
    def _end(self) -> None:
        with self._stopwatch.time(SITE_WAIT):
            self._stream.join()
        size = len(self._weights_P)
        # In this order, the weights become exactly the shared ones if the site has taken no step since the exchange began.
        self._weights_P.sub_(self._sent_N[:size]).add_(self._shared_N[:size])
        self._in_progress = False

    @torch.no_grad()
    def _exchange(self) -> None:
        """Move the shared weights by the mean of the sites' changes."""
        config = self._config
        for place, group in self._between.owned.items():
            piece, residual_K = self._slices[place], self._residuals[place]
            shared_K, momentum_K = self._shared_N[piece], self._momentum_N[piece]
            # The sign is that of a gradient: a positive change makes the shared weight smaller.
            change_K = shared_K - self._sent_N[piece] + residual_K
            code_C = encoded(change_K, config.site_dtype)
            received = code_C.new_empty(len(self._shares[place]) * len(code_C))
            all_gather_single(received, code_C, group=group)
            changes = [decoded(each_C, config.site_dtype) for each_C in received.view(-1, len(code_C))]
            torch.sub(change_K, decoded(code_C, config.site_dtype), out=residual_K)
            mean_K = sum(share * each_K for share, each_K in zip(self._shares[place], changes, strict=True))
            momentum_K.mul_(config.site_momentum).add_(mean_K)
            shared_K.sub_(config.site_learning_rate * (mean_K + config.site_momentum * momentum_K))
        self._between.spread(self._shared_N, self._slices)
