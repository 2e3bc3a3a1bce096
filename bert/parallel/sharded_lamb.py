# pyright: reportPrivateImportUsage=false
"""LAMB with its state divided among the ranks of a node: every node holds the whole of it.

Shape legend: N flat parameters with padding, R ranks of the node, W = N / R elements of a shard, G segments, K pieces.

A rank's shard is its piece of every bucket of the reduction, one after the other. A piece here is what one segment has in
the shard without a gap.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from bert.config import OptimizerConfig
from bert.optimizer import FlatParameters, learning_rate_tensor
from bert.parallel.reduction import Reduction
from kernels.lamb import bias_corrections, clip_factor


class ShardedLamb:
    """As ``bert.optimizer.Lamb``, after a ``Reduction`` with the strategy sharded.

    Sums over shards are added in the order of the ranks, and hence equal on all nodes to the last bit; so weights stay equal
    as long as the rails' sums are. A step whose gradients are not all finite changes nothing but ``skipped``.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, reduction: Reduction) -> None:
        assert reduction.strategy == "sharded"
        self.flat = flat
        self.config = config
        self._reduction = reduction
        self._node = reduction.communicators.node
        shard = len(flat.weights_N) // reduction.communicators.node_size
        device = flat.weights_N.device
        self.momentum_W, self.variance_W, self._gradient_W, self._weight_W, self._update_W = (
            torch.zeros(shard, device=device) for _ in range(5)
        )
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        """int64 [], the steps taken."""
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        """int64 [], the steps not taken because a gradient was not finite."""
        pieces = shard_pieces(flat.segments.sizes, [self._own(bucket) for bucket in reduction.buckets])
        adapted = [piece for piece in pieces if flat.segments.adapted[piece[0]]]
        self._slices = [slice(start, stop) for _, start, stop in adapted]
        self._segments_K = torch.tensor([segment for segment, _, _ in adapted], dtype=torch.int64, device=device)
        self._rows_GK = _rows([segment for segment, _, _ in adapted], len(flat.segments.sizes)).to(device)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Apply the reduced gradients, set them to zero and give every rank of the node the new weights.

        Returns the gradients' global norm before clipping, [] on the device, and the same on all ranks.
        """
        config, flat = self.config, self.flat
        self._collect(flat.gradients_N, self._gradient_W)
        self._collect(flat.weights_N, self._weight_W)
        gradient_W, weight_W, update_W = self._gradient_W, self._weight_W, self._update_W
        norm = self._norm_over_shards(torch.linalg.vector_norm(gradient_W))
        taken = torch.isfinite(norm)
        rate = learning_rate_tensor(config, self.steps) * taken
        self.steps += taken
        self.skipped += ~taken
        gradient_W.mul_(clip_factor(norm, config.max_grad_norm))
        gradient_W.masked_fill_(~taken, 0.0)
        # Factors lie on the device: of a step that is not taken they are those that change nothing.
        self.momentum_W.lerp_(gradient_W, (1 - config.beta_1) * taken)
        self.variance_W.mul_(torch.where(taken, config.beta_2, 1.0))
        self.variance_W.addcmul_(gradient_W, gradient_W, value=1 - config.beta_2)
        momentum_correction, root_correction = bias_corrections(self.steps.clamp(min=1), config.beta_1, config.beta_2)
        torch.sqrt(self.variance_W, out=update_W)
        update_W.mul_(root_correction).add_(config.epsilon)
        torch.div(self.momentum_W, update_W, out=update_W)
        update_W.mul_(momentum_correction)
        self._adapt()
        weight_W.addcmul_(update_W, rate, value=-1)
        self._spread()
        flat.gradients_N.zero_()
        return norm

    @torch.no_grad()
    def reset(self) -> None:
        """Forget moments and counts, as after warm-up."""
        for tensor in (self.momentum_W, self.variance_W, self.flat.gradients_N, self.steps, self.skipped):
            tensor.zero_()

    def _adapt(self) -> None:
        """Weight decay and trust ratios. Every rank takes part in the sums, even one without adapted elements."""
        norms_2G = torch.zeros(2, len(self._rows_GK), dtype=torch.float64, device=self._update_W.device)
        weights, updates = ([shard_W[piece] for piece in self._slices] for shard_W in (self._weight_W, self._update_W))
        if weights:  # the batched ops refuse empty lists
            torch._foreach_add_(updates, weights, alpha=self.config.weight_decay_rate)
            for place, views in enumerate((weights, updates)):
                squares_K = torch.stack(torch._foreach_norm(views)).double().square()
                norms_2G[place] = torch.cat([squares_K, squares_K.new_zeros(1)])[self._rows_GK].sum(1).sqrt()
        weight_norms_G, update_norms_G = self._norm_over_shards(norms_2G).unbind()
        usable = (weight_norms_G > 0) & (update_norms_G > 0)
        ratios_G = torch.where(usable, weight_norms_G / update_norms_G, 1.0)
        if updates:
            torch._foreach_mul_(updates, list(ratios_G[self._segments_K].unbind()))

    def _norm_over_shards(self, norms: Tensor) -> Tensor:
        """Norms of whole vectors from those of the shards, fp32; squares are added in fp64, in the order of the ranks.

        In fp64, the root of one square rounds to the norm itself: what is not divided stays as it is to the last bit.
        """
        squares = norms.double().square()
        if self._node is not None:
            gathered = squares.new_empty(self._node.size() * squares.numel())
            dist.all_gather_single(gathered, squares.flatten(), group=self._node)
            squares = gathered.view(self._node.size(), *squares.shape).sum(0)
        return squares.sqrt().float()

    def _collect(self, flat_N: Tensor, shard_W: Tensor) -> None:
        torch.cat([self._reduction.piece(flat_N, bucket) for bucket in self._reduction.buckets], out=shard_W)

    def _spread(self) -> None:
        start = 0
        for bucket in self._reduction.buckets:
            piece = self._reduction.piece(self.flat.weights_N, bucket)
            piece.copy_(self._weight_W[start : start + len(piece)])
            start += len(piece)
            if self._node is not None:
                dist.all_gather_single(self.flat.weights_N[bucket], piece, group=self._node)

    def _own(self, bucket: slice) -> tuple[int, int]:
        if self._node is None:
            return bucket.start, bucket.stop
        size = (bucket.stop - bucket.start) // self._node.size()
        start = bucket.start + size * self._node.rank()
        return start, start + size


def shard_pieces(sizes: tuple[int, ...], owned: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(segment, start, stop) of each piece: places in the shard that ``owned`` ranges of the flat vector make in order."""
    pieces = []
    base = 0
    for begin, end in owned:
        segment_start = 0
        for segment, size in enumerate(sizes):
            start, stop = max(begin, segment_start), min(end, segment_start + size)
            if start < stop:
                pieces.append((segment, base + start - begin, base + stop - begin))
            segment_start += size
        base += end - begin
    return pieces


def _rows(segments: list[int], count: int) -> Tensor:
    """[G, longest] places of each segment's pieces, filled up with the place after the last: a sum in a fixed order."""
    rows = [[place for place, other in enumerate(segments) if other == segment] for segment in range(count)]
    longest = max(1, *map(len, rows))
    return torch.tensor([row + [len(segments)] * (longest - len(row)) for row in rows], dtype=torch.int64)
