"""Rates of devices and links, and the convergence, as they follow from parameters fitted to published results.

Both cost models use this module: `cluster.published.cost_model`, which predicts a submission, and `cluster.model`, which
predicts a step of this program. `cluster.published.calibration` fits and reads the parameters, and says what each means.

The samples to the target are the reference convergence with corrections from published results. Only reference points
that reviewers compare with are listed: no larger batch converges in fewer samples, and no point lies above the line between
its neighbours. Samples are interpolated linearly in the batch size, as the rules do. Beyond the largest point, the line
through the last two points continues.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, log2

from cluster.devices import Device, Machine
from console.text import counted

Parameters = Mapping[str, float]
"""Value of each parameter by name. Positive quantities are stored as natural logarithms."""

REFERENCE_POINTS = (
    (448, 2_414_421),
    (4608, 2_798_080),
    (6144, 3_319_125),
    (6912, 3_601_920),
    (12288, 4_465_067),
    (13056, 4_645_333),
    (16384, 5_505_422),
)
"""Global batch size and mean samples from mlperf-logging's `rcps_bert.json`, identical in rulesets 2.1.0 to 5.0.0."""

BATCH_KNOTS = (448, 768, 1536, 3072, 4608, 16384)
"""Global batch sizes N at which the parameter ``practice_N`` corrects the reference convergence."""

_PRACTICE = tuple((log(knot), f"practice_{knot}") for knot in BATCH_KNOTS)

SEQUENCES_PER_GB = 1.2
"""Sequences of a 16-bit micro-batch that fit per GB of memory, from published runs with 24 to 80 GB."""

TUNED_ACCELERATORS = 256
"""Number of accelerators at which old recipes' extra samples have decayed to 1/e. Large runs had tuned recipes even in
v2.0."""

LONG_RUN_MINUTES = 17
"""Time to train on eight A100s, for which widely copied recipes were tuned. Longer runs take extra samples."""

PARAMETERS = 336.2e6
"""Number of parameters of BERT-Large with its heads."""

UPDATE_BYTES = 30
"""Bytes that LAMB moves per parameter: weight and both moments read and written, gradient, 16-bit copy, norms."""

UPDATE_EFFICIENCY = 0.8
"""Share of the memory bandwidth that LAMB reaches."""

SEQUENCE_FLOPS = 500e9
"""Operations of a sequence, forward and backward, averaged over Wikipedia's lengths at maximum length 512. A sequence of
s tokens, m of them masked, takes 3 (24 (24 h^2 s + 4 h s^2) + m (2 h^2 + 2 h V)) operations, with h = 1024, V = 30528."""

FP8_SHARE = 0.87
"""Share of a sequence's operations that run in FP8. The encoder's linear layers take 463.5 GFLOP of the 500, and some of
these layers stay in 16 bits."""

EVALUATION_SEQUENCES = 10_000
"""Size of the benchmark's evaluation set."""

FORWARD_SHARE = 1 / 3
"""Share of the forward pass in a step's computation: the backward pass of a product is two products of the same size."""

SHARPNESS = 8
"""Exponent of the smooth maximum of two times. The maximum of two equal times is 9 % more than either."""

LARGEST_BATCH = 8 * REFERENCE_POINTS[-1][0]
"""Largest accepted global batch size, which catches typing errors. It is far above every batch size that has converged."""

SWITCHED = 8
"""Boards with at least this many devices have PCIe switches."""

OLD_ROUNDS = ("v0.5", "v0.6", "v0.7", "v1.0", "v1.1", "v2.0")
"""Early rounds. Software became faster in later rounds, and hyperparameters were found that need fewer samples."""


def chip_parameter(chip: str) -> str:
    return f"chip_{chip}"


def require_batch(batch: int, machine: Machine) -> None:
    """Raise ``ValueError`` if a global batch size is below the number of devices or above `LARGEST_BATCH`."""
    if not machine.accelerators <= batch <= LARGEST_BATCH:
        raise ValueError(
            f"global batch size {batch:,} on {counted(machine.accelerators, 'accelerator')}: expected at least one "
            f"sequence on each, and at most {LARGEST_BATCH:,} in all"
        )


