"""What a run tells while it runs: rates, losses, accuracy, time left. One record feeds every sink.

The sinks that a person reads are in ``bert.reporting.displays``.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from compliance.log.forecast import Schedule, forecast

PHASES: tuple[str, ...] = ("data_wait", "forward_backward", "reduce", "update")


def cuda_event(recorded: bool) -> torch.cuda.Event:
    """A point on the current stream; ``recorded``: one that a CUDA graph passes at each replay."""
    return torch.cuda.Event(enable_timing=True, external=recorded)


def is_recording() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


class Stage:
    """Where a rank is: written here for a microsecond a phase, and read by ``bert.parallel.watchdog`` from its thread."""

    def __init__(self) -> None:
        self.step = 0
        """The optimizer step that is being taken, from 1."""
        self.phase = "start"
        self.entered = 0
        """Phases entered so far: it changes as long as the rank gets on."""
        self.longest: dict[str, float] = {}
        """Seconds that each phase has taken at most."""
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        """Leave the phase before for this one."""
        now = time.perf_counter()
        self.longest[self.phase] = max(self.longest.get(self.phase, 0.0), now - self._since)
        self.phase, self._since = phase, now
        self.entered += 1

    def forget(self) -> None:
        """Forget how long phases took: start-up says nothing about what follows."""
        self.longest = {}
        self._since = time.perf_counter()


class Stopwatch:
    """Seconds spent in each phase of the steps since the last ``take``, by the host's clock, as is right on a CPU."""

    def __init__(self) -> None:
        self.stage = Stage()
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._inside = 0.0

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the body towards ``phase``, without what it counts towards other phases."""
        self.stage.enter(phase)
        begin, inside = time.perf_counter(), self._inside
        self._inside = 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self._seconds[phase] += seconds - self._inside
            self._inside = inside + seconds

    def take(self) -> dict[str, float]:
        """The seconds by phase, which start again from zero."""
        taken = self._seconds
        self.reset()
        return taken

    def reset(self) -> None:
        """Forget what was counted."""
        self._seconds = dict.fromkeys(PHASES, 0.0)


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
    phase inside a recorded step leaves its events in the recording, which every replay passes again: of those, ``take``
    knows the last replay. It stands for the phase's part of every step, taken out of the phase around it.
    """

    def __init__(self, mark: Callable[[bool], Mark] = cuda_event, recording: Callable[[], bool] = is_recording) -> None:
        super().__init__()
        self._mark, self._recording = mark, recording
        self._spans: dict[str, list[Span]] = {phase: [] for phase in PHASES}
        self._inside_of: list[tuple[str, Span]] = []
        """Spans that lie inside another phase, and its name."""
        self._open: list[str] = []
        self._recorded: dict[str, Span] = {phase: (mark(True), mark(True)) for phase in PHASES}
        for begin, end in self._recorded.values():
            begin.record()
            end.record()

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the device's time for the body towards ``phase``, without what it counts towards other phases."""
        self.stage.enter(phase)
        recording = self._recording()
        begin, end = self._recorded[phase] if recording else (self._mark(False), self._mark(False))
        begin.record()
        self._open.append(phase)
        try:
            yield
        finally:
            self._open.pop()
            end.record()
            if not recording:
                self._spans[phase].append((begin, end))
                if self._open:
                    self._inside_of.append((self._open[-1], (begin, end)))

    def take(self) -> dict[str, float]:
        """The seconds by phase, which start again from zero. Waits for the device to end the phases."""
        for spans in self._spans.values():
            if spans:
                spans[-1][1].synchronize()
        for phase, spans in self._spans.items():
            self._seconds[phase] += sum(map(_seconds, spans))
        for around, span in self._inside_of:
            self._seconds[around] -= _seconds(span)
        for phase, recorded in self._recorded.items():
            self._take_out(phase, recorded)
        return super().take()

    def reset(self) -> None:
        """Forget what was counted."""
        super().reset()
        self._spans = {phase: [] for phase in PHASES}
        self._inside_of = []

    def _take_out(self, phase: str, recorded: Span) -> None:
        """Move a recorded phase's seconds out of the phase whose last span it lies in, if there is one."""
        for around, spans in self._spans.items():
            if around != phase and spans and _lies_in(recorded, spans[-1]):
                seconds = len(spans) * _seconds(recorded)
                self._seconds[phase] += seconds
                self._seconds[around] -= seconds


def _seconds(span: Span) -> float:
    return span[0].elapsed_time(span[1]) / 1000


def _lies_in(inner: Span, outer: Span) -> bool:
    return outer[0].elapsed_time(inner[0]) >= 0 and inner[1].elapsed_time(outer[1]) >= 0


