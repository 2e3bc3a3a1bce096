"""Published results as observations of the cost model, and which of them lie near a run."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from pathlib import Path

from cluster.devices import device_named
from cluster.published.cost_model import TimedRun
from cluster.published.machine import Machine, describe_machine

TABLE = Path(__file__).parents[2] / "compliance/report/published_results.csv"
"""Closed and open results of MLPerf Training v2.0 to v3.1, as `compliance/report/published.py` describes them."""

SOCKETS = 2
"""Of a node that has no accelerator."""

SAMPLES_NOT_LOGGED = ("Gaudi2",)
"""Models whose logs hold a fixed number in place of the samples trained."""

ONE_SUBMITTER = {
    "GIGACOMPUTING": "GIGABYTE",
    "AZURE-HAZYRESEARCH": "HAZYRESEARCH",
    "AZURE": "HAZYRESEARCH",
    "NVIDIA_COREWEAVE": "NVIDIA",
}
"""Names under which the same company submitted, or the same system was submitted."""


@dataclass(frozen=True)
class Result:
    """A published closed result.

    Attributes:
        submitter, system: who published it, and the name of the system.
        seconds: mean time to train without the fastest and the slowest run.
        samples: mean to the target; None where logs do not tell.
    """

    run: TimedRun
    submitter: str
    system: str
    seconds: float
    samples: float | None

    @property
    def company(self) -> str:
        """The submitter by one name, where a company or a system has several."""
        return ONE_SUBMITTER.get(self.submitter.upper(), self.submitter.upper())

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that results share which are of one system and recipe, by whomever."""
        machine = self.run.machine
        return machine.device.name, machine.nodes, machine.per_node, self.run.batch, self.run.is_old


def described_machine(row: Mapping[str, str]) -> Machine:
    """Return the machine that a row of a table of results describes. A node without accelerators has two CPUs.

    Raises:
        ValueError: a number is missing or wrong, or the accelerator is unknown.
    """
    nodes, per_node = whole_number(row, "nodes"), whole_number(row, "accelerators_per_node")
    name = row["accelerator"].strip()
    if per_node == 0 and name in ("", "N/A"):
        device, per_node = device_named("CPU"), SOCKETS
    else:
        device = device_named(name)
    return describe_machine(device, nodes, per_node, row["accelerator_interconnect"], row["host_networking"])


def whole_number(row: Mapping[str, str], column: str) -> int:
    """Return the number of a column, which programs with gaps in it may have written as "8.0".

    Raises:
        ValueError: it is no whole number of at most nine digits.
    """
    text = row[column].strip().removesuffix(".0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise ValueError(f"{column} is {text[:40]!r}, expected a whole number")
    return int(text)


@lru_cache
def results() -> tuple[Result, ...]:
    """Return all closed results on devices of the facts file, in the table's order."""
    found = []
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["division"] != "closed":
                continue
            # Devices that the facts file leaves out have no rates to predict from.
            try:
                machine = described_machine(row)
            except ValueError:
                continue
            samples = None if machine.device.model in SAMPLES_NOT_LOGGED else float(row["mean_train_samples"])
            run = TimedRun(machine, int(row["global_batch_size"]), row["round"])
            # Minutes in the table, seconds everywhere else.
            found.append(Result(run, row["submitter"], row["system"], 60 * float(row["minutes"]), samples))
    return tuple(found)


def nearest(run: TimedRun) -> tuple[Result, ...]:
    """Return the three results on machines most like a run's: by model and form, then scale, nodes, batch; newest first."""
    # A stable sort follows: of equally near results the newest comes first.
    newest_first = sorted(results(), key=lambda result: result.run.round or "", reverse=True)
    return tuple(sorted(newest_first, key=lambda result: _distance(result.run, run))[:3])


def _distance(one: TimedRun, other: TimedRun) -> tuple[float, float]:
    here, there = one.machine, other.machine
    # Tuples compare in order: another model or form weighs more than any distance in scale.
    unlike = (here.device.model != there.device.model) + (here.device.form != there.device.form)
    apart = abs(log2(here.accelerators / there.accelerators)) + 0.5 * abs(log2(here.nodes / there.nodes))
    return unlike, apart + 0.5 * abs(log2(one.batch / other.batch)) + 0.25 * (one.is_old != other.is_old)


def usual_batches(accelerators: int) -> tuple[int, ...]:
    """Global batch sizes of the published results at the next smaller and the next larger number of accelerators."""
    scales = sorted({result.run.machine.accelerators for result in results()})
    below = [scale for scale in scales if scale <= accelerators][-1:]
    above = [scale for scale in scales if scale >= accelerators][:1]
    batches = {result.run.batch for result in results() if result.run.machine.accelerators in (*below, *above)}
    # Where every published batch there is too small, one sequence on each is the least that there can be.
    return tuple(sorted(batch for batch in batches if batch >= accelerators)) or (accelerators,)
