"""Rates of the ranks of a run: what a computation costs on one of them, what a collective costs all.

They come from a probe's view alone, or from facts of devices with the parameters that published results gave.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import get_args

import numpy as np
from scipy.optimize import nnls

from cluster.model.computations import TERMS, Computation, Count, parts_of
from cluster.model.strategy import BUCKET_BYTES, Strategy
from cluster.model.work import MicroBatches, Work, wikipedia_work
from cluster.published.calibration import calibration
from cluster.published.cost_model import (
    FP8_SHARE,
    PARAMETERS,
    SEQUENCE_FLOPS,
    UPDATE_BYTES,
    UPDATE_EFFICIENCY,
    TimedRun,
    link_rate,
    network_rate,
    sequence_time,
)
from cluster.published.machine import Machine
from cluster.view import Collective, Operation, Scope, View

# Three products, of two operations for each multiply-add: output, input gradient, weight gradient.
LINEAR_FLOPS = 6.0
"""Floating-point operations of a linear layer for each row x input x output, forward and backward."""
# Read where nothing was measured, by `costs_of` alone.
_ACCESSES = {"attention": 8.0, "norm": 10.0, "gelu": 5.0, "embedding": 8.0, "loss": 6.0}
"""Times that a computation reads or writes each element of its largest term on a GPU."""


@dataclass(frozen=True)
class Curve:
    """Seconds of a collective by the bytes of its whole vector, ascending, and the share of processors it keeps busy."""

    points: tuple[tuple[float, float], ...]
    share: float = 0.0

    def seconds(self, size: float) -> float:
        """Between two points by a line, above them by that of the last two; below them as at the first: latency."""
        sizes = [each for each, _ in self.points]
        at = min(max(bisect.bisect_left(sizes, size), 1), len(sizes) - 1)
        (low, before), (high, after) = self.points[at - 1], self.points[at]
        if size < low:
            return before
        # Noise may make a larger message faster than a smaller one: no size may have a negative cost.
        slope = max((after - before) / (high - low), 0.0)
        return before + slope * (size - low)


@dataclass(frozen=True, eq=False)
class Rates:
    """Rates of ranks, all of them at work at once.

    Attributes:
        ranks: of a node.
        memory_bytes: of a rank's device, or of its part of a host.
        costs: seconds for one unit of each term of a computation, by its kind; that of linear layers with the type after it,
            "linear bf16". Others have "bf16" where 16 bits were timed apart. What drops out has "with dropout" at the end
            where that is known.
        collectives: by operation and scope.
        micro_batch_s: of each micro-batch, whatever its size.
        demand: share of the processors that computing keeps busy; 0 where devices of their own compute.
        sharing: how many times as long a rank takes while all compute as when it is alone.
        noise: relative standard deviation of a rank's step.
        mean, last: time of a rank in the mean, and of the last one, when all begin equal work together; over what it takes
            while all go on computing.
        start_s: from the start of the clock to the first step.
    """

    nodes: int
    ranks: int
    memory_bytes: float
    costs: Mapping[str, tuple[float, ...]]
    collectives: Mapping[tuple[Operation, Scope], Curve] = field(default_factory=dict)
    micro_batch_s: float = 0.0
    demand: float = 0.0
    sharing: float = 1.0
    noise: float = 0.0
    mean: float = 1.0
    last: float = 1.0
    start_s: float = 0.0

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks

    def seconds(self, computation: Computation, precision: str = "fp32") -> Count:
        """Seconds of a computation, forward and backward."""
        kind = computation.kind
        # FP8 products exist in the encoder's inner layers alone: heads and the last layer stay in 16 bits.
        if kind == "linear":
            kind = f"linear {'bf16' if precision == 'fp8' and not computation.in_encoder else precision}"
        elif precision != "fp32" and f"{kind} bf16" in self.costs:
            kind = f"{kind} bf16"
        # A probe times ops with and without dropout; facts of devices do not tell the two apart.
        if computation.dropout and f"{kind} with dropout" in self.costs:
            kind = f"{kind} with dropout"
        if kind not in self.costs:
            raise ValueError(
                f"no rate of {kind}: the probe, or the facts of the device, have none; choose another type"
            )
        total: Count = 0.0
        for cost, count in zip(self.costs[kind], computation.counts, strict=True):
            total = total + cost * count
        return total

    def members(self, scope: Scope) -> int:
        """Ranks that take part in a collective of a scope."""
        return {"world": self.world_size, "node": self.ranks, "rail": self.nodes}[scope]

    def collective(self, operation: Operation, scope: Scope, size: float) -> tuple[float, float]:
        """Seconds of a collective on a vector of so many bytes, and the share of processors that it keeps busy."""
        if self.members(scope) == 1:
            return 0.0, 0.0
        # Where a node is the whole world, or each has one rank, scopes coincide, and only "world" was measured.
        if self.members(scope) == self.world_size:
            scope = "world"
        curve = self.collectives.get((operation, scope))
        if curve is None:
            raise ValueError(f"no rate of {operation} ({scope}): run `python -m cluster probe` on as many ranks")
        return curve.seconds(size), curve.share

    def collective_seconds(self, operation: Operation, scope: Scope, size: float) -> float:
        """Seconds of a collective on a vector of so many bytes when nothing is computed beside it."""
        return self.collective(operation, scope, size)[0]

    # Rates compare by identity (eq=False), so the cache keeps one scaled copy for each instance and shape.
    @functools.lru_cache(maxsize=64)  # noqa: B019  a program makes few of them
    def of_data_groups(self, tensor: int, pipeline: int = 1) -> Rates:
        """Return the rates of collectives in data groups, where ``tensor`` neighbours of a host share a stage each.

        As many groups are at it at once, on links of their own in a host, and on those of all between hosts.
        """
        if tensor * pipeline == 1:
            return self
        if self.ranks % tensor:
            raise ValueError(
                f"{self.ranks} ranks of a host do not divide into copies of {tensor}: expected a multiple of that"
            )
        # Copies, not ranks: a data group has one rank of each copy.
        copies = self.world_size // (tensor * pipeline)
        ranks = max(1, self.ranks // (tensor * pipeline))
        nodes = copies // ranks
        # A ring of fewer members sends less of a vector. Between hosts all groups share the links: a group's vector
        # takes the time of one as many times larger, which was measured alone.
        longer = {
            "world": _share_of_ring(copies, self.world_size),
            "node": _share_of_ring(ranks, self.ranks),
            "rail": _share_of_ring(nodes, self.nodes),
        }
        scaled: dict[tuple[Operation, Scope], Curve] = {}
        for (operation, scope), curve in self.collectives.items():
            groups = self.ranks // ranks if scope == "world" and self.nodes > 1 else 1
            # Sizes shrink rather than seconds grow: latency is paid once whatever shares the link.
            points = tuple((size / groups, longer[scope] * seconds) for size, seconds in curve.points)
            scaled[operation, scope] = replace(curve, points=points)
        return replace(self, nodes=nodes, ranks=ranks, collectives=scaled)

    def tensor_seconds(self, operation: Operation, tensor: int, size: float) -> float:
        """Seconds of a collective on a vector of so many bytes in all tensor groups at once, as measured in a whole node."""
        return _share_of_ring(tensor, self.ranks) * self.collective_seconds(operation, "node", size)

    def message_seconds(self, tensor: int, pipeline: int, size: float) -> float:
        """Seconds of so many bytes from each rank to its neighbour in the next stage, by the links of a ring among as many.

        Copies that take several hosts wait for the links between those.
        """
        # Neighbouring stages share a host where whole copies fit into one; else the slower link counts.
        scope: Scope = "node" if self.ranks // tensor % pipeline == 0 else "rail"
        # A rank of a ring of n sends (n - 1) / n of an all-gather's vector: this is the vector of which it sends
        # ``size``.
        return self.collective_seconds("all-gather", scope, size / (1 - 1 / self.members(scope)))

    def last_of(self, work_R: Sequence[float]) -> float:
        """Seconds until the last rank has done its work, each given as the seconds that it takes while all compute.

        Ranks that share processors get more of them when others have ended.
        """
        ordered = sorted(work_R)
        slowness, now, done, many = self.sharing, 0.0, 0.0, len(ordered)
        # Event by event: until the next rank ends, all that are left go on at the same speed.
        for place, work in enumerate(ordered):
            # `slowness * share of those left`: at 1 each has a processor of its own, and it gets no faster below that.
            now += (work - done) * max(1.0, slowness * (many - place) / many) / slowness
            done = work
        mean = sum(ordered) / many
        # Expected largest of so many normal deviates (Blom, 1958).
        order_statistic = NormalDist().inv_cdf((many - 0.375) / (many + 0.25)) if many > 1 else 0.0
        # Three lower bounds: the plan's imbalance, what the probe saw of equal work, and noise between ranks.
        return max(now, mean * self.last, mean * (1 + self.noise * order_statistic))


def _share_of_ring(members: int, of: int) -> float:
    """Return what a rank of a ring of so many members sends, over what it sends in one ``of`` more."""
    # Each of n members sends (n - 1) / n of the vector; one member sends nothing.
    return (1 - 1 / members) / (1 - 1 / of) if of > 1 else 0.0


def costs_of(
    flops: Mapping[str, float], bytes_per_s: float, launch_s: float, update_bytes_per_s: float
) -> dict[str, tuple[float, ...]]:
    """Return what computations cost by rates alone.

    Args:
        flops: floating-point operations a second of products, by type.
        bytes_per_s: of memory, as far as products do not hide it.
        launch_s: of one launch.
        update_bytes_per_s: of memory, in the optimizer.
    """
    # Attention's products are in 16 bits also where the encoder's are in FP8; fp32 stands in without them.
    sixteen = max(flops.get("bf16", 0.0), flops.get("fp32", 0.0))
    size = 2 if "bf16" in flops else 4
    # 8 bytes: the fp32 gradient of a weight is read and written.
    costs: dict[str, tuple[float, ...]] = {
        f"linear {name}": (6 * launch_s, LINEAR_FLOPS / rate, 0.0, 8 / bytes_per_s) for name, rate in flops.items()
    }
    for kind, accesses in _ACCESSES.items():
        traffic = accesses * size / bytes_per_s
        calls = 8 * launch_s
        costs[kind] = (calls, traffic, 0.0)[: len(TERMS[kind])]
    # Two products of queries, keys and values.
    costs["attention"] = (8 * launch_s, _ACCESSES["attention"] * size / bytes_per_s, 0.0, 2 * LINEAR_FLOPS / sixteen)
    # LAMB's first term is 0: its launches are counted by segment.
    costs["lamb"] = (0.0, launch_s, UPDATE_BYTES / update_bytes_per_s)
    # On a device of its own the host assembles batches meanwhile, so they cost no time of a step.
    costs["batch"] = (0.0, 0.0)
    return costs


def rates_of_view(view: View) -> Rates:
    """Return the rates that a probe measured on as many ranks as a run is to have."""
    hosts, contention = len(view.hosts), view.contention
    ranks = len(view.ranks) // hosts
    # Over NCCL each rank has a device, and messages take no processor from computing.
    on_processors = view.backend != "nccl"
    processors = contention.processors if on_processors else math.inf
    return Rates(
        hosts,
        ranks,
        # Ranks on processors share their host's memory; each GPU has its own.
        view.ranks[0].memory_bytes / (ranks if on_processors else 1),
        fitted_costs(view),
        {(each.operation, each.scope): _curve(each, processors) for each in view.collectives},
        demand=min(1.0, len(view.ranks) * contention.threads / processors),
        # Never below 1: a rank that happened to be faster in company must not promise a speed-up.
        sharing=max(1.0, contention.together_s / contention.alone_s),
        # On processors what disturbs a rank is already in `last`, measured with all at once.
        noise=0.0 if on_processors else _noise(view),
        mean=min(1.0, contention.mean_s / contention.together_s),
        last=max(1.0, contention.last_s / contention.together_s),
    )


def fitted_costs(view: View) -> dict[str, tuple[float, ...]]:
    """Return what each kind of computation costs for one unit of each of its terms: least squares of relative errors."""
    costs = {}
    for kind in dict.fromkeys(each.kind for each in view.computations):
        timed = [each for each in view.computations if each.kind == kind]
        seconds_K = np.array([each.seconds for each in timed])
        counts_KT = np.array([each.counts for each in timed])
        largest_T = counts_KT.max(axis=0)
        # Rows over their seconds make errors relative; columns over their largest count keep the matrix well scaled.
        # nnls and not lstsq: a negative cost would make some sizes take less than no time.
        found_T, _ = nnls(counts_KT / largest_T / seconds_K[:, None], np.ones(len(timed)))
        costs[kind] = tuple((found_T / largest_T).tolist())
    return costs


def _noise(view: View) -> float:
    """Return how much a rank's products differ from one time to the next; what sharing processors does is in `last`."""
    # The median of the ranks: one rank that is disturbed says nothing about the others.
    spreads = [r.spread for rank in view.ranks for r in rank.rates if r.quantity == "product"]
    return float(np.median(spreads)) if spreads else 0.0


