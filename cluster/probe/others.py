"""Processor time that programs other than the probe take while it measures, which makes a machine look slow."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert.parallel.mesh import Mesh
from cluster.probe.computing import gather_numbers
from cluster.probe.machine import Facts

MOST = 0.1
"""Share of a machine's processors that others may take without a warning."""


def processor_seconds(stat: Path = Path("/proc/stat")) -> NDArray[np.float64]:
    """Return the seconds that processors of this machine were busy, all their seconds, and this process's own, [3].

    The first two are 0 where the system does not tell.
    """
    try:
        # user, nice, system, idle, iowait, irq, softirq, steal: what a hypervisor takes counts as busy.
        ticks = [int(word) for word in stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        idle, whole = sum(ticks[3:5]), sum(ticks)
    except (OSError, ValueError):
        idle = whole = 0
    second = os.sysconf("SC_CLK_TCK")
    return np.array([(whole - idle) / second, whole / second, time.process_time()])


def complaints(spent_R3: NDArray[np.float64], every: Sequence[Facts]) -> list[str]:
    """Name the machines on which others took processors, from what ``processor_seconds`` grew by on every rank R."""
    lines = []
    for machine in dict.fromkeys(facts.machine for facts in every):
        ranks = [rank for rank, facts in enumerate(every) if facts.machine == machine]
        # All ranks of a machine read the same counters.
        busy, whole, _ = spent_R3[ranks[0]]
        share = (busy - spent_R3[ranks, 2].sum()) / whole if whole else 0.0
        if share > MOST:
            lines.append(
                f"host {every[ranks[0]].host} is busy: other programs took {share:.0%} of its processors while the probe "
                "measured, so its rates are too low; probe again when it is idle"
            )
    return lines


def watch_others(mesh: Mesh, before: NDArray[np.float64], every: Sequence[Facts]) -> list[str]:
    """Return the complaints about the time since ``before``, on every rank. Every rank must call it at the same time."""
    return complaints(gather_numbers(processor_seconds() - before, mesh), every)
