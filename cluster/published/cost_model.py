"""Time of a run and where it goes: seconds of its parts from facts of devices, links and the work.

A step is the time that its sequences take on a device, what each micro-batch costs whatever its size, the reduction of the
gradient, and the update. A sequence costs matrix products at a share of the peak rate, then memory traffic; and at least its
energy over the device's power. The reduction inside a node and that between nodes are one pipeline, whose slower
half counts.
Published runs show no sign that backward hides the reduction, so what is hidden is in the links' efficiency.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil, exp, log2

from cluster.published.convergence import REFERENCE_POINTS, SEQUENCES_PER_GB, log_samples
from cluster.published.machine import Machine
from cluster.published.parameters import Parameters, chip_parameter
from compliance.log.schedule import evaluation_interval

PARAMETERS = 336.2e6
"""Of BERT-Large with its heads."""

# In 16 bits.
GRADIENT_BYTES = 2 * PARAMETERS

UPDATE_BYTES = 30
"""Memory traffic of LAMB for one parameter: weight and both moments read and written, gradient, 16-bit copy, norms."""

SEQUENCE_FLOPS = 500e9
"""Operations of a sequence, forward and backward: the mean over the lengths of a Wikipedia data set at 512, by
s tokens and m masked ones as 3 (24 (24 h^2 s + 4 h s^2) + m (2 h^2 + 2 h V)) with h = 1024, V = 30528."""

FP8_SHARE = 0.87
"""Of these, the encoder's linear layers: 463.5 of 500 without attention and heads, less what stays in 16 bits."""

EVALUATION_SEQUENCES = 10_000
"""Of the benchmark."""

# A product's backward pass is two products of the forward one's size, so forward is a third of both together.
FORWARD_SHARE = 1 / 3
"""Share of the forward pass in forward and backward."""

UPDATE_EFFICIENCY = 0.8
SHARPNESS = 4
"""Exponent by which two limits meet: the larger one counts, and 19 % are added where they are equal."""

FP8_SEQUENCES_PER_GB = 3.2
"""As `SEQUENCES_PER_GB`, of published runs in FP8 on HBM: 256 sequences in 80 GB without accumulation."""

LARGEST_BATCH = 8 * REFERENCE_POINTS[-1][0]
"""Far above what has converged; the reference says nothing there."""

SWITCHED = 8
"""Devices of a node from which their board has PCIe switches."""

ROUND = re.compile(r"v[0-9]\.[0-9]")
"""Name of a round of MLPerf Training."""

OLD_ROUNDS = ("v0.5", "v0.6", "v0.7", "v1.0", "v1.1", "v2.0")


@dataclass(frozen=True)
class TimedRun:
    """A run to be timed.

    Attributes:
        batch: global batch size.
        round: of MLPerf Training, "v2.1" say, whose software it uses; None for the newest.

    Raises:
        ValueError: the batch is smaller than the number of devices, or larger than anything that converges, or the round
            has no name of one.
    """

    machine: Machine
    batch: int
    round: str | None = None

    def __post_init__(self) -> None:
        # Fewer sequences than devices would leave some without work.
        if not self.machine.accelerators <= self.batch <= LARGEST_BATCH:
            raise ValueError(
                f"global batch size {self.batch:,} on {self.machine.accelerators:,} accelerators: expected at least one "
                f"sequence on each, and at most {LARGEST_BATCH:,} in all"
            )
        if self.round is not None and not ROUND.fullmatch(self.round):
            raise ValueError(f"round is {self.round[:20]!r}, expected one such as v3.1")

    @property
    def is_old(self) -> bool:
        """Tell whether software and hyperparameters are those of the rounds up to v2.0."""
        return self.round in OLD_ROUNDS


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. All but `sequence` add up to the step.

    Attributes:
        sequence: one sequence, forward and backward, on one device.
        matrix: operations at the rate that they reach.
        memory: traffic that they do not hide.
        power: what the limit of power adds.
        launch: of all micro-batches, whatever their size.
        inside, between: the reduction in a node, and between nodes.
        update: LAMB on a device's shard.
    """

    sequence: float
    matrix: float
    memory: float
    power: float
    launch: float
    inside: float
    between: float
    update: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.matrix + self.memory + self.power + self.launch + self.inside + self.between + self.update


def step_time(p: Parameters, run: TimedRun) -> StepTime:
    """Return the seconds of a step's parts."""
    machine, device = run.machine, run.machine.device
    share = run.batch / machine.accelerators
    matrix, memory, power = sequence_time(p, run, uses_fp8(run))
    sequence = matrix + memory + power
    # Rounded up: what does not fit into one micro-batch takes another.
    micro_batches = ceil(share / (_sequences_per_gb(run) * device.memory_gb))
    # A device that b sequences fill half takes as long for n of them as a full one for n + b.
    launch = micro_batches * (exp(p["launch"]) + exp(p["half_batch"]) * sequence)
    # A group shares the update: each device has LAMB's shard of it.
    update = PARAMETERS * UPDATE_BYTES / (UPDATE_EFFICIENCY * device.memory_gb_s * 1e9) / machine.group
    inside, between = _reduction(p, machine)
    return StepTime(sequence, matrix * share, memory * share, power * share, launch, inside, between, update)


