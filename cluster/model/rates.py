"""Machines that a run is planned for, and the rates of their ranks: seconds of a computation, and of a collective.

The rates come either from a probe, or from data sheets and parameters that were fitted to published results.
"""

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import numpy as np

from bert.configuration.recipes import shape_of
from bert.configuration.sections import ParallelConfig, Precision
from bert.parallel.mesh import require_whole_copies
from cluster.devices import Device, Machine, describe_machine, device_named
from cluster.model.work import BUCKET_BYTES, TERMS, Computation, Count
from cluster.published.calibration import calibration
from cluster.published.fitted import (
    FP8_SHARE,
    PARAMETERS,
    SEQUENCE_FLOPS,
    UPDATE_BYTES,
    link_rate,
    network_rate,
    require_batch,
    ring_share,
    sequence_time,
    update_bytes_per_s,
)
from cluster.view import Collective, Operation, Scope, View, read_view
from console.text import counted

LINEAR_FLOPS = 6.0
"""Operations of a linear layer for each row x input x output: a multiplication and an addition in each of three products."""

ACCESSES = {"attention": 8.0, "norm": 10.0, "gelu": 5.0, "embedding": 8.0, "loss": 6.0}
"""Assumed memory accesses for each unit of a kind's second term in `TERMS`. Only rates from data sheets use them."""

SEQUENCE_BYTES, LAUNCHES = 599_294_086, 1406
"""Two numbers for BERT-Large. The first is the memory traffic of a sequence outside matrix products, in bytes and averaged
over Wikipedia's lengths. The second is the number of kernel launches of a micro-batch. Both follow from `cluster.model.work`
if an access moves 2 bytes, a product takes 6 launches, and any other computation takes 8 launches."""

_ACCELERATORS = {
    "h100": "H100-SXM-80GB",
    "b200": "B200-SXM-180GB",
    "gb200": "GB200-186GB",
    "dgxa100": "A100-SXM-80GB",
    "bert_3_9b": "A100-SXM-40GB",
}
"""Device of each family of recipes. A recipe's name is its family followed by nodes and devices, as in "h100_8x8"."""


@dataclass(frozen=True)
class Curve:
    """Time of a collective at ascending points (bytes of the whole vector, seconds). ``share`` of the processors is busy."""

    points: tuple[tuple[float, float], ...]
    share: float = 0.0

    def seconds(self, size: float) -> float:
        """Return the seconds for a size in bytes, interpolated between points.

        Larger sizes continue the line through the last two points. Smaller sizes take the time of the first point.
        """
        sizes = [each for each, _ in self.points]
        at = min(max(bisect.bisect_left(sizes, size), 1), len(sizes) - 1)
        (low, before), (high, after) = self.points[at - 1], self.points[at]
        # Noise may make a larger message faster than a smaller one, but the cost per byte must not be negative.
        return before + max((after - before) / (high - low), 0.0) * max(0.0, size - low)


