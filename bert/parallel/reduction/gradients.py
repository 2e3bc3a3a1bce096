"""Sum of the flat gradient over all copies of the model, in buckets, while the backward pass still runs.

Losses are divided by the counts of the whole global batch, so gradients simply add up without any scaling.

Strategies: flat is one all-reduce over all ranks. hierarchical is a reduce-scatter in the node, an all-reduce of each shard
between nodes along its rail, and an all-gather in the node. sharded omits the all-gather; ``WeightGather`` gathers weights
instead. sharded_world is a reduce-scatter over all ranks, after which weights are gathered over all ranks. With tensor or
pipeline parallelism, "all ranks" are the ranks of a data group, which hold the same shards of the model.

Vectors are sent in fp32 or in bf16. A bf16 all-reduce of PyTorch's backends would round partial sums at every hop of a ring
or a tree, so the error would grow with the number of ranks (7 % of the norm with 4,096 ranks). Therefore ``Sums`` sends bf16
vectors by all-to-all and adds them in fp32.

Shape legend: N elements of a vector, R ranks of the group, W = N / R elements of a shard.
"""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bert.configuration.sections import ReduceDtype, ReductionStrategy, TrainingConfig
from bert.optimizer import ALIGNMENT, FlatParameters
from bert.parallel.mesh import Mesh, all_reduce_, barrier, process_group
from bert.parallel.reduction.between_sites import BetweenSites
from bert.parallel.single import all_gather_single, reduce_scatter_single

_ENOUGH_S = 3.0
_ROUNDS = 4