def uses_fp8(run: TimedRun) -> bool:
    """Tell whether the software for a device trains in FP8: where it has it, but for Gaudi 2, whose results are bf16."""
    device = run.machine.device
    return device.fp8_tflops is not None and device.vendor != "Intel"


def _sequences_per_gb(run: TimedRun) -> float:
    return FP8_SEQUENCES_PER_GB if uses_fp8(run) and "HBM" in run.machine.device.memory else SEQUENCES_PER_GB


def sequence_time(p: Parameters, run: TimedRun, fp8: bool) -> tuple[float, float, float]:
    """Return the seconds of a sequence on a device: matrix products, memory traffic, and what the limit of power adds."""
    device = run.machine.device
    rate = exp(p["matrix_efficiency"]) * device.bf16_tflops * 1e12
    # Joules of a sequence on an architecture of 2020, halved every so many years.
    energy = exp(p["energy"]) * 2 ** (-(device.year - 2020) / exp(p["energy_halving"]))
    # Without FP8 all operations are at the 16-bit rate; what follows replaces it.
    matrix = SEQUENCE_FLOPS / rate
    if fp8:
        assert device.fp8_tflops is not None
        fp8_rate = exp(p["matrix_efficiency"] + p["fp8_efficiency"]) * device.fp8_tflops * 1e12
        # A share of the operations stays in 16 bits: times add up, not rates.
        matrix = SEQUENCE_FLOPS * (FP8_SHARE / fp8_rate + (1 - FP8_SHARE) / rate)
        energy *= FP8_SHARE * exp(p["fp8_energy"]) + (1 - FP8_SHARE)
    memory = exp(p["traffic"]) / (device.memory_gb_s * 1e9)
    together = _larger(matrix + memory, energy / device.tdp_w)
    slowness = exp(-_log_speed(p, run))
    # The factor of chip and software is on all three alike, so that their shares stay.
    return matrix * slowness, memory * slowness, (together - matrix - memory) * slowness


def _log_speed(p: Parameters, run: TimedRun) -> float:
    """Return what sets a device, its software or its kind apart from rates and power alone."""
    device = run.machine.device
    speed = p.get(chip_parameter(device.chip), 0.0)
    speed -= p["graphics_memory"] if "GDDR" in device.memory else 0.0
    speed += p["processor"] if device.form == "CPU" else 0.0
    speed -= p["old_software"] if run.is_old else 0.0
    return speed - (p["first_round"] if run.round is not None and run.round == device.first_round else 0.0)


