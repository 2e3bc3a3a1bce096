"""Sum of gradients if each rank keeps only a shard of them (ZeRO-2). All buckets share two buffers, which take turns.

Autograd gives every parameter a separate gradient. When all gradients of a bucket are complete, they are copied into a
buffer and freed. The buffer is reduced and scattered during the rest of the backward pass, and the result is added to this
rank's shard. So a rank holds its shard, two buffers, and the gradients of incomplete buckets, which take about as much
memory as the gradients of one layer. The cost is that gradients are sent in every micro-batch, and not once per step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bert.configuration.sections import ReduceDtype, ReductionStrategy
from bert.execution.stopwatch import Stopwatch
from bert.optimizer import FlatParameters
from bert.parallel.reduction.gradients import Communicators, Reduction, shard_of

BUFFERS = 2
"""One buffer is sent while the next one is filled. Messages are sent one at a time, so a third buffer would only wait."""


class ShardedReduction(Reduction):
    """``Reduction`` with the strategy sharded or sharded_world, for ``FlatParameters`` that have no flat gradient.

    Shape legend: B elements of a bucket, W elements of this rank's shard, which is its part of every bucket.

    The backward pass of each micro-batch runs under ``overlapped``. With the strategy sharded, every micro-batch is summed
    over the node, and after the last micro-batch, the rails sum the totals.
    """

    own_sums: Tensor
    """Sums [W] of this rank's shard, bucket after bucket. Each micro-batch adds to them until they are set to zero."""

    def __init__(
        self,
        flat: FlatParameters,
        communicators: Communicators,
        strategy: ReductionStrategy,
        reduce_dtype: ReduceDtype,
        bucket_bytes: int,
        stopwatch: Stopwatch,
    ) -> None:
        """``stopwatch`` counts the time in which the backward pass waits for other ranks."""
        super().__init__(flat, communicators, strategy, reduce_dtype, bucket_bytes)
        sizes = [bucket.stop - bucket.start for bucket in self.buckets]
        shards = 1 if self.shard_group is None else self.shard_group.size()
        stops = (torch.tensor(sizes).cumsum(0) // shards).tolist()
        self.own_sums = flat.weights_N.new_zeros(stops[-1])
        self._own = [slice(stop - size // shards, stop) for stop, size in zip(stops, sizes, strict=True)]
        """For each bucket, the slice of this rank's shard that holds the rank's part of the bucket."""
        self._buffers = [flat.weights_N.new_empty(max(sizes)) for _ in range(BUFFERS)]
        self._until_free: list[Callable[[], None]] = []
        """For each buffer, a function that waits until the buffer is free."""
        self._is_last = False
        self._stopwatch = stopwatch

    @contextmanager
    def overlapped(self, last: bool = True) -> Iterator[None]:
        """Sum the gradients of the backward pass in the ``with`` block. Every rank must do so at the same time."""
        self._is_last = last
        # Both buffers are free here. Forget earlier work, because a captured pass must not wait for work before the capture.
        self._until_free = [lambda: None] * BUFFERS
        with super().overlapped():
            yield
        # Start the remaining buckets: hooks do not start a bucket if one of its parameters got no gradient.
        self._start(len(self.buckets))
        self._started = 0
        if not last:
            with self._stopwatch.waiting():
                # The next pass needs both buffers, and a capture must join its streams. ``finish`` does so at the end.
                self.stream.join()

    def finish(self) -> None:
        """Wait until this rank's shard contains the sums of all micro-batches."""
        self.stream.join()

    @torch.no_grad()
    def _start(self, stop: int) -> None:
        for bucket in range(self._started, stop):
            buffer = bucket % BUFFERS
            with self._stopwatch.waiting():
                self._until_free[buffer]()
            gradients_B = self._fill(bucket, self._buffers[buffer])
            self._until_free[buffer] = self.stream.run(
                lambda bucket=bucket, gradients_B=gradients_B, last=self._is_last: self._add(bucket, gradients_B, last)
            )
        self._started = stop

    def _fill(self, bucket: int, buffer: Tensor) -> Tensor:
        """Copy a bucket's gradients into a buffer, and free the gradients that have been copied completely."""
        size = self.buckets[bucket].stop - self.buckets[bucket].start
        gradients_B = buffer[:size].zero_()  # padding and parameters without a gradient add zeros
        for parameter, start in self._parts[bucket].items():
            if parameter.grad is None:
                continue
            stop = start + parameter.numel()
            gradients_B[max(0, start) : min(size, stop)] = parameter.grad.reshape(-1)[
                max(0, -start) : min(size, stop) - start
            ]
            # Buckets go from the vector's end to its start. So a parameter that begins in this bucket is copied completely.
            if start >= 0:
                parameter.grad = None
        return gradients_B

    @torch.no_grad()
    def _add(self, bucket: int, gradients_B: Tensor, last: bool) -> None:
        self._sums.reduce_scatter_(gradients_B, self.shard_group)
        own_sums = self.own_sums[self._own[bucket]]
        own_sums += shard_of(gradients_B, self.shard_group)
        if last and self.strategy == "sharded":
            self._sums.all_reduce_(own_sums, self.communicators.rail)
