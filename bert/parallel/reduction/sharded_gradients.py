"""The sum of gradients of which a rank keeps its shard alone (ZeRO-2): buckets in two buffers that all of them use in turn.

Autograd gives every parameter a gradient of its own. When those of a bucket are there they are packed into a buffer and
freed; the buffer is reduced and scattered beside the rest of the backward pass, and this rank's part of it added to its
shard. So at any time there are the shard, two buffers, and what has come of buckets that are not complete: about a layer's
gradients. What it costs: every micro-batch of a step sends its own, where whole gradients are sent once.

PyTorch's FSDP2 shards gradients as well, by parameter and as DTensors; LAMB, checkpoints and the kernels work on flat
vectors of plain tensors.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from bert.configuration.sections import ReduceDtype, ReductionStrategy, TrainingConfig
from bert.optimizer import FlatParameters
from bert.parallel.reduction.gradients import Communicators, Reduction, bucket_slices
from bert.parallel.reduction.sums import shard_of

BUFFERS = 2
"""One on its way while the next is filled; messages follow one another, so that more would wait."""


def gradient_elements(size: int, copies: int, bucket_bytes: int) -> int:
    """Count the elements that a rank of so many copies holds of ``size`` gradients, besides its shard.

    They are those of the buffers, or all where it is alone.
    """
    if copies == 1:
        return size
    return BUFFERS * max(bucket.stop - bucket.start for bucket in bucket_slices(size, copies, bucket_bytes))


class ShardedReduction(Reduction):
    """``Reduction`` with the strategy sharded or sharded_world, of a ``FlatParameters`` without gradients.

    Shape legend: B elements of a bucket, W of this rank's shard, its part of every bucket.

    Each micro-batch's backward pass runs under ``overlapped``, which ends when its sums are there. With sharded these are of
    the node; the rails' sums, of all micro-batches at once, come with the last one or in ``finish``.
    """

    def __init__(
        self,
        flat: FlatParameters,
        communicators: Communicators,
        strategy: ReductionStrategy,
        reduce_dtype: ReduceDtype = "fp32",
        bucket_bytes: int = TrainingConfig.bucket_bytes,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``waiting`` surrounds what the backward pass waits for other ranks."""
        super().__init__(flat, communicators, strategy, reduce_dtype, bucket_bytes)
        sizes = [bucket.stop - bucket.start for bucket in self.buckets]
        shards = 1 if self.shard_group is None else self.shard_group.size()
        # A bucket's part of the shard begins where that of the one before ends.
        stops = (torch.tensor(sizes).cumsum(0) // shards).tolist()
        self._shard_W = flat.weights_N.new_zeros(stops[-1])
        self._own = [slice(stop - size // shards, stop) for stop, size in zip(stops, sizes, strict=True)]
        """Where this rank's part of each bucket lies in its shard."""
        self._buffers = [flat.weights_N.new_empty(max(sizes)) for _ in range(BUFFERS)]
        self._until_free: list[Callable[[], None]] = []
        """What waits for each buffer."""
        self._packed = 0
        """Buckets so far, which take the buffers in turn."""
        self._parts: list[list[tuple[nn.Parameter, int]]] = [[] for _ in self.buckets]
        """The parameters that have a part in each bucket, and where they begin, counted from the bucket's start."""
        for parameter, touched in self._touched.items():
            for bucket in touched:
                self._parts[bucket].append((parameter, flat.places[parameter].start - self.buckets[bucket].start))
        self._expected: set[int] = set()
        """The buckets that this backward pass fills."""
        self._is_last = False
        self._along_rails = False
        """Whether this step's sums have been on their way along the rails."""
        self._wait = waiting

    @property
    def own_sums(self) -> Tensor:
        """[W] the sums of this rank's shard, bucket after bucket, of all micro-batches since they were set to zero."""
        return self._shard_W

    @contextmanager
    def overlapped(self, last: bool = True, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[None]:
        """Sum the gradients of the backward pass in the body, or those that it leaves with ``parameters``, if not all.

        Every rank must do so at the same time. ``last``: the rails' sums are made with these.
        """
        parameters = list(self._touched if parameters is None else parameters)
        self._expected = {bucket for parameter in parameters for bucket in self._touched[parameter]}
        self._is_last = last
        self._until_free = [lambda: None] * BUFFERS  # all are: a captured pass must not wait for one before its capture
        with super().overlapped(parameters=parameters):
            yield
        # Those that no hook has started: buckets with a parameter that got no gradient.
        self._start(len(self.buckets))
        self._started, self._along_rails = 0, last
        if not last:
            with self._wait():
                # The next pass takes both buffers for free, and a capture must join what it forked; the last has
                # ``finish`` for both.
                self.stream.join()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until this rank's shard has the sums of all micro-batches since the last call."""
        if not self._along_rails:
            for bucket in range(len(self.buckets)):
                self.stream.run(lambda bucket=bucket: self._sum_along_rail(bucket))
        self._along_rails = False
        self.stream.join()

    @torch.no_grad()
    def _start(self, stop: int) -> None:
        for bucket in range(self._started, stop):
            if bucket in self._expected:
                buffer, self._packed = self._packed % BUFFERS, self._packed + 1
                with self._wait():
                    self._until_free[buffer]()
                packed_B = self._pack(bucket, self._buffers[buffer])
                self._until_free[buffer] = self.stream.run(
                    lambda bucket=bucket, packed_B=packed_B, last=self._is_last: self._add(bucket, packed_B, last)
                )
        self._started = stop

    def _pack(self, bucket: int, buffer: Tensor) -> Tensor:
        """Put a bucket's gradients into their places, and free those of which no part is left to send."""
        size = self.buckets[bucket].stop - self.buckets[bucket].start
        packed_B = buffer[:size].zero_()  # padding, and parameters without a gradient, add zeros
        for parameter, start in self._parts[bucket]:
            if parameter.grad is None:
                continue
            stop = start + parameter.numel()
            gradient = parameter.grad.reshape(-1)[max(0, -start) : min(size, stop) - start]
            packed_B[max(0, start) : min(size, stop)] = gradient
            if bucket == self._touched[parameter][-1]:  # buckets go from the vector's end to its start
                parameter.grad = None
        return packed_B

    @torch.no_grad()
    def _add(self, bucket: int, packed_B: Tensor, last: bool) -> None:
        self._sums.reduce_scatter_(packed_B, self.shard_group)
        # Added, since every micro-batch of a step brings sums of its own.
        self._shard_W[self._own[bucket]] += shard_of(packed_B, self.shard_group)
        if last:
            self._sum_along_rail(bucket)

    @torch.no_grad()
    def _sum_along_rail(self, bucket: int) -> None:
        if self.strategy == "sharded":
            self._sums.all_reduce_(self._shard_W[self._own[bucket]], self.communicators.rail)
