"""Time of a step by phase, in seconds, by the host's clock or by events on a GPU's timeline."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bert.timing.phases import EXCHANGE, PHASES, PhaseTracker

Span = tuple[Any, Any]
"""Two CUDA events."""


def cuda_event(captured: bool) -> torch.cuda.Event:
    """Return an event; a ``captured`` one is recorded by a CUDA graph at each replay."""
    return torch.cuda.Event(enable_timing=True, external=captured)


def is_capturing() -> bool:
    """Tell whether the current stream is being captured into a CUDA graph."""
    # In this order: a run on a CPU must not start CUDA.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Stopwatch:
    """Seconds of each phase since the last ``take``, by the host's clock, which is right on a CPU."""

    def __init__(self) -> None:
        self.tracker = PhaseTracker()
        self.exchanged = 0.0
        """Seconds of ``exchanging`` in forward and backward passes since the last ``take``: not the rank's own work."""
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._inside = 0.0

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the body towards ``phase``, except what it counts towards other phases."""
        self.tracker.enter(phase)
        # ``_inside`` is the time that bodies inside this one count towards their own phases.
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
        """Count the body as waiting for other ranks, inside a pass that is not captured."""
        if is_capturing():
            yield
            return
        with self.time("reduce"):
            yield
        self.tracker.enter("forward_backward")

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count the body towards the phase around it, and as waiting for ranks that compute the same micro-batch."""
        phase, begin = self.tracker.phase, time.perf_counter()
        self.tracker.enter(EXCHANGE + phase)
        try:
            yield
        finally:
            self.tracker.enter(phase)
            # Subtracted from the rank's own work, which is waiting for data, forward and backward (``Intervals``).
            if phase == "forward_backward":
                self.exchanged += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """Return the seconds by phase, and reset them."""
        taken = self._seconds
        self.reset()
        return taken

    def reset(self) -> None:
        """Set all times to zero."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.exchanged = 0.0


class DeviceStopwatch(Stopwatch):
    """Seconds of each phase by events on a GPU's timeline, which ``take`` reads, so that the loop never waits.

    Waiting for data or for other ranks counts only while the device is idle. A phase inside a captured step records its
    events in the CUDA graph, at every replay; ``take`` reads the last replay, which stands for that phase in every
    step, and subtracts it from the phase around it.
    """

    def __init__(self, event: Callable[[bool], Any] = cuda_event, capturing: Callable[[], bool] = is_capturing) -> None:
        super().__init__()
        self._event, self._capturing = event, capturing
        self._spans: dict[str, list[Span]] = {phase: [] for phase in PHASES}
        self._inside_of: list[tuple[str, Span]] = []
        """Spans that lie inside another phase, and its name."""
        self._open: list[str] = []
        # For every phase, since a capture may contain any. All captures share them.
        self._captured: dict[str, Span] = {phase: (event(True), event(True)) for phase in PHASES}
        # Times exist only between recorded events: until a replay these lie before all phases.
        for begin, end in self._captured.values():
            begin.record()
            end.record()

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the device's time for the body towards ``phase``, except what it counts towards other phases."""
        self.tracker.enter(phase)
        capturing = self._capturing()
        begin, end = self._captured[phase] if capturing else (self._event(False), self._event(False))
        begin.record()
        self._open.append(phase)
        try:
            yield
        finally:
            self._open.pop()
            end.record()
            if not capturing:
                self._spans[phase].append((begin, end))
                if self._open:
                    # Subtracted at ``take``: the device has not passed these events yet.
                    self._inside_of.append((self._open[-1], (begin, end)))

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count nothing: the host does not wait, and a step has hundreds of exchanges."""
        yield

    def take(self) -> dict[str, float]:
        """Return the seconds by phase, and reset them. Waits until the device has finished the phases."""
        for spans in self._spans.values():
            if spans:
                spans[-1][1].synchronize()
        for phase, spans in self._spans.items():
            self._seconds[phase] += sum(map(_seconds, spans))
        for around, span in self._inside_of:
            self._seconds[around] -= _seconds(span)
        for phase, captured in self._captured.items():
            for around, spans in self._spans.items():
                # Captured events that were not replayed recently lie before the last span.
                if around != phase and spans and _lies_in(captured, spans[-1]):
                    seconds = len(spans) * _seconds(captured)
                    self._seconds[phase] += seconds
                    self._seconds[around] -= seconds
        return super().take()

    def reset(self) -> None:
        """Set all times to zero."""
        super().reset()
        self._spans = {phase: [] for phase in PHASES}
        self._inside_of = []


def _seconds(span: Span) -> float:
    return span[0].elapsed_time(span[1]) / 1000


def _lies_in(inner: Span, outer: Span) -> bool:
    return outer[0].elapsed_time(inner[0]) >= 0 and inner[1].elapsed_time(outer[1]) >= 0