def _curve(measured: Collective, processors: float) -> Curve:
    """The share of processors is that at the largest size, where a collective takes longest."""
    points = tuple((float(size), seconds) for size, seconds, _ in measured.points)
    _, seconds, busy = measured.points[-1]
    return Curve(points, min(1.0, busy / (processors * seconds)))


def rates_of_machine(machine: Machine, precision: str = "bf16") -> Rates:
    """Return the rates of a machine by the facts of its devices and the published results.

    A sequence of Wikipedia's mean cost takes as long as `cluster.published.cost_model` has it, and so does a reduction over
    all ranks. Raises ``ValueError`` where devices have no FP8 and it is asked for.
    """
    device, p = machine.device, calibration().parameters
    if precision == "fp8" and device.fp8_tflops is None:
        raise ValueError(f"{device.name} has no FP8: set training.precision to bf16")
    # The least batch that a run may have; a sequence's own time does not depend on it.
    run = TimedRun(machine, machine.accelerators)
    matrix, memory, power = sequence_time(p, run, precision == "fp8")
    # The limit of power slows all of a sequence alike.
    stretch = (matrix + memory + power) / (matrix + memory)
    # The fit knows one rate of 16-bit work; FP8's share of the sequence is taken out of the whole afterwards.
    sixteen = SEQUENCE_FLOPS / (sequence_time(p, run, False)[0] * stretch)
    flops = {"bf16": sixteen}
    if device.fp8_tflops is not None:
        # FP8's own time: what the whole sequence takes in FP8, less what stays in 16 bits.
        eight = sequence_time(p, run, True)[0] * stretch - (1 - FP8_SHARE) * SEQUENCE_FLOPS / sixteen
        flops["fp8"] = FP8_SHARE * SEQUENCE_FLOPS / eight
    update = UPDATE_EFFICIENCY * device.memory_gb_s * 1e9
    bytes_per_s = _traffic() / (memory * stretch)  # at which the traffic counted here takes the fit's time
    return Rates(
        machine.groups,
        machine.group,
        device.memory_gb * 1e9,
        costs_of(flops, bytes_per_s, 0.0, update),
        _collectives(machine),
        # Launches as published runs show them, and the time that a device takes which is not full.
        micro_batch_s=math.exp(p["launch"]) + math.exp(p["half_batch"]) * (matrix + memory + power),
        start_s=math.exp(p["start"]),
    )


