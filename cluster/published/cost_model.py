"""Cost model of a submission: its time and its parts, from facts about the devices, the links and the work.

A step consists of the time of its sequences on a device, a constant cost per micro-batch, the gradient's reduction, and the
update. A sequence takes the time of its matrix products, which reach a share of the peak rate, plus the time of its memory
traffic. But a sequence takes at least its energy divided by the device's power. The reduction inside nodes runs partly
during the backward pass. Its remaining part and the reduction between nodes form a pipeline, so the slower of the two
determines the time. The reduction between nodes also overlaps with the backward pass. The fitted efficiency of the network
includes this overlap.
"""

import re
from dataclasses import dataclass
from math import ceil, exp, log2

from cluster.devices import Machine
from cluster.published.fitted import (
    EVALUATION_SEQUENCES,
    FORWARD_SHARE,
    OLD_ROUNDS,
    PARAMETERS,
    SEQUENCES_PER_GB,
    UPDATE_BYTES,
    Parameters,
    RunTime,
    link_rate,
    log_samples,
    network_rate,
    require_batch,
    ring_share,
    sequence_time,
    smooth_maximum,
    smooth_minimum,
    update_bytes_per_s,
)
from compliance.log.schedule import evaluation_interval

FP8_SEQUENCES_PER_GB = 3.2
"""As `SEQUENCES_PER_GB`, for FP8 on devices with HBM. Published runs fit 256 sequences in 80 GB without accumulation."""

ROUND = re.compile(r"v[0-9]\.[0-9]")
"""Name of a round of MLPerf Training."""

LAST_ROUND = "v5.0"
"""The last round with BERT. Its software is the newest for which there are results."""


@dataclass(frozen=True)
class TimedRun:
    """A run whose time is predicted, with its global batch size.

    ``round`` is the round of MLPerf Training whose software the run uses, such as "v2.1". Raises ``ValueError`` if the
    batch is below the number of devices or above `LARGEST_BATCH`, or if the round is malformed.
    """

    machine: Machine
    batch: int
    round: str = LAST_ROUND

    def __post_init__(self) -> None:
        require_batch(self.batch, self.machine)
        if not ROUND.fullmatch(self.round):
            raise ValueError(f"round is {self.round[:20]!r}, expected one such as v3.1")

    @property
    def is_old(self) -> bool:
        """Tell whether the run uses software and hyperparameters of the rounds up to v2.0."""
        return self.round in OLD_ROUNDS

    @property
    def uses_fp8(self) -> bool:
        """Tell whether published software trains in FP8 on the device. Gaudi 2 supports FP8, but its results are in bf16."""
        return self.machine.device.fp8_tflops is not None and self.machine.device.vendor != "Intel"


def run_time(
    p: Parameters, run: TimedRun, samples: float | None = None, step: dict[str, float] | None = None
) -> RunTime:
    """Return the time of a run to ``samples`` (default: the predicted number). ``step`` has its parts, if known."""
    step = step or step_parts(p, run)
    samples = samples or exp(log_samples_needed(p, run, step))
    sequences = run.batch / run.machine.accelerators
    sequence = (step["matrix"] + step["memory"] + step["power"]) / sequences
    # Sequences are distributed evenly. Devices that get one more sequence than other devices determine the time.
    evaluation = FORWARD_SHARE * (ceil(EVALUATION_SEQUENCES / run.machine.accelerators) * sequence + step["launch"])
    evaluations = samples / evaluation_interval(run.batch)
    once = {"evaluation": evaluations * evaluation, "start": exp(p["start"])}
    return RunTime.of(samples, samples / run.batch, step, **once)


def log_samples_needed(p: Parameters, run: TimedRun, step: dict[str, float]) -> float:
    """Return the logarithm of the samples to the target, given the seconds of a step by part."""
    machine, rate = run.machine, run.batch / sum(step.values())
    return log_samples(p, run.batch, machine.accelerators, machine.device.memory_gb, rate, run.is_old)


def step_parts(p: Parameters, run: TimedRun) -> dict[str, float]:
    """Return the seconds of a step by part.

    ``matrix``: matrix products. ``memory``: the memory traffic that matrix products do not hide. ``power``: the slowdown by
    the power limit. ``launch``: the constant cost of all micro-batches. ``inside``, ``between``: the time that the
    reduction within and between groups adds. ``update``: LAMB on a device's shard.
    """
    machine, device = run.machine, run.machine.device
    sequences = run.batch / machine.accelerators
    matrix, memory, power = sequence_time(p, device, run.uses_fp8, run.round)
    per_gb = FP8_SEQUENCES_PER_GB if run.uses_fp8 and "HBM" in device.memory else SEQUENCES_PER_GB
    micro_batches = ceil(sequences / (per_gb * device.memory_gb))
    # If b sequences keep a device half busy, n sequences take as long as n + b sequences at full efficiency.
    launch = micro_batches * (exp(p["launch"]) + exp(p["half_batch"]) * (matrix + memory + power))
    # Only the last micro-batch's backward pass computes gradients that are ready to be sent.
    backward = (1 - FORWARD_SHARE) * (matrix + memory + power) * sequences / micro_batches
    inside, between = _reduction(p, machine, backward)
    return {
        "matrix": matrix * sequences,
        "memory": memory * sequences,
        "power": power * sequences,
        "launch": launch,
        "inside": inside,
        "between": between,
        "update": PARAMETERS * UPDATE_BYTES / update_bytes_per_s(device) / machine.group,
    }


def _reduction(p: Parameters, machine: Machine, backward: float) -> tuple[float, float]:
    """Return the seconds that summing the 16-bit gradient adds to a step, split into the parts inside and between groups.

    ``backward`` is the time of the backward pass in seconds.
    """
    gradient = 2 * PARAMETERS
    inside = 2 * gradient * ring_share(machine.group) / link_rate(p, machine)
    # The last buckets ("tail") are never hidden, because no computation is left.
    inside -= smooth_minimum((1 - min(1.0, exp(p["tail"]))) * inside, exp(p["overlap"]) * backward)
    between = 0.0
    if machine.groups > 1:
        between = 2 * gradient * ring_share(machine.accelerators) / network_rate(p, machine)
        between += exp(p["network_latency"]) * log2(machine.groups)
    together = smooth_maximum(inside, between)
    # Split the pipeline's time in proportion to `inside` and `between`, so that the parts add up to it.
    return (together * inside / (inside + between), together * between / (inside + between)) if together else (0.0, 0.0)
