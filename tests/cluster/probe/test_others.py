"""A machine that others use while it is probed is named."""

from pathlib import Path

import numpy as np
import pytest

from cluster.probe.machine import Facts
from cluster.probe.others import complaints, processor_seconds


def facts(host: str, machine: str) -> Facts:
    return Facts(host, machine, 1, 1, 4, 2**30, (), (), "cpu", 0, 0, "", "")


@pytest.mark.parametrize(
    ("busy", "own", "named"),
    [
        (40.0, 19.0, []),  # two ranks, 38 of 40 seconds
        (40.0, 12.0, ["16%"]),
        (100.0, 19.0, ["62%"]),
        (0.0, 19.0, []),
    ],
)
def test_a_machine_is_busy_if_others_take_a_tenth_of_it(busy: float, own: float, named: list[str]) -> None:
    idle = [[20.0, 100.0, 19.5]]
    lines = complaints(np.array([[busy, 100.0, own]] * 2 + idle), [facts("a", "x"), facts("a", "x"), facts("b", "y")])
    assert len(lines) == len(named)
    for line, share in zip(lines, named, strict=True):
        assert line.startswith("host a is busy")
        assert share in line


def test_a_system_that_does_not_tell_is_not_complained_about(tmp_path: Path) -> None:
    for content in (None, "", "cpu a b c\n", "memory\n"):
        path = tmp_path / "stat"
        if content is not None:
            path.write_text(content)
        busy, whole, own = processor_seconds(path)
        assert (busy, whole) == (0, 0)
        assert own > 0
        assert complaints(np.array([[busy, whole, 1.0]]), [facts("a", "x")]) == []


def test_processor_time_is_read_as_the_kernel_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "stat"
    path.write_text("cpu  100 10 50 700 40 20 30 50 999 999\ncpu0 1 2 3\n")
    busy, whole, _ = processor_seconds(path)
    assert busy / whole == pytest.approx(0.26)