def shard_of(vector_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's shard of a vector, [W], as a view, or the whole vector if ``group`` is None (a single rank)."""
    return vector_N if group is None else vector_N.chunk(group.size())[group.rank()]


class Sums:
    """In-place collectives on fp32 vectors [N], which must divide into one shard per rank. Without a group, they do nothing.

    Vectors that are sent in fp32 are added by NCCL, gloo or network switches, in an order that these choose. Vectors that
    are sent in bf16 are added by this class in fp32. It rounds each contribution once before it is sent, and each sum once
    before it is gathered, for any number of ranks. Ranks send as many bytes as in a ring all-reduce.
    """

    def __init__(self, bf16_elements: int, device: torch.device) -> None:
        """Send vectors of up to ``bf16_elements`` elements in bf16, or vectors of any length in fp32 if this number is 0.

        Calls must follow one another on one stream or thread, because they share buffers.
        """
        # Allocate buffers once, because captured reductions contain their addresses.
        self._sent, self._received = torch.empty(2, bf16_elements, dtype=torch.bfloat16, device=device)

    def reduce_scatter_(self, vector_N: Tensor, group: dist.ProcessGroup | None) -> None:
        """Overwrite this rank's shard with the sum over the ranks, not rounded to bf16. Other shards become undefined."""
        if group is None:
            return
        if len(self._sent) == 0:
            # Reduce in place: NCCL allows the output to be this rank's own shard of the input.
            reduce_scatter_single(shard_of(vector_N, group), vector_N, group=group)
            return
        received_N = self._received[: len(vector_N)]
        # Each rank receives all contributions to its shard, because a reduce-scatter would round partial sums to bf16.
        dist.all_to_all_single(received_N, self._sent[: len(vector_N)].copy_(vector_N), group=group)
        add_contributions(received_N.view(group.size(), -1), out_W=shard_of(vector_N, group))

    def all_gather_(self, vector_N: Tensor, group: dist.ProcessGroup | None) -> None:
        """Fill the vector with the shards of all ranks, with the same values on every rank."""
        if group is None:
            return
        shard_W = shard_of(vector_N, group)
        if len(self._sent) == 0:
            all_gather_single(vector_N, shard_W, group=group)  # in place: the input is this rank's shard of the output
            return
        received_N = self._received[: len(vector_N)]
        all_gather_single(received_N, self._sent[: len(shard_W)].copy_(shard_W), group=group)
        # Overwrite the rank's own shard too with the rounded values that the other ranks get, so that all have equal sums.
        vector_N.copy_(received_N)

    def all_reduce_(self, vector_N: Tensor, group: dist.ProcessGroup | None) -> None:
        if len(self._sent) == 0 and group is not None:
            dist.all_reduce(vector_N, group=group)
            return
        self.reduce_scatter_(vector_N, group)
        self.all_gather_(vector_N, group)


def add_contributions(contributions_RW: Tensor, out_W: Tensor) -> None:
    """Add the bf16 contributions of all ranks in fp32. The order depends on the number of ranks, but not on timing."""
    torch.sum(contributions_RW, 0, dtype=torch.float32, out=out_W)


@dataclass(frozen=True)
class Communicators:
    """Process groups that only reductions use: this rank's data group, the members of it on this node, and the rank's rail.

    A group is None if this rank would be its only member.
    """

    data: dist.ProcessGroup | None
    node: dist.ProcessGroup | None
    rail: dist.ProcessGroup | None
    """The rail, or this site's part of it if there is an exchange ``between`` sites."""
    shards: int
    """Number of shards into which every bucket must divide."""
    between: BetweenSites | None = None
    """Sum along the rail between sites, or None if there is only one site, or if no site has several hosts."""
    everyone: dist.ProcessGroup | None = None
    """Group of all ranks that reduce gradients together, in all data groups, or None if these are all ranks of the run."""

    @classmethod
    def create(cls, mesh: Mesh, *, in_network: bool = False, is_flat: bool = False) -> "Communicators":
        """Create the groups. Every rank must call this at the same time. With ``is_flat``, ignore sites.

        ``in_network`` applies only to the rail: switches can hold few reduction trees, and only rails cross switches.
        """
        rails, shards, between = mesh.by_site(mesh.rail_ranks), mesh.data_size, None
        ranks = sorted(rank for node in mesh.nodes for rank in node)
        # All ranks create the groups in the same order, because creating a group waits for all of its ranks.
        data, node = process_group(mesh.data_ranks), process_group(mesh.node_data_ranks)
        if len(rails) > 1 and max(map(len, rails)) > 1 and not is_flat:
            between = BetweenSites(rails, mesh)
            shards *= between.pieces * len(rails)
        rail = mesh.own_site.rail_ranks if between else mesh.rail_ranks
        everyone = process_group(ranks) if len(ranks) < mesh.world_size else None
        return cls(data, node, process_group(rail, in_network=in_network), shards, between, everyone)


class CommunicationStream:
    """Stream of collectives that run in order alongside the computation: a CUDA stream on a GPU, otherwise a thread.

    On a GPU neither ``run`` nor ``join`` makes the host wait, so both can be captured in a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        # Use high priority, so that a collective's few thread blocks do not wait behind a matrix product's many blocks.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # Use a single thread, because all ranks must begin collectives in the same order.
        self._thread = None if self._stream else ThreadPoolExecutor(1, thread_name_prefix="reduction")
        self._pending: list[Future[None]] = []

    def run(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work`` after all earlier computation and all earlier work.

        Returns a function that makes all later computation wait for the work, and that raises the work's exceptions.
        """
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())  # gradients must be complete before they are sent
            # record_stream is not needed: the memory that the work reads and writes is allocated once per run.
            with torch.cuda.stream(self._stream):
                work()
            # One event per work item, so that waiting for a bucket does not wait for the buckets behind it.
            done = torch.cuda.Event()
            done.record(self._stream)
            return lambda: torch.cuda.current_stream().wait_event(done)
        assert self._thread is not None
        pending = self._thread.submit(work)
        self._pending.append(pending)
        return pending.result

    def join(self) -> None:
        """Make all later computation wait for all submitted work. Raises the work's exceptions."""
        if self._stream:
            # In a capture, this also joins the fork that ``run`` made. Without the join, CUDA reports an error.
            torch.cuda.current_stream().wait_stream(self._stream)
        pending, self._pending = self._pending, []
        for work in pending:
            work.result()


