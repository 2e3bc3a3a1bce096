"""LAMB whose state is divided among the ranks of a node (every node then holds the whole state) or among all ranks. The
parameters themselves may also be divided among the ranks of a copy of the model.

Shape legend: N flat parameters with padding, R ranks that share the state, W = N / R elements of a shard, G segments, K
spans to which trust ratios apply, I elements of W whose parameters are replicated in a tensor group.

A rank's shard consists of its part of every bucket of the reduction, one after the other. A span is a contiguous part of
one segment in the shard.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bert.configuration.sections import OptimizerConfig
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters, hyperparameters, learning_rate
from bert.parallel.reduction.gradients import Reduction
from bert.parallel.single import all_gather_single
from bert.parallel.tensor.shards import TensorParallel
from kernels import LambSegments, LambState, lamb_apply, lamb_directions, sum_of_squares


class ShardedLamb:
    """LAMB on this rank's shard of the weights, after a ``Reduction`` with the strategy sharded or sharded_world.

    If ``tensor`` or ``pipeline`` divides the model, use this class with the other strategies too, because norms must be
    summed over the ranks of a copy. With the other strategies, the shard is all of the rank's weights.

    A step updates each weight on the ranks that have it in their shard; ``WeightGather`` sends it to the other ranks. Sums
    over shards are added in the order of the ranks and are therefore equal on all ranks bit for bit. So weights stay equal
    as long as the rails' sums are equal. A step with a gradient that is not finite changes only ``skipped``.
    """

    def __init__(
        self,
        flat: FlatParameters,
        config: OptimizerConfig,
        reduction: Reduction,
        tensor: TensorParallel,
        pipeline: dist.ProcessGroup | None = None,
    ) -> None:
        self.flat = flat
        self.config = config
        self._reduction = reduction
        self._group = reduction.shard_group
        self._tensor = tensor
        self._pipeline = pipeline
        shard = len(flat.weights_N) // (self._group.size() if self._group else 1)
        device = flat.weights_N.device
        self.momentum_W, self.variance_W, self._weight_W, self._update_W = (
            flat.weights_N.new_zeros(shard) for _ in range(4)
        )
        self._gradient_W = flat.weights_N.new_zeros(shard) if reduction.own_sums is None else reduction.own_sums
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        """int64 [], number of steps taken."""
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        """int64 [], number of steps not taken because a gradient was not finite."""
        self._state = LambState(self.momentum_W, self.variance_W, self._update_W, self.skipped)
        # LAMB's segments cover the whole shard, so the padding behind the last segment is one more segment.
        sizes = *flat.segments.sizes, len(flat.weights_N) - len(flat.weights_P)
        adapted = *flat.segments.adapted, False
        everywhere = *tensor.on_all_ranks(flat), False
        spans = segment_spans(sizes, [self._own(bucket) for bucket in reduction.buckets])
        segments = [segment for segment, _, _ in spans]
        lengths = tuple(stop - start for _, start, stop in spans)
        self._spans = LambSegments(lengths, tuple(adapted[segment] for segment in segments))
        places = [torch.arange(start, stop) for segment, start, stop in spans if everywhere[segment]]
        # The empty tensor is needed because cat rejects an empty list.
        self._everywhere_I = torch.cat([torch.arange(0), *places]).to(device)
        self._counts = tensor.rank == 0
        """Whether this rank counts replicated parameters in norms. Only one rank of a tensor group does."""
        segments_K = torch.tensor([segment for segment in segments if adapted[segment]], dtype=torch.int64)
        counted_K = self._counts | ~torch.tensor(everywhere)[segments_K]
        # These tensors are on the device, so that a step does not wait for the host. A product with ``_counted_KG``
        # adds the spans of each segment, in a fixed order.
        self._segments_K = segments_K.to(device)
        self._counted_KG = (F.one_hot(segments_K, len(sizes)) * counted_K[:, None]).double().to(device)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Apply the reduced gradients to this rank's shard of the weights, and set all gradients to zero.

        Returns the gradients' global norm before clipping, [] on the device, equal on all ranks.
        """
        config, flat = self.config, self.flat
        # A rank's shard is scattered over the buckets, but LAMB needs contiguous vectors.
        if self._reduction.own_sums is None:
            self._collect(flat.gradients_N, self._gradient_W)
        self._collect(flat.weights_N, self._weight_W)
        gradient_W, weight_W = self._gradient_W, self._weight_W
        # Clipping needs the global norm over the gradients of all ranks.
        norm = _summed(self._over_shards(self._squares_with_sums_()), self._pipeline).sqrt().to(gradient_W.dtype)
        # Trust ratios need the norms of whole tensors, so the update pauses here to sum over the ranks that share tensors.
        squares_2K = lamb_directions(
            weight_W,
            gradient_W,
            self._state,
            self._spans,
            hyperparameters(config),
            norm=norm,
            step=self.steps + 1,
        )
        # Every rank takes part in the sums, even a rank without any element that a trust ratio scales.
        squares_2G = self._over_shards(squares_2K @ self._counted_KG)
        # The learning rate schedule counts steps from 0, but the bias corrections above count steps from 1.
        rate = learning_rate(config, self.steps).float()
        squares_2K = squares_2G[:, self._segments_K]
        lamb_apply(weight_W, self._state, self._spans, squares_2K, norm=norm, learning_rate=rate)
        self.steps += norm < torch.inf  # an infinite or NaN norm means that the step was skipped
        # Other ranks' shards of the weights keep the last step's values until weights are gathered.
        self._spread(weight_W, flat.weights_N)
        # Clear all gradients, because the reduction leaves arbitrary values outside this rank's shard.
        self._gradients.zero_()
        return norm

    @torch.no_grad()
    def reset(self) -> None:
        for tensor in (self.momentum_W, self.variance_W, self._gradients, self.steps, self.skipped):
            tensor.zero_()

    @property
    def _gradients(self) -> Tensor:
        # The next step's gradients are added to this tensor, so ``step`` clears it.
        return self.flat.gradients_N if self._reduction.own_sums is None else self._gradient_W

    @torch.no_grad()
    def moments(self) -> tuple[Tensor, Tensor]:
        """Return momentum and variance of all parameters, [P] each. All ranks must call it at the same time."""
        whole = []
        for shard_W in (self.momentum_W, self.variance_W):
            moment_N = torch.zeros_like(self.flat.weights_N)
            self._spread(shard_W, moment_N)
            for bucket in self._reduction.buckets:
                self._reduction.gather(moment_N, bucket)
            whole.append(moment_N[: len(self.flat.weights_P)])
        return whole[0], whole[1]

    @torch.no_grad()
    def set_moments_(self, momentum_P: Tensor, variance_P: Tensor) -> None:
        """Overwrite this rank's shard of the moments, given the moments of all parameters."""
        for shard_W, moment_P in ((self.momentum_W, momentum_P), (self.variance_W, variance_P)):
            moment_N = torch.zeros_like(self.flat.weights_N)
            moment_N[: len(moment_P)] = moment_P
            self._collect(moment_N, shard_W)

    def _squares_with_sums_(self) -> Tensor:
        """Sum replicated parameters' gradients over the tensor group. Return the sum of squares of this shard's gradients.

        The returned sum is fp64 []. Replicated parameters count on only one rank of the group.
        """
        gradient_W, everywhere_I = self._gradient_W, self._everywhere_I
        if len(everywhere_I) == 0:
            return sum_of_squares(gradient_W)
        summed_I = gradient_W[everywhere_I]
        dist.all_reduce(summed_I, group=self._tensor.group)
        gradient_W[everywhere_I] = summed_I
        squares = sum_of_squares(gradient_W)
        return squares if self._counts else squares - sum_of_squares(summed_I)

    def _over_shards(self, squares: Tensor) -> Tensor:
        return _summed(_summed(squares, self._group), self._tensor.group)

    def _collect(self, flat_N: Tensor, shard_W: Tensor) -> None:
        torch.cat([self._reduction.shard(flat_N, bucket) for bucket in self._reduction.buckets], out=shard_W)

    def _spread(self, shard_W: Tensor, flat_N: Tensor) -> None:
        start = 0
        for bucket in self._reduction.buckets:
            own = self._reduction.shard(flat_N, bucket)
            own.copy_(shard_W[start : start + len(own)])
            start += len(own)

    def _own(self, bucket: slice) -> tuple[int, int]:
        if self._group is None:
            return bucket.start, bucket.stop
        size = (bucket.stop - bucket.start) // self._group.size()
        start = bucket.start + size * self._group.rank()
        return start, start + size