@dataclass(frozen=True, eq=False)
class Rates:
    """Rates of ranks while all of them work at once.

    Attributes:
        ranks: Number of ranks of a node.
        memory_bytes: Memory of a rank's device; on CPUs, an equal part of the host's memory.
        costs: Seconds per unit of each cost term, by kind of computation. A linear layer's key ends with its data type:
            "linear bf16". Other keys end with "bf16" if 16 bits were measured separately, followed by "with dropout" if
            dropout was measured separately.
        collectives: Curve of each collective, by operation and scope.
        micro_batch_s: Constant cost of each micro-batch.
        demand: Share of the processors that computation keeps busy; 0 if each rank has its own device.
        sharing: Slowdown factor of a rank's computation while all ranks compute, relative to computing alone.
        mean, last: Finishing times of the average rank and of the last rank, when all ranks begin equal work together.
            Both are relative to the time of that work while all ranks keep computing.
        start_s: Seconds from the start of the clock to the first step.
        free_groups: Number of data groups that can communicate between nodes at once without slowing each other down.
    """

    nodes: int
    ranks: int
    memory_bytes: float
    costs: Mapping[str, tuple[float, ...]]
    collectives: Mapping[tuple[Operation, Scope], Curve] = field(default_factory=dict)
    micro_batch_s: float = 0.0
    demand: float = 0.0
    sharing: float = 1.0
    mean: float = 1.0
    last: float = 1.0
    start_s: float = 0.0
    free_groups: float = 1.0

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks

    def seconds(self, computation: Computation, precision: str = "fp32") -> Count:
        """Return the seconds of a computation, forward and backward. Raises ``ValueError`` if the rate is unknown."""
        kind = computation.kind
        if kind == "linear":
            kind = f"linear {'bf16' if precision == 'fp8' and not computation.in_encoder else precision}"
        elif precision != "fp32" and f"{kind} bf16" in self.costs:
            kind = f"{kind} bf16"
        if computation.dropout and f"{kind} with dropout" in self.costs:
            kind = f"{kind} with dropout"
        if kind not in self.costs:
            raise ValueError(
                f"neither the probe nor the data sheet has a rate of {kind}. Choose another training.precision"
            )
        return sum((cost * count for cost, count in zip(self.costs[kind], computation.counts, strict=True)), 0.0)

    def members(self, scope: Scope) -> int:
        return {"world": self.world_size, "node": self.ranks, "rail": self.nodes}[scope]

    def collective(self, operation: Operation, scope: Scope, size: float) -> tuple[float, float]:
        """Return the seconds of a collective on ``size`` bytes, and the share of processors it keeps busy.

        Both are 0 if the scope has one rank. Raises ``ValueError`` if the probe did not measure the collective.
        """
        if self.members(scope) == 1:
            return 0.0, 0.0
        # If a scope contains all ranks, the probe measured it only as "world".
        if self.members(scope) == self.world_size:
            scope = "world"
        curve = self.collectives.get((operation, scope))
        if curve is None:
            raise ValueError(f"the probe has no rate of {operation} ({scope}): probe as many ranks as the run has")
        return curve.seconds(size), curve.share

    @functools.lru_cache(maxsize=64)  # noqa: B019  a program makes few instances
    def of_data_groups(self, tensor: int, pipeline: int = 1) -> "Rates":
        """Return the rates of collectives in data groups, each of which has one rank of every copy of the model.

        All groups communicate at once. Each group has fast links of its own, which reach across a host or a rack. Beyond
        their reach, the groups share the network.
        Raises ``ValueError`` if hosts do not hold whole copies.
        """
        if tensor * pipeline == 1:
            return self
        require_whole_copies(ParallelConfig(tensor, pipeline), self.nodes, self.ranks)
        copies = self.world_size // (tensor * pipeline)
        ranks = max(1, self.ranks // (tensor * pipeline))
        group = replace(self, nodes=copies // ranks, ranks=ranks)
        scaled: dict[tuple[Operation, Scope], Curve] = {}
        for (operation, scope), curve in self.collectives.items():
            # A ring of fewer members sends a smaller part of the vector. If G groups share the links between hosts, each
            # group takes as long as one group would for a vector that is G times larger.
            shorter = _shorter_ring(group.members(scope), self.members(scope))
            groups = self.ranks // ranks if scope == "world" and self.nodes > 1 else 1
            slowdown = max(1.0, groups / self.free_groups)
            # Shrink the sizes instead of stretching the seconds, so that latency counts only once.
            points = tuple((size / slowdown, shorter * seconds) for size, seconds in curve.points)
            scaled[operation, scope] = replace(curve, points=points)
        return replace(group, collectives=scaled)

    def tensor_seconds(self, operation: Operation, tensor: int, size: float) -> float:
        """Return the seconds of a collective in all tensor groups at once, derived from its time over a whole node."""
        return _shorter_ring(tensor, self.ranks) * self.collective(operation, "node", size)[0]

    def message_seconds(self, tensor: int, pipeline: int, size: float) -> float:
        """Return the seconds to send ``size`` bytes from each rank to its neighbour in the next stage."""
        # Neighbouring stages are on the same host if whole copies fit into a host.
        scope: Scope = "node" if self.ranks // tensor % pipeline == 0 else "rail"
        # Use the time of an all-gather in which each ring member sends `size` bytes.
        return self.collective("all-gather", scope, size / ring_share(self.members(scope)))[0]

    def last_of(self, work_R: Sequence[float]) -> float:
        """Return the seconds until the last rank is done, given each rank's seconds while all ranks compute.

        Ranks that share processors speed up when other ranks finish.
        """
        ordered = sorted(work_R)
        now, done, many = 0.0, 0.0, len(ordered)
        # Until the next rank finishes, the remaining ranks have equal speeds, at most the speed of a rank that computes
        # alone.
        for place, work in enumerate(ordered):
            now += (work - done) * max(1.0, self.sharing * (many - place) / many) / self.sharing
            done = work
        return max(now, sum(ordered) / many * self.last)


def _shorter_ring(members: int, measured: int) -> float:
    """Return the bytes that a rank sends in a ring of ``members`` ranks, relative to a ring of ``measured`` ranks."""
    return ring_share(members) / ring_share(measured) if measured > 1 else 0.0


@dataclass(frozen=True)
class Target:
    """Ranks to plan for, with their device's name.

    ``missing`` has the reason for each precision without rates. ``on_gpu`` tells whether each rank has its own device.
    """

    device: str
    nodes: int
    ranks_per_node: int
    rates: Mapping[Precision, Rates]
    missing: Mapping[Precision, str]
    on_gpu: bool

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def target_of(
    recipe: str, cluster: Path | None, gpus: int | None, accelerator: str | None = None, networking: str = ""
) -> Target:
    """Return the target that a probe measured. Without a probe, return a target from a data sheet (see `device_of`).

    Raises ``ValueError`` if the probe's number of ranks is not ``gpus``, or if the device is unknown.
    """
    if cluster is not None:
        if accelerator is not None or networking:
            raise ValueError("--cluster describes the machines: omit --accelerator and --networking")
        return _target_of_probe(cluster, gpus)
    device = device_of(recipe, accelerator)
    # A recipe may use only a part of a node, so its own number of devices comes before the number in a node.
    count = gpus if gpus is not None else math.prod(shape_of(recipe) or (device.per_node,))
    return target_of_devices(device, count, device.per_node, networking)


def device_of(recipe: str, accelerator: str | None) -> Device:
    """Return the device ``accelerator``, or else the recipe's device. Raises ``ValueError`` if the device is unknown."""
    name = accelerator or _ACCELERATORS.get(recipe.rpartition("_")[0])
    if name is None:
        raise ValueError(f"the name of {recipe} states no device: set --accelerator, or for `plan` --cluster")
    return device_named(name)


def target_of_devices(device: Device, count: int, per_node: int, networking: str = "") -> Target:
    """Return a target of ``count`` devices with data-sheet rates. Raises ``ValueError`` if they do not fill whole nodes."""
    if count < 1:
        raise ValueError(f"--gpus is {count}, expected at least 1")
    per_node = min(count, per_node)
    if count % per_node:
        raise ValueError(f"--gpus is {count:,}, expected whole nodes: a multiple of {per_node}")
    machine = describe_machine(device, count // per_node, per_node, networking=networking)
    rates: dict[Precision, Rates] = {"bf16": rates_of_machine(machine, "bf16")}
    missing: dict[Precision, str] = {"fp32": f"the data sheet of {device.name} states no rate"}
    if device.fp8_tflops is None:
        missing["fp8"] = f"{device.name} does not support it"
    else:
        rates["fp8"] = rates_of_machine(machine, "fp8")
    return Target(device.name, machine.nodes, per_node, rates, missing, device.form != "CPU")


def _target_of_probe(path: Path, gpus: int | None) -> Target:
    view = read_view(path)
    ranks, hosts = len(view.ranks), len(view.hosts)
    # Contention and collectives were measured on all ranks at once, so they do not apply to another number of ranks.
    if gpus not in (None, ranks):
        raise ValueError(
            f"{path} has {counted(ranks, 'rank')}, but --gpus is {gpus}: omit --gpus, or probe that many ranks"
        )
    rates = rates_of_view(view)
    found: dict[Precision, Rates] = {each: rates for each in get_args(Precision) if f"linear {each}" in rates.costs}
    missing: dict[Precision, str] = {each: f"{path} has no rate" for each in get_args(Precision) if each not in found}
    return Target(view.ranks[0].device, hosts, ranks // hosts, found, missing, view.backend == "nccl")


def rates_of_view(view: View) -> Rates:
    hosts, contention = len(view.hosts), view.contention
    ranks = len(view.ranks) // hosts
    # With NCCL each rank has a device with its own memory, and messages take no processor time from computation.
    on_processors = view.backend != "nccl"
    processors = contention.processors if on_processors else math.inf
    return Rates(
        hosts,
        ranks,
        view.ranks[0].memory_bytes / (ranks if on_processors else 1),
        _fitted_costs(view),
        {(each.operation, each.scope): _curve(each, processors) for each in view.collectives},
        demand=min(1.0, len(view.ranks) * contention.threads / processors),
        # Noise must not suggest that ranks speed each other up.
        sharing=max(1.0, contention.together_s / contention.alone_s),
        mean=min(1.0, contention.mean_s / contention.together_s),
        last=max(1.0, contention.last_s / contention.together_s),
    )


def _fitted_costs(view: View) -> dict[str, tuple[float, ...]]:
    """Fit the cost of each term to the times of a probe, by non-negative least squares of the relative errors."""
    from scipy.optimize import nnls  # slow to import, and rates from data sheets do not need it

    costs = {}
    for kind in dict.fromkeys(each.kind for each in view.computations):
        timed = [each for each in view.computations if each.kind == kind]
        seconds_K = np.array([each.seconds for each in timed])
        counts_KT = np.array([each.counts for each in timed])
        # Divide the columns by their largest count to keep the matrix well scaled.
        largest_T = counts_KT.max(axis=0)
        found_T, _ = nnls(counts_KT / largest_T / seconds_K[:, None], np.ones(len(timed)))
        costs[kind] = tuple((found_T / largest_T).tolist())
    return costs


def _curve(measured: Collective, processors: float) -> Curve:
    points = tuple((float(size), seconds) for size, seconds, _ in measured.points)
    _, seconds, busy = measured.points[-1]
    return Curve(points, min(1.0, busy / (processors * seconds)))


def rates_of_machine(machine: Machine, precision: str = "bf16") -> Rates:
    """Return the rates of a machine from its data sheet and the fit to published results.

    The rates agree with `cluster.published.cost_model` on the time of a mean Wikipedia sequence and of a reduction without
    overlap. Raises ``ValueError`` if FP8 is requested and the devices lack it.
    """
    device, p = machine.device, calibration().parameters
    if precision == "fp8" and device.fp8_tflops is None:
        raise ValueError(f"training.precision is fp8, which {device.name} lacks. Use bf16.")
    require_batch(machine.accelerators, machine)
    matrix, memory, power = sequence_time(p, device, precision == "fp8")
    sequence = matrix + memory + power
    # The power limit slows all parts of a sequence by the same factor.
    stretch = sequence / (matrix + memory)
    seconds_per_byte = memory * stretch / SEQUENCE_BYTES
    sixteen = sequence_time(p, device, False)[0] * stretch / SEQUENCE_FLOPS
    # The fp32 gradient of a weight is read and written, which moves 8 bytes.
    costs: dict[str, tuple[float, ...]] = {"linear bf16": (0.0, LINEAR_FLOPS * sixteen, 0.0, 8 * seconds_per_byte)}
    if precision == "fp8":
        in_fp8 = matrix * stretch / SEQUENCE_FLOPS - (1 - FP8_SHARE) * sixteen
        costs["linear fp8"] = (0.0, LINEAR_FLOPS * in_fp8 / FP8_SHARE, 0.0, 8 * seconds_per_byte)
    for kind, accesses in ACCESSES.items():
        costs[kind] = (0.0, 2 * accesses * seconds_per_byte, 0.0)[: len(TERMS[kind])]
    # Attention has two products, which stay in 16 bits even if the encoder's linear layers use FP8.
    costs["attention"] = (*costs["attention"], 2 * LINEAR_FLOPS * sixteen)
    costs["lamb"] = (0.0, 0.0, UPDATE_BYTES / update_bytes_per_s(device))
    # Assembling batches adds no time, because the host does it while the device computes.
    costs["batch"] = (0.0, 0.0)
    link, network = link_rate(p, machine), network_rate(p, machine) if machine.groups > 1 else math.inf
    return Rates(
        machine.nodes,
        machine.per_node,
        device.memory_gb * 1e9,
        costs,
        _collectives(machine, link, network),
        micro_batch_s=math.exp(p["launch"]) + math.exp(p["half_batch"]) * sequence,
        start_s=math.exp(p["start"]),
        # Data groups in racks share only the network between racks. It may be as fast as several device links together.
        free_groups=max(1.0, network / link) if machine.group > machine.per_node else 1.0,
    )


def _collectives(machine: Machine, link: float, network: float) -> dict[tuple[Operation, Scope], Curve]:
    """Return all curves. A device sends ``link`` bytes/s to its group. A group sends ``network`` bytes/s to the next."""
    p = calibration().parameters
    # Within the reach of the fast link, the latency of a collective is the time of one kernel launch.
    launch = math.exp(p["launch"]) / LAUNCHES
    # The fitted latency covers all buckets of a published run's step, so divide it by their number.
    latency = math.exp(p["network_latency"]) * math.log2(machine.groups) / (4 * PARAMETERS / BUCKET_BYTES)
    # The rails of a node share the network. In a rack, a rail also uses the fast link, and the slower of both counts.
    is_rack = machine.group > machine.per_node
    rail = max(machine.per_node / network, is_rack / link)
    scopes: list[tuple[Scope, int, float, float]] = [
        ("node", machine.per_node, 1 / link, launch),
        ("rail", machine.nodes, rail, latency + is_rack * launch),
        # Links and network form one pipeline, so the slower of the two determines the time.
        ("world", machine.accelerators, max(1 / link if machine.group > 1 else 0.0, 1 / network), latency),
    ]
    curves: dict[tuple[Operation, Scope], Curve] = {}
    for scope, members, per_byte, wait in scopes:
        for operation in get_args(Operation):
            rate = (2 if operation == "all-reduce" else 1) * ring_share(members) * per_byte
            curves[operation, scope] = Curve(((0.0, wait), (2.0**30, wait + rate * 2**30)))
    return curves
