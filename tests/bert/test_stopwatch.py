"""Time spent in each phase, measured by the host's clock or by events on the device."""

import pytest
import torch

from bert.execution.stopwatch import DeviceStopwatch, Stopwatch
from tests.bert.conftest import Clock


def test_an_exchange_counts_as_time_of_its_phase_but_a_nested_phase_does_not(clock: Clock) -> None:
    stopwatch, phases = Stopwatch(), []
    for phase in ("forward_backward", "update"):
        with stopwatch.time(phase):
            with stopwatch.exchanging():
                phases.append(stopwatch.tracker.phase)
                clock.now += 0.5
            phases.append(stopwatch.tracker.phase)
            for seconds in (1, 2):
                with stopwatch.time("reduce"):
                    clock.now += seconds
            clock.now += 8
    assert phases == ["exchange in forward_backward", "forward_backward", "exchange in update", "update"]
    assert stopwatch.exchanged == 0.5
    expected = {"data_wait": 0.0, "forward_backward": 8.5, "reduce": 6.0, "update": 8.5, "site_wait": 0.0}
    assert stopwatch.take() == expected
    assert (stopwatch.exchanged, stopwatch.take()) == (0.0, dict.fromkeys(expected, 0.0))


class Device:
    """Fake device with a clock in milliseconds. Events get their times when they are recorded or replayed."""

    def __init__(self) -> None:
        self.now = self.known = 0.0
        self.capturing = False
        self.captured: list[tuple[Mark, float]] = []

    def work(self, milliseconds: float) -> None:
        self.now += milliseconds

    def stopwatch(self) -> DeviceStopwatch:
        return DeviceStopwatch(lambda captured: Mark(self, captured), lambda: self.capturing)

    def replay(self) -> None:
        start = self.now
        for mark, after in self.captured:
            mark.passed = self.now = start + after


class Mark:
    def __init__(self, device: Device, captured: bool) -> None:
        self.device, self.captured = device, captured
        self.passed: float | None = None

    def record(self) -> None:
        if self.device.capturing:
            assert self.captured, "an event of another kind cannot be read"
            self.device.captured.append((self, self.device.now))
        else:
            self.passed = self.device.now

    def synchronize(self) -> None:
        assert self.passed is not None
        self.device.known = self.passed

    def elapsed_time(self, end_event: "Mark") -> float:
        assert self.passed is not None
        assert end_event.passed is not None
        assert end_event.passed <= self.device.known, "the host has not waited for it"
        return end_event.passed - self.passed


def test_a_nested_phase_counts_once_whether_captured_or_not() -> None:
    device = Device()
    stopwatch = device.stopwatch()
    device.capturing = True
    with stopwatch.time("reduce"):
        device.work(6)
    with stopwatch.time("update"):
        device.work(4)
    device.capturing, device.now = False, 100
    for _ in range(2):
        with stopwatch.time("forward_backward"):
            device.work(20)
            with stopwatch.time("data_wait"):
                device.work(3)
        with stopwatch.time("update"):
            device.replay()
    expected = {"data_wait": 0.006, "forward_backward": 0.04, "reduce": 0.012, "update": 0.008, "site_wait": 0.0}
    assert stopwatch.take() == pytest.approx(expected)
    with stopwatch.time("update"):
        device.work(9)  # no replay, so the last replay's events must not count
    assert stopwatch.take() == pytest.approx(dict.fromkeys(expected, 0) | {"update": 0.009})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")
def test_phases_inside_a_cuda_graph_are_measured_separately() -> None:
    stopwatch = DeviceStopwatch()
    matrix = torch.randn(4096, 4096, device="cuda")

    def step() -> None:
        with stopwatch.time("reduce"):
            for _ in range(8):
                torch.matmul(matrix, matrix)
        with stopwatch.time("update"):
            torch.matmul(matrix, matrix)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    stopwatch.reset()
    for _ in range(5):
        with stopwatch.time("update"):
            graph.replay()
    taken = stopwatch.take()
    assert 4 < taken["reduce"] / taken["update"] < 16
    assert taken["data_wait"] == taken["forward_backward"] == 0
