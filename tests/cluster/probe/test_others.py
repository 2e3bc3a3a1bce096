"""A probe reports that other programs are using a machine."""

import time

import numpy as np
import pytest

from cluster.probe.machine import Facts
from cluster.probe.others import processor_seconds, warnings
from cluster.view import Host


def facts(host: str, machine: str) -> Facts:
    return Facts(machine, Host(host, 4, 2**30, (), ()), "cpu", 0, "")


@pytest.mark.parametrize(
    ("busy", "own", "named"),
    [
        (40.0, 19.0, []),  # two ranks that used 38 of 40 CPU seconds
        (40.0, 12.0, ["16%"]),
        (100.0, 19.0, ["62%"]),
        (0.0, 19.0, []),
    ],
)
def test_a_machine_is_busy_if_others_take_a_tenth_of_it(busy: float, own: float, named: list[str]) -> None:
    idle = [[20.0, 100.0, 19.5]]
    lines = warnings(np.array([[busy, 100.0, own]] * 2 + idle), [facts("a", "x"), facts("a", "x"), facts("b", "y")])
    assert len(lines) == len(named)
    for line, share in zip(lines, named, strict=True):
        assert line.startswith("host a is busy")
        assert share in line


def test_processor_seconds_grow_with_work() -> None:
    before, start = processor_seconds(), time.process_time()
    while time.process_time() - start < 0.2:
        pass
    busy, whole, own = processor_seconds() - before
    assert own >= 0.2
    assert 0.1 < busy <= whole + 0.1, "the counters move in ticks"