def _reduction(p: Parameters, machine: Machine) -> tuple[float, float]:
    """Seconds of summing the gradient over all devices: the parts of it that fall inside a group and between groups.

    A ring over n devices sends 2 (n - 1) / n times the gradient over each of its links.
    """
    inside = between = 0.0
    if machine.group > 1:
        inside = GRADIENT_BYTES * 2 * (1 - 1 / machine.group) / link_rate(p, machine)
    if machine.groups > 1:
        between = GRADIENT_BYTES * 2 * (1 - 1 / machine.accelerators) / network_rate(p, machine)
        between += exp(p["network_latency"]) * log2(machine.groups)
    together = _larger(inside, between)
    # The pipeline's time is split over both halves in proportion, so that the parts add up.
    return (together * inside / (inside + between), together * between / (inside + between)) if together else (0.0, 0.0)


def link_rate(p: Parameters, machine: Machine) -> float:
    """Return the bytes a second that a device sends to others of its group."""
    device = machine.device
    # A bridge joins two cards: among more of them traffic leaves it.
    if machine.is_bridged and machine.group == 2 and device.bridge_gb_s is not None:
        return exp(p["fabric_efficiency"]) * device.bridge_gb_s * 1e9
    return exp(p["fabric_efficiency" if machine.has_fabric else "pcie_efficiency"]) * device.link_gb_s * 1e9


def network_rate(p: Parameters, machine: Machine) -> float:
    """Return the bytes a second that a group sends to the next.

    Boards of eight join devices and ports by PCIe switches. Smaller nodes have them on the processors' own lanes, where a
    port that devices share is fed by way of the host's memory.
    """
    device, network = machine.device, machine.network
    if device.network_gb_s is not None:
        return exp(p["network_efficiency"]) * device.network_gb_s * machine.group * 1e9
    byte_seconds = 8 / (exp(p["network_efficiency"]) * network.gbit_s)  # nanoseconds, of one port
    # Devices that share ports on boards without switches: the host's memory is another limit.
    if network.ports < machine.per_node < SWITCHED:
        byte_seconds = _larger(byte_seconds, 1 / (exp(p["staging_efficiency"]) * device.host_gb_s))
    # The ports of all nodes of a group add up.
    return network.ports * machine.group / machine.per_node / byte_seconds * 1e9


def _larger(one: float, other: float) -> float:
    return (one**SHARPNESS + other**SHARPNESS) ** (1 / SHARPNESS)


@dataclass(frozen=True)
class RunTime:
    """Seconds of a run, by what they go to; the parts add up to the whole.

    Attributes:
        samples, steps, evaluations: how many, in the mean over seeds.
        parts: seconds by name: start, those of a step, evaluation.
    """

    samples: float
    steps: float
    evaluations: float
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds from run_start to run_stop."""
        return sum(self.parts.values())


def log_samples_needed(p: Parameters, run: TimedRun, step: StepTime) -> float:
    """Logarithm of the samples to the target, of a run with such steps."""
    machine = run.machine
    rate = run.batch / step.total
    return log_samples(p, run.batch, machine.accelerators, machine.device.memory_gb, rate, run.is_old)


def run_time(p: Parameters, run: TimedRun) -> RunTime:
    """Return where a run's seconds go."""
    step = step_time(p, run)
    return time_of_steps(p, run, step, exp(log_samples_needed(p, run, step)))


def time_of_steps(p: Parameters, run: TimedRun, step: StepTime, samples: float) -> RunTime:
    """Return where the seconds of a run go that takes so many samples in such steps."""
    steps = samples / run.batch
    evaluations = samples / evaluation_interval(run.batch)
    # Sequences are dealt evenly: the device with one more than others decides.
    passes = ceil(EVALUATION_SEQUENCES / run.machine.accelerators) * step.sequence + step.launch
    names = ("matrix", "memory", "power", "launch", "inside", "between", "update")
    parts = {name: steps * getattr(step, name) for name in names}
    parts |= {"evaluation": evaluations * passes * FORWARD_SHARE, "start": exp(p["start"])}
    return RunTime(samples, steps, evaluations, parts)