def _summed(squares: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over a group in the order of its ranks, so that the result is equal on all of them."""
    if group is None:
        return squares
    gathered = squares.new_empty(group.size() * squares.numel())
    # Do not use an all-reduce: its order may differ between ranks, so their weights would drift apart.
    all_gather_single(gathered, squares.flatten(), group=group)
    return gathered.view(group.size(), *squares.shape).sum(0)


def segment_spans(sizes: tuple[int, ...], owned: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Divide a shard into spans at the ends of segments, and return (segment, start, stop) of each span.

    The shard consists of the ``owned`` ranges of the flat vector, one after another. Spans count from its beginning.
    """
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    spans, base = [], 0
    for begin, end in owned:
        for segment, (first, last) in enumerate(bounds):
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                spans.append((segment, base + start - begin, base + stop - begin))
        base += end - begin
    return spans


class WeightGather:
    """Gathering of updated weights, either all at once by a call, or during the forward pass that follows ``start``.

    After an update, a rank has new weights only in its own shard. The next step gathers all buckets in the order in which
    its forward pass needs them. Before the embeddings and before each layer except the last one, the forward pass waits for
    the buckets of that module's weights. After the last of these modules, it waits for all buckets, because the last layer
    and the heads are not called as modules.
    """

    def __init__(self, model: BertForPreTraining, flat: FlatParameters, reduction: Reduction) -> None:
        self._reduction = reduction
        self._weights_N = flat.weights_N
        self.buckets = reduction.buckets[::-1]
        """Buckets from the start of the vector, in the order in which the forward pass needs them."""
        self._arrivals: list[Callable[[], None]] = []
        parts = [model.embeddings, *model.layers[:-1]]
        for part in parts:
            stop = max((flat.places[parameter].stop for parameter in part.parameters()), default=0)
            # Buckets arrive in the vector's order, so a part needs all buckets up to its last weight. ``default`` is
            # for the parts of other stages, which have no parameters.
            needed = sum(bucket.start < stop for bucket in self.buckets)
            part.register_forward_pre_hook(lambda *_, needed=needed: self.wait(needed))
        parts[-1].register_forward_hook(lambda *_: self.finish())

    def __call__(self) -> None:
        """Gather all weights before anything else is computed. Every rank must call it at the same time."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Start to gather weights. The next forward pass waits for them when it needs them. All ranks must call this."""
        stream = self._reduction.stream
        # The gathering waits for the update. Later computation waits only for the buckets that it needs (``wait``).
        self._arrivals = [stream.run(lambda bucket=bucket: self._gather(bucket)) for bucket in self.buckets]

    def wait(self, count: int) -> None:
        """Make later computation wait for the first ``count`` buckets, if weights are being gathered."""
        if self._arrivals:
            self._arrivals[count - 1]()  # buckets arrive in order

    def finish(self) -> None:
        """Make later computation wait for all buckets."""
        if self._arrivals:
            self._arrivals = []
            self._reduction.stream.join()

    def _gather(self, bucket: slice) -> None:
        self._reduction.gather(self._weights_N, bucket)