def bucket_slices(size: int, shards: int, bucket_bytes: int) -> list[slice]:
    """Return slices of a flat fp32 vector from its end to its start, the order in which the backward pass fills it.

    ``size`` must divide into ``shards`` equal and aligned shards, and so does each slice.
    """
    multiple = ALIGNMENT * shards
    assert size % multiple == 0
    step = max(1, bucket_bytes // (4 * multiple)) * multiple
    return [slice(max(0, stop - step), stop) for stop in range(size, 0, -step)]


class Reduction:
    """Sum of the flat gradient over all ranks, bucket by bucket.

    If the backward pass of the last micro-batch runs in ``overlapped``, the sum of a bucket starts when the bucket's last
    gradient is complete. ``finish`` starts the sums of the remaining buckets and waits for all buckets.

    ``reduce_dtype`` is the dtype in which vectors are sent; sums are fp32. With bf16, each gradient is rounded before it is
    sent, and each sum is rounded before it is sent on. So flat rounds twice, sharded_world once, and hierarchical and
    sharded three times, or less often if there is no node or rail group.
    """

    own_sums: Tensor | None = None
    """Contiguous sums [W] of this rank's shard if the rank keeps only its shard of the gradients, otherwise None."""

    def __init__(
        self,
        flat: FlatParameters,
        communicators: Communicators,
        strategy: ReductionStrategy,
        reduce_dtype: ReduceDtype = "fp32",
        bucket_bytes: int = TrainingConfig.bucket_bytes,
    ) -> None:
        self.strategy = strategy
        self.communicators = communicators
        self.shard_group = {"sharded": communicators.node, "sharded_world": communicators.data}.get(strategy)
        """Ranks that each have a shard of a bucket's sum, or None if this rank has the whole sum."""
        self._gradients_N = flat.gradients_N
        # Buckets divide among the ranks of all nodes, and therefore also among the ranks of one node.
        self.buckets = bucket_slices(len(flat.weights_N), communicators.shards, bucket_bytes)
        self.stream = CommunicationStream(flat.weights_N.device)
        sends_bf16 = reduce_dtype == "bf16" and communicators.data is not None
        # Take the maximum, because the last bucket holds the remainder and may be shorter.
        longest = max(bucket.stop - bucket.start for bucket in self.buckets)
        self._sums = Sums(longest if sends_bf16 else 0, flat.weights_N.device)
        self._armed = False
        self._started = 0
        self._waiting: list[int] = []
        """Number of gradients still to come in this backward pass, for each bucket."""
        self._parts = [
            {
                parameter: place.start - bucket.start
                for parameter, place in flat.places.items()
                if bucket.start < place.stop and place.start < bucket.stop
            }
            for bucket in self.buckets
        ]
        """For each bucket, the parameters with a part in it and their offsets from the bucket's start. A parameter may lie
        across one or more boundaries."""
        self._hooks = list(self._hook(flat)) if communicators.data else []

    @contextmanager
    def overlapped(self, last: bool = True) -> Iterator[None]:
        """Start the sum of each bucket during the backward pass in the ``with`` block, which must contain exactly one pass.

        Nothing starts unless this is the ``last`` backward pass of the step, which completes the gradients.
        """
        if not last:
            yield
            return
        self._waiting = [len(parts) for parts in self._parts]
        # From here on, the hooks decrement ``_waiting``, so it is set before this.
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def finish(self) -> None:
        """Reduce the remaining buckets. Afterwards the gradients, or this rank's shards of them, are the sums."""
        self._start(len(self.buckets))
        self._started = 0
        self.stream.join()

    def shard(self, flat_N: Tensor, bucket: slice) -> Tensor:
        """Return this rank's shard of a bucket of a flat vector, as a view."""
        return shard_of(flat_N[bucket], self.shard_group)

    @torch.no_grad()
    def gather(self, flat_N: Tensor, bucket: slice) -> None:
        """Fill a bucket of a flat vector with the shards of all ranks that share it."""
        if self.shard_group is not None:
            all_gather_single(flat_N[bucket], self.shard(flat_N, bucket), group=self.shard_group)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, flat: FlatParameters) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for parameter in flat.places:
            touched = [i for i, parts in enumerate(self._parts) if parameter in parts]
            # The hook of a shared parameter runs after all of its uses have added their gradients.
            yield parameter.register_post_accumulate_grad_hook(lambda _, touched=touched: self._filled(touched))

    def _filled(self, buckets: list[int]) -> None:
        if self._armed:  # hooks also run during earlier micro-batches
            for bucket in buckets:
                self._waiting[bucket] -= 1
            ready = self._started
            # Do not start a complete bucket while a bucket before it is incomplete.
            while ready < len(self._waiting) and self._waiting[ready] <= 0:
                ready += 1
            self._start(ready)

    def _start(self, stop: int) -> None:
        # Start buckets in order, so that all ranks start the same bucket next.
        if self.communicators.data:
            for bucket in self.buckets[self._started : stop]:
                self.stream.run(lambda bucket=bucket: self._reduce(bucket))
        self._started = stop

    @torch.no_grad()
    def _reduce(self, bucket: slice) -> None:
        gradients, groups, sums = self._gradients_N[bucket], self.communicators, self._sums
        if self.strategy == "flat":
            sums.all_reduce_(gradients, groups.data)
            return
        if self.strategy == "sharded_world":
            sums.reduce_scatter_(gradients, groups.data)
            return
        # Between hosts, each rank sends only its shard of the node's sum, along its rail.
        sums.reduce_scatter_(gradients, groups.node)
        sums.all_reduce_(shard_of(gradients, groups.node), groups.rail)
        if groups.between is not None:
            groups.between.all_reduce_(shard_of(gradients, groups.node), sums.all_reduce_)
        if self.strategy == "hierarchical":
            sums.all_gather_(gradients, groups.node)


