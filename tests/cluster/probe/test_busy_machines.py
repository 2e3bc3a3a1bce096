"""A probe notices that other programs are using a machine."""

import time

import numpy as np
import pytest

from cluster.probe.computing import busy_machines, processor_seconds
from cluster.probe.machine import Facts
from cluster.view import Host


@pytest.mark.parametrize(("busy", "own", "share"), [(40.0, 19.0, None), (40.0, 12.0, 0.16), (0.0, 19.0, None)])
def test_a_machine_is_busy_if_others_take_a_tenth_of_it(busy: float, own: float, share: float | None) -> None:
    """Host "a" has two ranks. Host "b" is idle."""
    spent_R3 = np.array([[busy, 100.0, own]] * 2 + [[20.0, 100.0, 19.5]])
    every = [Facts(machine, Host(host, 4, 2**30, (), ()), "cpu", 0, "") for host, machine in ("ax", "ax", "by")]
    assert busy_machines(spent_R3, every) == ({} if share is None else {"a": pytest.approx(share)})


def test_processor_seconds_grow_with_work() -> None:
    before, start = processor_seconds(), time.process_time()
    while time.process_time() - start < 0.2:
        pass
    busy, whole, own = processor_seconds() - before
    assert own >= 0.2
    assert 0.1 < busy <= whole + 0.1, "the counters move in ticks"
