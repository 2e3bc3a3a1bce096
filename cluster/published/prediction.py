"""Time to train of a run that nobody has made: minutes, where they go, how sure that is, and what was published nearby."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.published.calibration import INTERVAL, calibration
from cluster.published.cost_model import RunTime, TimedRun, run_time, uses_fp8
from cluster.published.machine import Machine
from cluster.published.results import Result, nearest, results, usual_batches
from console.text import counted

PARTS = {
    "matrix": "matrix products",
    "memory": "memory traffic",
    "power": "limit of power",
    "launch": "launches and small kernels",
    "inside": "reduction in the node",
    "between": "reduction between nodes",
    "update": "LAMB",
    "evaluation": "evaluation",
    "start": "start",
}


@dataclass(frozen=True)
class Prediction:
    """A predicted time to train.

    Attributes:
        time: where it goes, in seconds.
        low, high: minutes between which 80 % of results are expected.
        extrapolates: what no published result covers: the accelerator, the scale.
        near: the published results on the machines most like this one.
    """

    run: TimedRun
    time: RunTime
    low: float
    high: float
    extrapolates: tuple[str, ...]
    near: tuple[Result, ...]

    @property
    def minutes(self) -> float:
        """Minutes from run_start to run_stop."""
        return self.time.total / 60


def predict(run: TimedRun) -> Prediction:
    """Predict the time to train of a run, by the calibration that is shipped."""
    time = run_time(calibration().parameters, run)
    low, high = calibration().interval(run)
    return Prediction(run, time, time.total / 60 * low, time.total / 60 * high, _extrapolates(run), nearest(run))


def usual_run(machine: Machine, round: str | None = None) -> TimedRun:
    """Return a run with the global batch size, of those published at the nearest scales, that is predicted fastest.

    Raises:
        ValueError: no batch size converges on so many accelerators.
    """
    # Only batches with which runs near this scale reached the target, however fast steps of others would be.
    runs = [TimedRun(machine, batch, round) for batch in usual_batches(machine.accelerators)]
    parameters = calibration().parameters
    return min(runs, key=lambda run: run_time(parameters, run).total)


def _extrapolates(run: TimedRun) -> tuple[str, ...]:
    machine = run.machine
    # Of the data, not of the fit: the model answers for any scale.
    largest = max(result.run.machine.accelerators for result in results())
    largest_batch = max(result.run.batch for result in results())
    found = []
    if machine.device.model not in calibration().models:
        found.append(f"no published result of {machine.device.name}: by its data sheet alone")
    if machine.accelerators > largest:
        found.append(f"no published result of more than {largest:,} accelerators")
    if run.batch > largest_batch:
        found.append(f"no published result of a global batch size above {largest_batch:,}")
    return tuple(found)


def as_document(prediction: Prediction) -> dict[str, object]:
    """Return a prediction as a JSON document: minutes throughout."""
    run, machine = prediction.run, prediction.run.machine
    return {
        "accelerator": machine.device.name,
        "nodes": machine.nodes,
        "accelerators_per_node": machine.per_node,
        "global_batch_size": run.batch,
        "minutes": prediction.minutes,
        "low": prediction.low,
        "high": prediction.high,
        "interval": INTERVAL,
        "parts": {name: seconds / 60 for name, seconds in prediction.time.parts.items()},
        "samples": prediction.time.samples,
        "steps": prediction.time.steps,
        "evaluations": prediction.time.evaluations,
        "network": {
            "ports_per_node": machine.network.ports,
            "gbit_s": machine.network.gbit_s,
            "assumed": machine.network.is_assumed,
        },
        "extrapolates": list(prediction.extrapolates),
        "nearest": [
            {
                "round": result.run.round,
                "submitter": result.submitter,
                "system": result.system,
                "accelerator": result.run.machine.device.name,
                "nodes": result.run.machine.nodes,
                "accelerators_per_node": result.run.machine.per_node,
                "global_batch_size": result.run.batch,
                "minutes": result.seconds / 60,
            }
            for result in prediction.near
        ],
    }


def as_lines(prediction: Prediction) -> list[str]:
    """Return a prediction in lines for people."""
    run, machine, time = prediction.run, prediction.run.machine, prediction.time
    minutes, low, high = map(minutes_in_digits, (prediction.minutes, prediction.low, prediction.high))
    lines = [
        f"{machine.accelerators:,} x {machine.device.name}, {counted(machine.nodes, 'node')}, global batch size "
        f"{run.batch:,}, {'FP8' if uses_fp8(run) else 'bf16'}",
        f"{minutes} min to 0.720, {INTERVAL:.0%} between {low} and {high}",
        f"{time.samples / 1e6:.2f} million samples, {time.steps:,.0f} steps, "
        f"{time.samples / time.total / machine.accelerators:,.0f} sequences/s on each accelerator",
        "",
    ]
    for name, seconds in sorted(time.parts.items(), key=lambda part: -part[1]):
        lines.append(f"{PARTS[name]:28}{minutes_in_digits(seconds / 60):>9} min{seconds / time.total:8.1%}")
    lines += ["", "published nearby:"]
    for result in prediction.near:
        there = result.run.machine
        lines.append(
            f"{minutes_in_digits(result.seconds / 60):>9} min  {there.nodes} x {there.per_node} {there.device.name}, "
            f"batch {result.run.batch:,}: {result.submitter} {result.system} ({result.run.round})"
        )
    notes = list(prediction.extrapolates)
    # What the device itself brings is a fact; only an assumed network is to be said.
    if machine.groups > 1 and machine.network.is_assumed and machine.device.network_gb_s is None:
        network = machine.network
        ports = counted(network.ports, "port")
        notes.append(f"the network is assumed: {ports} of {network.gbit_s:.0f} Gbit/s a node (--networking tells)")
    return lines + ([""] if notes else []) + [f"note: {note}" for note in notes]


def minutes_in_digits(minutes: float) -> str:
    """Write minutes in three digits, and never fewer decimals than make a difference."""
    decimals = max(0, 2 - math.floor(math.log10(minutes))) if minutes > 0 else 2
    return f"{minutes:,.{min(decimals, 4)}f}"