def choose(config: TrainingConfig, flat: FlatParameters, communicators: Communicators) -> tuple[ReductionStrategy, str]:
    """Return this run's reduction strategy, the same on all ranks, and the reason for it.

    Call it only at start-up, because measuring zeroes the gradients.

    The setting ``auto`` measures the strategies flat and hierarchical if they differ in this run. It never chooses the
    sharded strategies: they save memory, and the time of their sums alone does not show whether they are faster. The time
    of a round is the slowest rank's time. Each strategy is judged by its best round, because the first round opens
    connections. No round begins after ``_ENOUGH_S`` seconds.
    """
    if communicators.data is None:
        return "flat", "one rank"
    if config.reduction != "auto":
        return config.reduction, "as set"
    if communicators.between is None and (communicators.rail is None or communicators.node is None):
        return "flat", "one host" if communicators.rail is None else "one rank a host"
    strategies: tuple[ReductionStrategy, ...] = ("flat", "hierarchical")
    settings = config.reduce_dtype, config.bucket_bytes
    reductions = [Reduction(flat, communicators, each, *settings) for each in strategies]
    # Every round sums the same memory, so any values other than zeros would grow from round to round.
    flat.gradients_N.zero_()
    device = flat.gradients_N.device
    best, spent = [math.inf] * len(strategies), 0.0
    for _ in range(_ROUNDS):
        times = torch.zeros(len(strategies), dtype=torch.float64, device=device)
        # Each round measures every strategy, so that a disturbance on the machine slows all of them.
        for place, reduction in enumerate(reductions):
            barrier(communicators.data)  # wait for late ranks, so that this wait is not measured
            begin = time.perf_counter()
            reduction.finish()
            # On a GPU, ``finish`` makes only the stream wait for the sums, so let the host wait here.
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[place] = time.perf_counter() - begin
        # The maximum is over all data groups, so that their ranks choose the same strategy.
        all_reduce_(times, "max", communicators.everyone)
        best = list(map(min, best, times.tolist()))
        spent += times.sum().item()
        if spent > _ENOUGH_S:  # ``spent`` is equal on all ranks, so all stop after the same round
            break
    for reduction in reductions:
        # Remove the hooks, which would otherwise run in every later backward pass.
        reduction.close()
    shown = ", ".join(f"{each} {1000 * seconds:.1f} ms" for each, seconds in zip(strategies, best, strict=True))
    return strategies[best.index(min(best))], shown