def _traffic() -> float:
    """Bytes of memory traffic of a sequence of BERT-Large, of Wikipedia's mean, in 16 bits, but for products."""
    # At one byte a second, seconds are bytes; products take no time.
    work = wikipedia_work()
    costs = costs_of({"bf16": math.inf}, 1.0, 0.0, 1.0) | {"linear bf16": (0.0,) * len(TERMS["linear"])}
    rates = Rates(1, 1, 0.0, costs)
    return _seconds_at(rates, work, work.micro_batches(Strategy(4096), 1, 0)) / 4096


def _launches() -> float:
    """Launches of a micro-batch of BERT-Large."""
    work = wikipedia_work()
    # Only launches are left, each taken as one second: the sum is their number.
    rates = Rates(1, 1, 0.0, costs_of({"bf16": math.inf}, math.inf, 1.0, math.inf))
    return _seconds_at(rates, work, work.typical(1))


def _seconds_at(rates: Rates, work: Work, sizes: MicroBatches) -> float:
    embedding, layer, last = parts_of(work.model, sizes)
    computations = [*embedding, *last, *layer * (work.model.num_hidden_layers - 1)]
    return float(sum(np.sum(rates.seconds(each, "bf16")) for each in computations))


def _collectives(machine: Machine) -> dict[tuple[Operation, Scope], Curve]:
    p = calibration().parameters
    world, inside, nodes = machine.accelerators, machine.group, machine.groups
    link, network = link_rate(p, machine), network_rate(p, machine) if nodes > 1 else math.inf
    # What published runs lose to latency in a step is that of all its buckets.
    latency = math.exp(p["network_latency"]) * math.log2(nodes) / (4 * PARAMETERS / BUCKET_BYTES) if nodes > 1 else 0.0
    curves: dict[tuple[Operation, Scope], Curve] = {}
    scopes: list[tuple[Scope, int, float, float]] = [
        # In a node a collective costs one launch: a micro-batch's constant time over the number of its launches.
        ("node", inside, 1 / link, math.exp(p["launch"]) / _launches()),
        ("rail", nodes, inside / network, latency),
        # Node links and network form one pipeline, whose slower half counts; all devices of a group share its ports.
        ("world", world, max(1 / link if inside > 1 else 0.0, 1 / network), latency),
    ]
    for scope, members, per_byte, wait in scopes:
        for operation in get_args(Operation):
            rate = (2 if operation == "all-reduce" else 1) * (1 - 1 / members) * per_byte  # of a ring
            # Two points are a line: `Curve` extends it beyond 1 GiB.
            curves[operation, scope] = Curve(((0.0, wait), (2.0**30, wait + rate * 2**30)))
    return curves
