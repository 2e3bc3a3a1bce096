"""Time of a step by phase, in seconds, on the host's clock or on a GPU's own timeline."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from bert.timing.phases import EXCHANGE, PHASES, PhaseTracker


def cuda_event(captured: bool) -> torch.cuda.Event:
    """A point on the current stream; ``captured``: one that a CUDA graph passes at each replay."""
    return torch.cuda.Event(enable_timing=True, external=captured)


def is_capturing() -> bool:
    """Tell whether the current stream is being captured into a CUDA graph."""
    # Asked in this order: a run on a CPU must not start CUDA.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Stopwatch:
    """Seconds spent in each phase of the steps since the last ``take``, by the host's clock, as is right on a CPU."""

    def __init__(self) -> None:
        self.tracker = PhaseTracker()
        self.exchanged = 0.0
        """Seconds of ``exchanging`` in forward and backward passes since the last ``take``: none of the rank's own work."""
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._inside = 0.0

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the body towards ``phase``, without what it counts towards other phases."""
        self.tracker.enter(phase)
        # ``_inside`` is what bodies within this one count towards their own phases.
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
        """Count the body as waiting for other ranks, in the midst of a forward or backward pass that is not captured."""
        if is_capturing():
            yield
            return
        with self.time("reduce"):
            yield
        self.tracker.enter("forward_backward")  # told to the watchdog: the pass goes on

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count the body towards the phase around it, and as waiting for ranks that compute the same micro-batch."""
        phase, begin = self.tracker.phase, time.perf_counter()
        self.tracker.enter(EXCHANGE + phase)
        try:
            yield
        finally:
            self.tracker.enter(phase)
            # A rank's own work is waiting for data, forward and backward (``Intervals``): of that these are taken off.
            if phase == "forward_backward":
                self.exchanged += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """The seconds by phase, which start again from zero."""
        taken = self._seconds
        self.reset()
        return taken

    def reset(self) -> None:
        """Forget what was counted."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.exchanged = 0.0


class Mark(Protocol):
    """A point on the device's timeline: an event of CUDA."""

    def record(self) -> None:
        """Put it behind what the device has been given so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to there."""
        ...


Span = tuple[Mark, Mark]


class DeviceStopwatch(Stopwatch):
    """Seconds spent in each phase on a GPU's own timeline, at no wait: events are left there and read at ``take``.

    So waiting for data or for other ranks counts where the device stands still for it, and not where it still has work. A
    phase inside a captured step leaves its events in its CUDA graph, which every replay passes again: of those, ``take``
    knows the last replay. It stands for the phase's part of every step, taken out of the phase around it.
    """

    def __init__(self, mark: Callable[[bool], Mark] = cuda_event, capturing: Callable[[], bool] = is_capturing) -> None:
        super().__init__()
        self._mark, self._capturing = mark, capturing
        self._spans: dict[str, list[Span]] = {phase: [] for phase in PHASES}
        self._inside_of: list[tuple[str, Span]] = []
        """Spans that lie inside another phase, and its name."""
        self._open: list[str] = []
        # For every phase, as which ones a capture will pass is not known; all captures share them.
        self._captured: dict[str, Span] = {phase: (mark(True), mark(True)) for phase in PHASES}
        # Time can only be read between events that have been recorded: these lie before all phases until a replay.
        for begin, end in self._captured.values():
            begin.record()
            end.record()

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the device's time for the body towards ``phase``, without what it counts towards other phases."""
        self.tracker.enter(phase)
        capturing = self._capturing()
        begin, end = self._captured[phase] if capturing else (self._mark(False), self._mark(False))
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
                    # Taken off at ``take``: the device has not passed these events yet.
                    self._inside_of.append((self._open[-1], (begin, end)))

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count nothing: the host does not wait, and a step has hundreds of these."""
        yield

    def take(self) -> dict[str, float]:
        """The seconds by phase, which start again from zero. Waits for the device to end the phases."""
        # The stream passes events in order: behind the last of a phase there is nothing to wait for.
        for spans in self._spans.values():
            if spans:
                spans[-1][1].synchronize()
        for phase, spans in self._spans.items():
            self._seconds[phase] += sum(map(_seconds, spans))
        for around, span in self._inside_of:
            self._seconds[around] -= _seconds(span)
        for phase, captured in self._captured.items():
            self._take_out(phase, captured)
        return super().take()

    def reset(self) -> None:
        """Forget what was counted."""
        super().reset()
        self._spans = {phase: [] for phase in PHASES}
        self._inside_of = []

    def _take_out(self, phase: str, captured: Span) -> None:
        """Move a captured phase's seconds out of the phase whose last span it lies in, if there is one."""
        for around, spans in self._spans.items():
            # Captured events that no replay has passed of late lie before the last span.
            if around != phase and spans and _lies_in(captured, spans[-1]):
                seconds = len(spans) * _seconds(captured)
                self._seconds[phase] += seconds
                self._seconds[around] -= seconds


def _seconds(span: Span) -> float:
    return span[0].elapsed_time(span[1]) / 1000


def _lies_in(inner: Span, outer: Span) -> bool:
    return outer[0].elapsed_time(inner[0]) >= 0 and inner[1].elapsed_time(outer[1]) >= 0
