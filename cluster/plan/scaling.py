"""Time to train against the number of accelerators: the best plan of each, where it stops falling, what takes the rest."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bert.configuration.config import Config
from cluster.devices import Device
from cluster.model.work import wikipedia_work
from cluster.plan.search import Candidate, search
from cluster.plan.target import described
from cluster.published.calibration import calibration
from cluster.published.cost_model import TimedRun
from cluster.published.machine import Machine, describe_machine
from cluster.published.results import Result, results
from console.files import write_atomically

LARGEST = 16_384

CAUSES = ("devices at work", "launches and small kernels", "reduction", "update", "evaluation", "start")
"""Parts of the time to train. Waiting for data is in none of them: devices of their own compute meanwhile."""


@dataclass(frozen=True)
class ScalingPoint:
    """A number of accelerators, with the best plan for it.

    Attributes:
        seconds: by cause.
        low, high: minutes between which 80 % of results are expected, as published ones scatter.
        efficiency: sequences a second and accelerator over those of one whole node.
        samples_factor: samples to converge over those that one whole node needs, which is what large batches cost.
    """

    machine: Machine
    plan: Candidate
    seconds: dict[str, float]
    low: float
    high: float
    efficiency: float
    samples_factor: float

    @property
    def accelerators(self) -> int:
        """Number of accelerators."""
        return self.machine.accelerators

    @property
    def minutes(self) -> float:
        """Predicted time to train."""
        return self.plan.seconds / 60

    def share(self, cause: str) -> float:
        """Return the share of the time to train that goes to one of `CAUSES`."""
        return self.seconds[cause] / self.plan.seconds


def scale(
    config: Config,
    device: Device,
    per_node: int,
    networking: str = "",
    report: Callable[[ScalingPoint], None] = lambda _: None,
) -> list[ScalingPoint]:
    """Plan a recipe for whole nodes in powers of two, from one up to `LARGEST` accelerators; ``report`` gets each point.

    Raises:
        ValueError: a node has more of them, the recipe trains no BERT-Large, or nothing is feasible.
    """
    if not 1 <= per_node <= LARGEST:
        raise ValueError(f"GPUs per node: {per_node:,}, expected 1 to {LARGEST:,}")
    if config.log.division != "closed":
        raise ValueError(
            f"{config.recipe} is not the benchmark, whose results show how it scales: expected another recipe"
        )
    work = wikipedia_work(config.model)
    points: list[ScalingPoint] = []
    nodes = 1
    while nodes * per_node <= LARGEST:
        # Twice the same machine: as results describe it, for the interval, and as a target of rates.
        machine = describe_machine(device, nodes, per_node, networking=networking)
        target = described(device, nodes * per_node, per_node, networking)
        plan = search(config, work, target).best[0]
        # The interval is of published results about the fit, taken over to the planned time as a factor.
        low, high = calibration().interval(TimedRun(machine, plan.strategy.global_batch_size))
        # Launches are inside forward and backward in the step's records; here they are a cause of their own.
        launches = target.rates[plan.strategy.precision].micro_batch_s * plan.strategy.gradient_accumulation_steps
        parts = plan.run.parts
        seconds = {
            "devices at work": parts["forward_backward"] + parts["data_wait"] - plan.run.steps * launches,
            "launches and small kernels": plan.run.steps * launches,
            "reduction": parts["reduce"],
        } | {cause: parts[cause] for cause in ("update", "evaluation", "start")}
        # Efficiency is relative to the first point, which compares with itself.
        first = points[0].plan if points else plan
        efficiency = _rate(plan, nodes * per_node) / _rate(first, per_node)
        samples = plan.run.samples / first.run.samples
        minutes = plan.seconds / 60
        points.append(ScalingPoint(machine, plan, seconds, low * minutes, high * minutes, efficiency, samples))
        report(points[-1])
        nodes *= 2
    return points


def published_on(device: Device) -> list[Result]:
    """Return the published closed results of a device, the fewest accelerators first."""
    # By the whole name: other forms and memories of a model scale differently.
    found = [result for result in results() if result.run.machine.device.name == device.name]
    return sorted(found, key=lambda result: (result.run.machine.accelerators, result.seconds))


def write_table(points: Sequence[ScalingPoint], path: Path) -> None:
    """Write a row for each point, whole or not at all: what is planned, minutes with their interval, and those of each
    cause.
    """
    # Written in memory first, so that a failing disk leaves no half file.
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    strategy_names = (
        "global_batch_size",
        "gradient_accumulation_steps",
        "tensor",
        "pipeline",
        "virtual_stages",
        "precision",
        "recompute",
        "reduction",
        "reduce_dtype",
        "bucket_bytes",
    )
    header = (
        "accelerators",
        "nodes",
        *strategy_names,
        "minutes",
        "low_minutes",
        "high_minutes",
        "efficiency",
        "samples",
    )
    writer.writerow((*header, *(f"{cause.replace(' ', '_')}_minutes" for cause in CAUSES)))
    for point in points:
        strategy = point.plan.strategy
        numbers = (point.minutes, point.low, point.high, point.efficiency)
        writer.writerow(
            (
                *(point.accelerators, point.machine.nodes),
                *(getattr(strategy, name) for name in strategy_names),
                *(f"{number:.6g}" for number in numbers),
                f"{point.plan.run.samples:.0f}",
                *(f"{point.seconds[cause] / 60:.6g}" for cause in CAUSES),
            )
        )
    write_atomically(path, text.getvalue().encode())


def _rate(plan: Candidate, accelerators: int) -> float:
    """Sequences a second on each accelerator, from run_start to run_stop."""
    return plan.run.samples / plan.seconds / accelerators
