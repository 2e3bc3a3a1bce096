"""Processor time that other programs used during the probe, which makes a machine look slow."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import psutil
from numpy.typing import NDArray

from bert.parallel.mesh import Mesh
from cluster.probe.computing import gather_numbers
from cluster.probe.machine import Facts

MOST = 0.1
"""Share of a machine's processors that other programs may use without a warning."""


def processor_seconds() -> NDArray[np.float64]:
    """Return [busy, total, own]: this machine's busy and total processor seconds, and those of this process."""
    times = psutil.cpu_times()
    whole = sum(times[:8])  # user time already includes the time of guests
    return np.array([whole - times.idle - times.iowait, whole, time.process_time()])


def watch_others(mesh: Mesh, before: NDArray[np.float64], every: Sequence[Facts]) -> list[str]:
    """Return a warning for each machine that was busy since ``before``. All ranks must call this at the same time."""
    return warnings(gather_numbers(processor_seconds() - before, mesh), every)


def warnings(spent_R3: NDArray[np.float64], every: Sequence[Facts]) -> list[str]:
    """Return a warning for each busy machine, from the increase of `processor_seconds` on each rank."""
    lines = []
    for machine in dict.fromkeys(facts.machine for facts in every):
        ranks = [rank for rank, facts in enumerate(every) if facts.machine == machine]
        # All ranks of a machine read the same counters.
        busy, whole, _ = spent_R3[ranks[0]]
        share = (busy - spent_R3[ranks, 2].sum()) / whole if whole else 0.0
        if share > MOST:
            lines.append(
                f"host {every[ranks[0]].host.name} is busy: other programs took {share:.0%} of its processors during the "
                "probe, so its measured rates are too low. Probe again when it is idle"
            )
    return lines
