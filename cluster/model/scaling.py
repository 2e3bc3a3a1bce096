"""Time to train against the number of accelerators: where it falls, where it stops falling, and what takes the rest."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.devices import Device
from cluster.model.machine import describe_machine
from cluster.model.prediction import PARTS, Prediction, predict, usual_run
from cluster.model.published import Result, results
from console.files import write_atomically

LARGEST = 16_384

CAUSES = {
    "devices at work": ("matrix", "memory", "power"),
    "launches and small kernels": ("launch",),
    "reduction": ("inside", "between"),
    "LAMB": ("update",),
    "evaluation": ("evaluation",),
    "start": ("start",),
}
"""Parts of a prediction, gathered."""


@dataclass(frozen=True)
class Point:
    """A number of accelerators, with the fastest run that is predicted on it.

    Attributes:
        efficiency: sequences a second and accelerator over those of one whole node.
        samples_factor: samples to converge over those that one whole node needs, which is what large batches cost.
    """

    prediction: Prediction
    efficiency: float
    samples_factor: float

    @property
    def accelerators(self) -> int:
        """How many there are."""
        return self.prediction.run.machine.accelerators

    def share(self, cause: str) -> float:
        """Return the share of the time to train that goes to one of `CAUSES`."""
        time = self.prediction.time
        return sum(time.parts[part] for part in CAUSES[cause]) / time.total


def scale(device: Device, per_node: int, networking: str = "") -> list[Point]:
    """Predict whole nodes in powers of two, from one up to `LARGEST` accelerators, each with the fastest of the global
    batch sizes that are published at such scales.
    """
    if per_node > LARGEST:
        raise ValueError(f"GPUs per node: {per_node:,}, expected at most {LARGEST:,}")
    predictions = []
    nodes = 1
    while nodes * per_node <= LARGEST:
        machine = describe_machine(device, nodes, per_node, networking=networking)
        predictions.append(predict(usual_run(machine)))
        nodes *= 2
    first = predictions[0]
    return [Point(each, _rate(each) / _rate(first), each.time.samples / first.time.samples) for each in predictions]


def published_on(device: Device) -> list[Result]:
    """Return the published closed results of a device, the fewest accelerators first."""
    found = [result for result in results() if result.run.machine.device.name == device.name]
    return sorted(found, key=lambda result: (result.run.machine.accelerators, result.seconds))


def write_table(points: Sequence[Point], path: Path) -> None:
    """Write a row for each point, whole or not at all: minutes with their interval, efficiency, minutes of each part."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = ("accelerators", "nodes", "global_batch_size", "minutes", "low_minutes", "high_minutes")
    writer.writerow((*header, "efficiency", "samples", *(f"{part}_minutes" for part in PARTS)))
    for point in points:
        prediction = point.prediction
        numbers = (prediction.minutes, prediction.low, prediction.high, point.efficiency)
        parts = (prediction.time.parts[part] / 60 for part in PARTS)
        writer.writerow(
            (
                *(point.accelerators, prediction.run.machine.nodes, prediction.run.batch),
                *(f"{number:.6g}" for number in numbers),
                f"{prediction.time.samples:.0f}",
                *(f"{minutes:.6g}" for minutes in parts),
            )
        )
    write_atomically(path, text.getvalue().encode())


def _rate(prediction: Prediction) -> float:
    """Sequences a second on each accelerator, from run_start to run_stop."""
    return prediction.time.samples / prediction.time.total / prediction.run.machine.accelerators
