"""Stopwatches for the phases of a step, based on the host's clock or on CUDA events."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from bert.execution.phases import EXCHANGE, PHASES, SITE_WAIT, PhaseTracker

_PHASES = *PHASES, SITE_WAIT


class Span(NamedTuple):
    """CUDA events at the beginning and at the end of a phase, and the enclosing phase, if any."""

    begin: Any
    end: Any
    around: str | None = None

    def seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / 1000

    def lies_in(self, outer: "Span") -> bool:
        return outer.begin.elapsed_time(self.begin) >= 0 and self.end.elapsed_time(outer.end) >= 0


def cuda_event(captured: bool) -> torch.cuda.Event:
    """Create a timing event. A ``captured`` event can be recorded in a CUDA graph, which records it at each replay."""
    return torch.cuda.Event(enable_timing=True, external=captured)


def is_capturing() -> bool:
    # Check for initialization first: a run on a CPU must not initialize CUDA.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Stopwatch:
    """Stopwatch for training on a CPU. It measures the seconds of each phase since the last ``take`` by the host's clock."""

    def __init__(self) -> None:
        self.tracker = PhaseTracker()
        self.exchanged = 0.0
        """Seconds of forward and backward passes spent in ``exchanging`` since the last ``take``.

        They do not count as the rank's own work.
        """
        self._seconds: dict[str, float] = dict.fromkeys(_PHASES, 0.0)
        self._inside = 0.0

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the block's time towards ``phase``. Nested blocks count towards their own phases."""
        self.tracker.enter(phase)
        # ``_inside`` is the time of the blocks nested in this one.
        begin, inside = time.perf_counter(), self._inside
        self._inside = 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self._seconds[phase] += seconds - self._inside
            self._inside = inside + seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's time as waiting for other ranks, unless a CUDA graph is being captured."""
        if is_capturing():
            yield
            return
        with self.time("reduce"):
            yield
        self.tracker.enter("forward_backward")

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count the block's time towards the enclosing phase, but also as time spent waiting for other ranks.

        Use it for communication with the ranks that compute the same micro-batch.
        """
        phase, begin = self.tracker.phase, time.perf_counter()
        self.tracker.enter(EXCHANGE + phase)
        try:
            yield
        finally:
            self.tracker.enter(phase)
            # ``Intervals`` counts data_wait and forward_backward as the rank's own work, and subtracts this time.
            if phase == "forward_backward":
                self.exchanged += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """Return the seconds by phase, and reset them."""
        taken = self._seconds
        self.reset()
        return taken

    def reset(self) -> None:
        self._seconds = dict.fromkeys(_PHASES, 0.0)
        self.exchanged = 0.0


class DeviceStopwatch(Stopwatch):
    """Stopwatch for training on a GPU. It measures phases by CUDA events; only in ``take`` does the host wait for them.

    Time spent waiting for data or for other ranks counts only while the device is idle. If a phase lies inside a captured
    step, the CUDA graph records the phase's events again at every replay. ``take`` reads the events of the last replay,
    assumes that the phase took equally long in every step, and subtracts it from the enclosing phase.
    """

    def __init__(self, event: Callable[[bool], Any] = cuda_event, capturing: Callable[[], bool] = is_capturing) -> None:
        super().__init__()
        self._event, self._capturing = event, capturing
        self._spans: dict[str, list[Span]] = {phase: [] for phase in _PHASES}
        self._enclosing: str | None = None
        # Any phase may be part of a captured step, so there is one span for each phase. All captures share these spans.
        self._captured: dict[str, Span] = {phase: Span(event(True), event(True)) for phase in _PHASES}
        # Record the events now, because ``elapsed_time`` rejects unrecorded events. ``take`` does not count these first
        # records, because they lie outside all measured phases.
        for span in self._captured.values():
            span.begin.record()
            span.end.record()

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the block's device time towards ``phase``. Nested blocks count towards their own phases."""
        self.tracker.enter(phase)
        capturing, around = self._capturing(), self._enclosing
        span = self._captured[phase] if capturing else Span(self._event(False), self._event(False), around)
        span.begin.record()
        self._enclosing = phase
        try:
            yield
        finally:
            self._enclosing = around
            span.end.record()
            if not capturing:  # ``take`` reads the events later, because the device has not reached them yet
                self._spans[phase].append(span)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Do not measure exchanges on a GPU: the host does not wait for them, and a step has hundreds."""
        yield

    def take(self) -> dict[str, float]:
        """Return the seconds by phase and reset them. Waits until the device has finished the phases."""
        for phase, spans in self._spans.items():
            if spans:
                spans[-1].end.synchronize()
            for span in spans:
                self._seconds[phase] += span.seconds()
                if span.around is not None:
                    self._seconds[span.around] -= span.seconds()
        for phase, captured in self._captured.items():
            for around, spans in self._spans.items():
                # If the captured events are outside the last span, that span did not replay them, so do not count them.
                if around != phase and spans and captured.lies_in(spans[-1]):
                    seconds = len(spans) * captured.seconds()
                    self._seconds[phase] += seconds
                    self._seconds[around] -= seconds
        return super().take()

    def reset(self) -> None:
        super().reset()
        self._spans = {phase: [] for phase in _PHASES}
