"""Published results, to which the cost model is fitted, and a search for the results that are most similar to a run.

`published_results.csv` was computed from the logs that MLCommons publishes (github.com/mlcommons/training_results_v2.0 to
training_results_v5.0, the last round with BERT). Each row is an entry, with the mean minutes of its runs without the fastest
and the slowest. A failed run counts as the slowest. Runs that were entered several times are in the table once.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from pathlib import Path

from cluster.devices import Machine, describe_machine, device_named
from cluster.published.cost_model import TimedRun

TABLE = Path(__file__).with_name("published_results.csv")

SAMPLES_NOT_LOGGED = ("Gaudi2",)
"""Accelerators whose logs state a fixed number in place of the trained samples."""

SLOW_FRAMEWORK = "tinygrad"
"""Framework that uses less of an accelerator than other software. Its results took 2 to 23 times as long as predicted."""

ONE_SUBMITTER = {
    "GIGACOMPUTING": "GIGABYTE",
    "AZURE-HAZYRESEARCH": "HAZYRESEARCH",
    "AZURE": "HAZYRESEARCH",
    "NVIDIA_COREWEAVE": "NVIDIA",
    "QUANTA_CLOUD_TECHNOLOGY": "QCT",
    "SMC": "SUPERMICRO",
}
"""Company that a submitter counts as. The submitter's name is an alias, or the submitter entered that company's systems."""


def closed_rows() -> list[dict[str, str]]:
    """Return the rows of the table for closed results. Open results may have changed the model or the target."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["division"] == "closed"]


@dataclass(frozen=True)
class Result:
    """A published closed result: mean seconds to train, and mean samples to the target if its logs state them.

    ``tells_device`` is False if the result used `SLOW_FRAMEWORK`, so that its time does not show the accelerator's speed.
    """

    run: TimedRun
    submitter: str
    system: str
    seconds: float
    samples: float | None
    tells_device: bool = True

    @property
    def company(self) -> str:
        """Name of the company, unified if it submitted under several names."""
        return ONE_SUBMITTER.get(self.submitter.upper(), self.submitter.upper())

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for results of the same system and recipe."""
        machine = self.run.machine
        return machine.device.name, machine.nodes, machine.per_node, self.run.batch, self.run.is_old


def machine_of_row(row: Mapping[str, str]) -> Machine:
    """Return the machine of a row. A node without accelerators is assumed to have two CPUs."""
    per_node, name = int(row["accelerators_per_node"]), row["accelerator"].strip()
    if per_node == 0 and name in ("", "N/A"):
        name, per_node = "CPU", 2
    interconnect, networking = row["accelerator_interconnect"], row["host_networking"]
    return describe_machine(device_named(name), int(row["nodes"]), per_node, interconnect, networking)


@lru_cache
def results() -> tuple[Result, ...]:
    """Return all closed results on known devices, in the order of the table."""
    found = []
    for row in closed_rows():
        try:
            machine = machine_of_row(row)
        except ValueError:  # no data sheet for this device, such as a TPU
            continue
        samples = None if machine.device.model in SAMPLES_NOT_LOGGED else float(row["mean_train_samples"])
        run = TimedRun(machine, int(row["global_batch_size"]), row["round"])
        seconds, tells_device = 60 * float(row["minutes"]), SLOW_FRAMEWORK not in row["framework"]
        found.append(Result(run, row["submitter"], row["system"], seconds, samples, tells_device))
    return tuple(found)


@lru_cache
def results_of_devices() -> tuple[Result, ...]:
    """Return the results whose time shows the speed of the accelerator."""
    return tuple(result for result in results() if result.tells_device)


def nearest(run: TimedRun) -> tuple[Result, ...]:
    """Return the three results on the most similar machines: by model, chip and form, then scale, nodes and batch."""
    # Sorting is stable, so the newest of equally similar results comes first.
    newest_first = sorted(results(), key=lambda result: result.run.round, reverse=True)
    return tuple(sorted(newest_first, key=lambda result: _distance(result.run, run))[:3])


def _distance(one: TimedRun, other: TimedRun) -> tuple[float, float]:
    here, there = one.machine, other.machine
    unlike = sum(getattr(here.device, name) != getattr(there.device, name) for name in ("model", "chip", "form"))
    apart = abs(log2(here.accelerators / there.accelerators)) + 0.5 * abs(log2(here.nodes / there.nodes))
    return unlike, apart + 0.5 * abs(log2(one.batch / other.batch)) + 0.25 * (one.is_old != other.is_old)


def usual_batches(accelerators: int) -> tuple[int, ...]:
    """Return the batch sizes of published results at the next smaller and the next larger number of accelerators."""
    scales = sorted({result.run.machine.accelerators for result in results_of_devices()})
    near = {*[scale for scale in scales if scale <= accelerators][-1:], *[s for s in scales if s >= accelerators][:1]}
    batches = {result.run.batch for result in results_of_devices() if result.run.machine.accelerators in near}
    # If all these batches are too small, use the smallest possible batch: one sequence per accelerator.
    return tuple(sorted(batch for batch in batches if batch >= accelerators)) or (accelerators,)