@dataclass(frozen=True)
class StepRecord:
    """Means over the steps since the last record; times in milliseconds, rates over all ranks."""

    step: int
    samples: int
    time_s: float
    """Since ``run_start``."""
    step_ms: float
    data_wait_ms: float
    forward_backward_ms: float
    reduce_ms: float
    update_ms: float
    loss: float
    """Not finite, as the two below, where such a loss is why a step was skipped."""
    masked_lm_loss: float
    next_sentence_loss: float
    learning_rate: float
    """Of the last step that was not skipped."""
    gradient_norm: float
    tokens_per_s: float
    sequences_per_s: float
    skipped_steps: int = 0
    """Of these steps, those that changed nothing because a gradient was not finite."""


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation of the whole evaluation set."""

    step: int
    samples: int
    time_s: float
    eval_s: float
    masked_lm_accuracy: float
    correct: int
    count: int


@dataclass(frozen=True)
class WarningRecord:
    """Something that a person should look at while the run goes on."""

    step: int
    time_s: float
    text: str


@dataclass(frozen=True)
class EndRecord:
    """How the run ended."""

    status: str
    time_s: float
    samples: int
    masked_lm_accuracy: float | None


Record = StepRecord | EvaluationRecord | WarningRecord | EndRecord
_EVENTS = {StepRecord: "step", EvaluationRecord: "eval", WarningRecord: "warning", EndRecord: "end"}


class Sink(Protocol):
    """Somewhere that records go to."""

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class JsonLines:
    """Every record as a line of JSON, beside the result file; null stands for a number that is not finite.

    Where a line cannot be written, as on a full disk, it raises ``OSError`` with the file's name.
    """

    def __init__(self, path: Path, run: dict[str, object]) -> None:
        self._path = path
        self._file = path.open("x", encoding="utf-8", buffering=1)
        self._put({"event": "run", **run})

    def write(self, record: Record) -> None:
        """Append one line."""
        self._put({"event": _EVENTS[type(record)], **asdict(record)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, values: dict[str, object]) -> None:
        line = json.dumps({key: _json_value(value) for key, value in values.items()}, allow_nan=False)
        try:
            self._file.write(line + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None


def _json_value(value: object) -> object:
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None


@dataclass
class Progress:
    """What the displays know about the run so far."""

    target: float
    max_samples: int
    schedule: Schedule
    """Of the evaluations."""
    resumed_samples: int = 0
    """Trained before the run went on from a checkpoint, in none of its time."""
    latest: StepRecord | None = None
    warning: WarningRecord | None = None
    evaluations: list[EvaluationRecord] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Note a record."""
        if isinstance(record, StepRecord):
            self.latest = record
        elif isinstance(record, EvaluationRecord):
            self.evaluations.append(record)
        elif isinstance(record, WarningRecord):
            self.warning = record

    @property
    def accuracy(self) -> str:
        """The last accuracy against the target."""
        last = f"{self.evaluations[-1].masked_lm_accuracy:.4f}" if self.evaluations else "-"
        return f"{last} / {self.target:.4f}"

    @property
    def eta(self) -> str:
        """Time to the evaluation that reaches the target: a range where its curve tells one, else at most."""
        if self.latest is None or self.latest.samples == self.resumed_samples:
            return "-"
        rate = (self.latest.samples - self.resumed_samples) / self.latest.time_s
        limit = (self.max_samples - self.latest.samples) / rate
        curve = [(evaluation.samples, evaluation.masked_lm_accuracy) for evaluation in self.evaluations]
        expected = forecast(curve, self.target, self.schedule, None)
        if expected.earliest is None:
            return f"at most {clock_text(limit)}"
        samples = [self.schedule.samples(index) for index in (expected.earliest, expected.latest) if index is not None]
        early, late = ((one - self.latest.samples) / rate for one in (samples[0], samples[-1]))
        late = limit if expected.latest is None else min(late, limit)
        return f"{clock_text(max(0.0, min(early, late)))} to {clock_text(max(0.0, late))}"


class Reporter:
    """Hands each record to every sink; without sinks (all ranks but the first) it does nothing."""

    def __init__(self, progress: Progress, sinks: list[Sink]) -> None:
        self._progress = progress
        self._sinks = sinks

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as closing:
            if error is not None:  # which may be why a sink cannot be closed
                closing.enter_context(suppress(OSError))
            for sink in self._sinks:
                closing.callback(sink.close)

    def write(self, record: Record) -> None:
        """Report ``record``."""
        self._progress.add(record)
        for sink in self._sinks:
            sink.write(record)


def clock_text(seconds: float) -> str:
    """Seconds as ``minutes:seconds``, or with hours before them."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
