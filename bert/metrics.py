"""What a run tells while it runs: rates, losses, accuracy, time left. One record feeds every sink."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

PHASES: tuple[str, ...] = ("data_wait", "forward_backward", "reduce", "update")


class Stopwatch:
    """Seconds spent in each phase of the steps since the last ``take``, by the host's clock.

    On a CPU that is the work itself; on a GPU it is the time to hand the work over.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the body towards ``phase``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """The seconds by phase, which start again from zero."""
        taken = self._seconds
        self.reset()
        return taken

    def reset(self) -> None:
        """Forget what was counted."""
        self._seconds = dict.fromkeys(PHASES, 0.0)


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
    masked_lm_loss: float
    next_sentence_loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_s: float
    sequences_per_s: float


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
class EndRecord:
    """How the run ended."""

    status: str
    time_s: float
    samples: int
    masked_lm_accuracy: float | None


Record = StepRecord | EvaluationRecord | EndRecord
_EVENTS = {StepRecord: "step", EvaluationRecord: "eval", EndRecord: "end"}


class Sink(Protocol):
    """Somewhere that records go to."""

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class JsonLines:
    """Every record as a line of JSON, beside the result file."""

    def __init__(self, path: Path, run: dict[str, object]) -> None:
        self._file = path.open("x", encoding="utf-8", buffering=1)
        self._put({"event": "run", **run})

    def write(self, record: Record) -> None:
        """Append one line."""
        self._put({"event": _EVENTS[type(record)], **asdict(record)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, values: dict[str, object]) -> None:
        rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}
        self._file.write(json.dumps(rounded) + "\n")


@dataclass
class Progress:
    """What the displays know about the run so far."""

    target: float
    max_samples: int
    latest: StepRecord | None = None
    evaluations: list[EvaluationRecord] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Note a record."""
        if isinstance(record, StepRecord):
            self.latest = record
        elif isinstance(record, EvaluationRecord):
            self.evaluations.append(record)

    @property
    def accuracy(self) -> str:
        """The last accuracy against the target."""
        last = f"{self.evaluations[-1].masked_lm_accuracy:.4f}" if self.evaluations else "-"
        return f"{last} / {self.target:.4f}"

    @property
    def eta(self) -> str:
        """Time to the evaluation that reaches the target, if accuracy goes on rising as over the last ones, and at most."""
        if self.latest is None or self.latest.samples == 0:
            return "-"
        rate = self.latest.samples / self.latest.time_s
        limit = (self.max_samples - self.latest.samples) / rate
        recent = self.evaluations[-3:]
        if len(recent) < 2 or recent[-1].masked_lm_accuracy <= recent[0].masked_lm_accuracy:
            return f"at most {_clock(limit)}"
        rise = (recent[-1].masked_lm_accuracy - recent[0].masked_lm_accuracy) / (len(recent) - 1)
        spacing = (recent[-1].time_s - recent[0].time_s) / (len(recent) - 1)
        due = math.ceil((self.target - recent[-1].masked_lm_accuracy) / rise - 1e-9)
        left = due * spacing - (self.latest.time_s - recent[-1].time_s)
        return f"about {_clock(min(max(0.0, left), limit))}, at most {_clock(limit)}"


class PlainLines:
    """One line an interval, for batch logs; ``put`` is where lines go."""

    def __init__(self, progress: Progress, *put: Callable[[str], None]) -> None:
        self._progress = progress
        self._put = put

    def write(self, record: Record) -> None:
        """Put one line."""
        for put in self._put:
            put(self._text(record))

    def close(self) -> None:
        """Nothing to do: every line is out."""

    def _text(self, record: Record) -> str:
        if isinstance(record, StepRecord):
            return (
                f"step {record.step:>6}  samples {record.samples:>9}  {record.step_ms:7.1f} ms  "
                f"{record.sequences_per_s:8.1f} seq/s  {record.tokens_per_s:9.0f} tok/s  "
                f"wait {100 * record.data_wait_ms / record.step_ms:4.1f} %  loss {record.loss:.4f}  "
                f"lr {record.learning_rate:.2e}  eta {self._progress.eta}"
            )
        if isinstance(record, EvaluationRecord):
            return (
                f"eval {record.step:>6}  samples {record.samples:>9}  accuracy {record.masked_lm_accuracy:.4f} "
                f"({record.correct}/{record.count})  target {self._progress.target:.4f}  {record.eval_s:.2f} s"
            )
        return f"end: {record.status} after {record.samples} samples and {record.time_s:.1f} s"


class LivePanel:
    """A table that refreshes in place, for a person at a terminal."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def write(self, record: Record) -> None:
        """Show the run as of this record."""
        self._live.update(self._table(record))

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.stop()

    def _table(self, record: Record) -> Table:
        table = Table.grid(padding=(0, 2))
        step = self._progress.latest
        rows = []
        if step is not None:
            rows = [
                ("samples", f"{step.samples:,} of at most {self._progress.max_samples:,}  (step {step.step:,})"),
                ("rate", f"{step.sequences_per_s:,.1f} sequences/s   {step.tokens_per_s:,.0f} tokens/s"),
                ("step", f"{step.step_ms:.1f} ms, of it {step.data_wait_ms:.2f} ms waiting for data"),
                ("loss", f"{step.loss:.4f}   (masked LM {step.masked_lm_loss:.4f})   lr {step.learning_rate:.2e}"),
            ]
        rows += [("accuracy", self._progress.accuracy), ("time left", self._progress.eta)]
        if isinstance(record, EndRecord):
            rows[-1] = ("ended", f"{record.status} after {_clock(record.time_s)}")
        for name, value in rows:
            table.add_row(f"[dim]{name}[/dim]", value)
        reached = self._progress.evaluations[-1].masked_lm_accuracy if self._progress.evaluations else 0.0
        table.add_row(
            "", ProgressBar(total=self._progress.target, completed=min(reached, self._progress.target), width=48)
        )
        return table


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
        for sink in self._sinks:
            sink.close()

    def write(self, record: Record) -> None:
        """Report ``record``."""
        self._progress.add(record)
        for sink in self._sinks:
            sink.write(record)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
