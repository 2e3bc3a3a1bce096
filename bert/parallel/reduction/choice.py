"""The way in which this run sums its gradients: as it is set, or the one that is fastest here."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from bert.configuration.sections import ReduceDtype, ReductionStrategy, TrainingConfig
from bert.optimizer import FlatParameters
from bert.parallel.collectives import barrier
from bert.parallel.reduction.gradients import Communicators, Reduction, Way

_ENOUGH_S = 3.0


@dataclass(frozen=True)
class ReductionChoice:
    """A way to reduce, and why."""

    way: Way
    reason: str

    def __str__(self) -> str:
        """Say the choice in one line."""
        return f"reduction: {self.way} ({self.reason})"


def candidates(config: TrainingConfig, communicators: Communicators) -> list[Way]:
    """The ways among which measuring decides, or the only one.

    What ``training.reduction`` says; for auto flat and hierarchical, where they differ. It does not choose sharded ways,
    which save memory: measuring sums alone says too little of them. Along rails, each way also in-network where that is
    possible.
    """
    if communicators.world is None:
        return [Way("flat")]
    strategies: tuple[ReductionStrategy, ...] = ("flat",)
    if config.reduction != "auto":
        strategies = (config.reduction,)
    elif communicators.rail is not None and (
        communicators.node is not None or communicators.in_network_rail is not None
    ):
        strategies = ("flat", "hierarchical")
    ways = []
    for strategy in strategies:
        # With ``on`` the way without switches is no candidate where there is one with them.
        possible = strategy in ("hierarchical", "sharded") and communicators.in_network_rail is not None
        if not possible or config.in_network != "on":
            ways.append(Way(strategy))
        if possible:
            ways.append(Way(strategy, in_network=True))
    return ways


def choose(config: TrainingConfig, flat: FlatParameters, communicators: Communicators) -> ReductionChoice:
    """Choose how this run reduces, the same on all ranks. For start-up: it may zero gradients."""
    ways = candidates(config, communicators)
    # Measuring takes collectives of all ranks: by settings and mesh the number of ways is the same on each.
    if len(ways) > 1:
        choice = measured_choice(
            flat, communicators, ways, reduce_dtype=config.reduce_dtype, bucket_bytes=config.bucket_bytes
        )
    else:
        choice = ReductionChoice(ways[0], _only_because(config, communicators))
    along_rails = communicators.rail is not None and any(way.strategy in ("hierarchical", "sharded") for way in ways)
    if along_rails and communicators.in_network_rail is None:
        choice = replace(choice, reason=f"{choice.reason}; in-network: {communicators.why_not_in_network}")
    return choice


def _only_because(config: TrainingConfig, communicators: Communicators) -> str:
    if communicators.world is None:
        return "one rank"
    if config.reduction != "auto":
        return "as set"
    return "one host" if communicators.rail is None else "one rank a host"


def measured_choice(
    flat: FlatParameters,
    communicators: Communicators,
    ways: Sequence[Way] = (Way("flat"), Way("hierarchical")),
    rounds: int = 4,
    reduce_dtype: ReduceDtype = "fp32",
    bucket_bytes: int = TrainingConfig.bucket_bytes,
) -> ReductionChoice:
    """The fastest way to reduce a gradient of this size here, the same on all ranks. For start-up: it zeroes gradients.

    Rounds alternate; a round takes as long as on the slowest rank, and a way as its best round, since the first one
    connects. No round begins after ``_ENOUGH_S``.
    """
    if len(flat.gradients_N) == 0:  # ranks keep a shard alone
        flat = replace(flat, gradients_N=torch.zeros_like(flat.weights_N))
    reductions = [Reduction(flat, communicators.along(way), way.strategy, reduce_dtype, bucket_bytes) for way in ways]
    # Sums are made in place again and again: anything but zeros would grow from round to round.
    flat.gradients_N.zero_()
    device = flat.gradients_N.device
    best, spent = [math.inf] * len(ways), 0.0
    for _ in range(rounds):
        times = torch.zeros(len(ways), dtype=torch.float64, device=device)
        # Every way in each round: what slows the machine for a while then slows all of them.
        for place, reduction in enumerate(reductions):
            if communicators.world:
                barrier(communicators.world)  # so that ranks that are late do not count as a slow sum
            begin = time.perf_counter()
            reduction.finish()
            # ``finish`` lets the stream wait for the sums, and not the host.
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[place] = time.perf_counter() - begin
        if communicators.world:
            dist.all_reduce(times, dist.ReduceOp.MAX)  # over all data groups, so that all choose the same
        best = list(map(min, best, times.tolist()))
        spent += times.sum().item()
        if spent > _ENOUGH_S:  # the same sum, and so the same answer, everywhere
            break
    for reduction in reductions:
        # Its hooks on the parameters would otherwise run in every backward pass.
        reduction.close()
    shown = ", ".join(f"{way} {1000 * seconds:.1f} ms" for way, seconds in zip(ways, best, strict=True))
    return ReductionChoice(ways[best.index(min(best))], shown)