@dataclass(frozen=True)
class RunTime:
    """Seconds of a run by part, with its numbers of samples and steps, averaged over seeds."""

    samples: float
    steps: float
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds from run_start to run_stop."""
        return sum(self.parts.values())

    @classmethod
    def of(cls, samples: float, steps: float, step: dict[str, float], **others: float) -> "RunTime":
        """Return the time of a run whose steps have the parts ``step``. The parts ``others`` count once."""
        return cls(samples, steps, {name: steps * seconds for name, seconds in step.items()} | others)


def update_bytes_per_s(device: Device) -> float:
    return UPDATE_EFFICIENCY * device.memory_gb_s * 1e9


def sequence_time(p: Parameters, device: Device, fp8: bool, round: str | None = None) -> tuple[float, float, float]:
    """Return a sequence's seconds on a device: matrix products, memory traffic, and the time that the power limit adds.

    ``round`` is the round of MLPerf Training whose software is used. None stands for mature software, without the slowdowns
    of old rounds and of a device's first round.
    """
    rate = exp(p["matrix_efficiency"]) * device.bf16_tflops * 1e12
    energy = exp(p["energy"]) * 2 ** (-(device.year - 2020) / exp(p["energy_halving"]))
    matrix = SEQUENCE_FLOPS / rate
    if fp8:
        assert device.fp8_tflops is not None
        fp8_rate = exp(p["matrix_efficiency"] + p["fp8_efficiency"]) * device.fp8_tflops * 1e12
        matrix = SEQUENCE_FLOPS * (FP8_SHARE / fp8_rate + (1 - FP8_SHARE) / rate)
        energy *= FP8_SHARE * exp(p["fp8_energy"]) + (1 - FP8_SHARE)
    memory = exp(p["traffic"]) / (device.memory_gb_s * 1e9)
    power = smooth_maximum(matrix + memory, energy / device.tdp_w) - matrix - memory
    # The correction for chip and software scales all three parts by the same factor.
    slowness = exp(-_log_speed(p, device, round))
    return matrix * slowness, memory * slowness, power * slowness


def _log_speed(p: Parameters, device: Device, round: str | None) -> float:
    speed = p.get(chip_parameter(device.chip), 0.0)
    speed -= p["graphics_memory"] if "GDDR" in device.memory else 0.0
    speed += p["processor"] if device.form == "CPU" else 0.0
    speed -= p["old_software"] if round in OLD_ROUNDS else 0.0
    return speed - (p["first_round"] if round is not None and round == device.first_round else 0.0)


def ring_share(members: float) -> float:
    """Return the share of a vector that each member of a ring sends in an all-gather or a reduce-scatter."""
    return 1 - 1 / members


def link_rate(p: Parameters, machine: Machine) -> float:
    """Return the bytes a second that a device sends to the other devices of its group."""
    device = machine.device
    # A bridge joins only two cards, so traffic among more cards takes other links.
    if machine.is_bridged and machine.group == 2 and device.bridge_gb_s is not None:
        return exp(p["fabric_efficiency"]) * device.bridge_gb_s * 1e9
    # On cards, no link faster than PCIe joins all devices of a group.
    return exp(p["pcie_efficiency" if device.form in ("PCIe", "NVL") else "fabric_efficiency"]) * device.link_gb_s * 1e9


def network_rate(p: Parameters, machine: Machine) -> float:
    """Return the bytes a second that a group sends to the next group.

    Boards of eight devices connect devices and ports by PCIe switches. On smaller boards, traffic to a port that several
    devices share goes through the host's memory.
    """
    device, network = machine.device, machine.network
    if device.network_gb_s is not None:
        return exp(p["network_efficiency"]) * device.network_gb_s * machine.group * 1e9
    ns_per_byte = 8 / (exp(p["network_efficiency"]) * network.gbit_s)  # nanoseconds per byte of one port
    if network.ports < machine.per_node < SWITCHED:
        ns_per_byte = smooth_maximum(ns_per_byte, 1 / (exp(p["staging_efficiency"]) * device.host_gb_s))
    return network.ports * machine.group / machine.per_node / ns_per_byte * 1e9


def smooth_maximum(one: float, other: float) -> float:
    return (one**SHARPNESS + other**SHARPNESS) ** (1 / SHARPNESS)


def smooth_minimum(one: float, other: float) -> float:
    return 1 / smooth_maximum(1 / one, 1 / other) if one and other else 0.0


def log_samples(
    p: Parameters, batch: int, accelerators: int, memory_gb: float, sequences_per_second: float, old_recipe: bool
) -> float:
    """Return the logarithm of the mean samples to the target.

    ``memory_gb`` is per device, and ``sequences_per_second`` is for the whole system. ``old_recipe`` means hyperparameters
    as published up to round v2.0.
    """
    practice = [(log_knot, p[name]) for log_knot, name in _PRACTICE]
    found = log(_line(REFERENCE_POINTS, batch)) + _line(practice, min(log(batch), practice[-1][0]))
    if old_recipe:  # the effect shrinks at large scale, where even old recipes were tuned
        growth = p["old_recipe_growth"] * max(0.0, log2(batch / 448))
        found += (p["old_recipe"] + growth) * exp(-accelerators / TUNED_ACCELERATORS)
    found += p["accumulation"] * max(0.0, log2(batch / accelerators / (SEQUENCES_PER_GB * memory_gb)))
    # Submitters tune less if a trial takes long. Measure that by the minutes of a trial at the smallest reference batch.
    minutes = REFERENCE_POINTS[0][1] / sequences_per_second / 60
    return found + p["tuning"] * max(0.0, log2(minutes / LONG_RUN_MINUTES))


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly. Values are constant before the first point, and the last segment continues beyond its end."""
    if x <= points[0][0]:
        return points[0][1]
    at = min(bisect_left(points, (x,)), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (high - low) * (x - left) / (right - left)
