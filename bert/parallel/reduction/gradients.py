"""The sum of the flat gradient over all ranks: in buckets, while backward still runs.

Losses are divided by counts of the whole global batch, so that gradients add up: nothing is scaled before or after.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert.configuration.sections import InNetwork, ReduceDtype, ReductionStrategy, TrainingConfig
from bert.optimizer import ALIGNMENT, FlatParameters
from bert.parallel.mesh import Mesh, process_group, require_order
from bert.parallel.reduction.sums import Bf16Sums, Fp32Sums, shard_of
from bert.parallel.single import all_gather_single


@dataclass(frozen=True)
class Way:
    """Way in which gradients are summed.

    flat: one all-reduce over all ranks. hierarchical: reduce-scatter in the node, all-reduce of each shard across nodes
    along its rail, all-gather in the node. sharded: the same without the all-gather; ``WeightGather`` gathers weights
    instead. sharded_world: reduce-scatter over all ranks, and weights gathered over all. With tensor parallelism, ranks are
    here those of a data group, which have the same shards of the model. ``in_network``: what goes along the rails is added
    up in the switches.
    """

    strategy: ReductionStrategy
    in_network: bool = False

    def __str__(self) -> str:
        """Name the way as a table or a log does."""
        return f"{self.strategy} in-network" if self.in_network else self.strategy


@dataclass(frozen=True)
class Communicators:
    """Groups of their own, so that reductions meet no other traffic: this rank's data group, its part in the node, the rail.

    None where this rank would be alone.
    """

    world: dist.ProcessGroup | None
    node: dist.ProcessGroup | None
    rail: dist.ProcessGroup | None
    world_size: int
    in_network_rail: dist.ProcessGroup | None = None
    """The rail once more, for sums in the switches."""
    why_not_in_network: str = ""
    """Why there is none."""

    @classmethod
    def create(cls, mesh: Mesh, in_network: InNetwork = "off", reduce_dtype: ReduceDtype = "fp32") -> "Communicators":
        """Create the groups; every rank must call it at the same time.

        Unless ``in_network`` is off, NCCL is asked for a second rail that adds up in the switches (CollNet, SHARP), where
        there are several hosts and what travels is fp32, as switches add in the type that travels. What NCCL does where
        switches cannot is its own affair: it sends as otherwise, and warns. Raises ``ValueError`` when it is on and cannot
        be asked for, or when this PyTorch has no groups in the order of local ranks.
        """
        require_order(mesh)
        options, why_not = None, "as set"
        if in_network != "off":
            options, why_not = _in_network_options(mesh, reduce_dtype)
            if in_network == "on" and options is None and len(mesh.rail_ranks) > 1:
                raise ValueError(f"training.in_network is on, but {why_not}: set it to auto or off")
        return cls(
            # In one order on all ranks: each group is made when all of its ranks ask for it.
            process_group(mesh.data_ranks),
            process_group(mesh.node_data_ranks),
            process_group(mesh.rail_ranks),
            mesh.data_size,
            process_group(mesh.rail_ranks, options) if options is not None else None,
            why_not,
        )

    def along(self, way: Way) -> "Communicators":
        """Return these communicators with the rail that ``way`` uses."""
        return replace(self, rail=self.in_network_rail) if way.in_network else self

    def settle(self, way: Way) -> "Communicators":
        """The same for good: the other rail is given back, as switches have few trees to give. Every rank must call it."""
        unused = self.rail if way.in_network else self.in_network_rail
        if unused is not None:
            dist.destroy_process_group(unused)
        return replace(self.along(way), in_network_rail=None)


def _in_network_options(mesh: Mesh, reduce_dtype: ReduceDtype = "fp32") -> tuple[Any, str]:
    """``ProcessGroupNCCL.Options`` that ask for sums in the switches; or None, and why."""
    if len(mesh.rail_ranks) == 1:
        return None, "one host"
    if reduce_dtype == "bf16":
        return None, "switches would add in bf16"
    if mesh.device.type != "cuda":
        return None, "gloo has none"
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options.config, "collnet_enable"):
        return None, "this PyTorch cannot ask NCCL for it"
    setattr(options.config, "collnet_enable", 1)  # noqa: B010  absent from PyTorch's type stubs
    return options, ""


class CommunicationStream:
    """Stream of collectives that run in order beside the computation: a stream on a GPU, a thread otherwise.

    On a GPU neither ``run`` nor ``join`` makes the host wait, so that both can be captured in a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        # High priority: a collective's few blocks would otherwise queue behind waves of a matrix product's blocks.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # One thread: all ranks must begin collectives in the same order.
        self._thread = None if self._stream else ThreadPoolExecutor(1, thread_name_prefix="reduction")
        self._pending: list[Future[None]] = []

    def run(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do ``work`` after all that was computed, and all that was handed over, before.

        Returns what makes all that is computed from then on come after the work; it raises what the work raised.
        """
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())  # gradients must be there before they are sent
            # Without record_stream: what the work reads and writes is allocated once for the run, and never given back.
            with torch.cuda.stream(self._stream):
                work()
            # An event for each work, so that who waits for a bucket does not wait for those behind it.
            done = torch.cuda.Event()
            done.record(self._stream)
            return lambda: torch.cuda.current_stream().wait_event(done)
        assert self._thread is not None
        pending = self._thread.submit(work)
        self._pending.append(pending)
        return pending.result

    def join(self) -> None:
        """Let what is computed from now on come after all that was handed over. Raises what the work raised."""
        if self._stream:
            # In a capture this also joins what ``run`` has forked; one that ends before that is an error of CUDA.
            torch.cuda.current_stream().wait_stream(self._stream)
        pending, self._pending = self._pending, []
        for work in pending:
            work.result()


def bucket_slices(size: int, shards: int, bucket_bytes: int) -> list[slice]:
    """Slices of a flat fp32 vector in the order in which backward fills it, from its end to its start.

    Each divides into ``shards`` equal and aligned shards, as ``size`` must.
    """
    multiple = ALIGNMENT * shards
    assert size % multiple == 0
    step = max(1, bucket_bytes // (4 * multiple)) * multiple
    return [slice(max(0, stop - step), stop) for stop in range(size, 0, -step)]


class Reduction:
    """Sum of the flat gradient over all ranks, bucket by bucket.

    In the backward of the last micro-batch, under ``overlapped``, a bucket starts when the last of its gradients is there;
    ``finish`` starts the rest and waits. Without ``overlapped``, ``finish`` does it all.

    ``reduce_dtype`` is the type that travels; sums are fp32. With bf16 a gradient's contribution is rounded once, and so is
    each sum that is sent on: flat 2 times in all, sharded_world once, the others 3 times, or 1 less without node or rail.
    """

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
        self._gradients_N = flat.gradients_N
        # By the weights, since sharded gradients have no vector. What all copies divide, those of a node divide too.
        self.buckets = bucket_slices(len(flat.weights_N), communicators.world_size, bucket_bytes)
        self.stream = CommunicationStream(flat.weights_N.device)
        self._sums: Fp32Sums | Bf16Sums = Fp32Sums()
        if reduce_dtype == "bf16" and communicators.world is not None:
            # The last bucket is what is left, and may be shorter.
            longest = max(bucket.stop - bucket.start for bucket in self.buckets)
            self._sums = Bf16Sums(longest, flat.weights_N.device)
        self._armed = False
        self._started = 0
        self._waiting: list[int] = []
        """Of each bucket, the gradients that are still to come in this backward pass."""
        self._touched: dict[nn.Parameter, list[int]] = {}
        """The buckets that each parameter has a part in: it may lie across a boundary, and long ones across several."""
        self._hooks = list(self._hook(flat)) if communicators.world else []

    @contextmanager
    def overlapped(self, last: bool = True, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[None]:
        """Start buckets during the backward pass in the body, of which there must be exactly one.

        Nothing starts unless it is the ``last`` of the step, with which all gradients are there. ``parameters``: those that
        it gives gradients, if not all.
        """
        if not last:
            yield
            return
        self._expect(self._touched if parameters is None else parameters)
        # Counted first: a hook that runs from here on lowers the counts.
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def finish(self) -> None:
        """Reduce what has not been started; afterwards the gradients, or with sharded this rank's shards, are the sums."""
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

    @property
    def own_sums(self) -> Tensor | None:
        """[W] the sums of this rank's shard, bucket after bucket, where those are all that it keeps of the gradients."""
        return None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that each have a shard of the sum of a bucket; None where this one has all of it."""
        groups = self.communicators
        return {"sharded": groups.node, "sharded_world": groups.world}.get(self.strategy)

    def close(self) -> None:
        """Take the hooks off the model again."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, flat: FlatParameters) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for parameter, place in flat.places.items():
            touched = [
                i for i, bucket in enumerate(self.buckets) if bucket.start < place.stop and place.start < bucket.stop
            ]
            self._touched[parameter] = touched
            # Of a shared parameter all uses have been added up when its hook runs.
            yield parameter.register_post_accumulate_grad_hook(lambda _, touched=touched: self._filled(touched))

    def _expect(self, parameters: Iterable[nn.Parameter]) -> None:
        self._waiting = [0] * len(self.buckets)
        for parameter in parameters:
            for bucket in self._touched[parameter]:
                self._waiting[bucket] += 1

    def _filled(self, buckets: list[int]) -> None:
        if self._armed:  # hooks run in the passes of earlier micro-batches, too
            for bucket in buckets:
                self._waiting[bucket] -= 1
            ready = self._started
            # A bucket that is full waits for those before it.
            while ready < len(self._waiting) and self._waiting[ready] <= 0:
                ready += 1
            self._start(ready)

    def _start(self, stop: int) -> None:
        """Start buckets up to ``stop`` in order, so that all ranks start the same bucket next."""
        if self.communicators.world:
            for bucket in self.buckets[self._started : stop]:
                self.stream.run(lambda bucket=bucket: self._reduce(bucket))
        self._started = stop

    @torch.no_grad()
    def _reduce(self, bucket: slice) -> None:
        gradients, groups, sums = self._gradients_N[bucket], self.communicators, self._sums
        if self.strategy == "flat":
            sums.all_reduce_(gradients, groups.world)
            return
        if self.strategy == "sharded_world":
            sums.reduce_scatter_(gradients, groups.world)
            return
        # Between hosts goes a shard of the node's sum alone, by each rank along its rail.
        sums.reduce_scatter_(gradients, groups.node)
        sums.all_reduce_(shard_of(gradients, groups.node), groups.rail)
        if self.strategy == "hierarchical":
            sums.all_gather_(gradients, groups.node)
