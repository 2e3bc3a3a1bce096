"""Displays of a run: one line per log interval, or a panel that is redrawn in place."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

from compliance.convergence.forecast import forecast, time_left
from compliance.log.records import EndRecord, EvaluationRecord, PlanRecord, Record, StepRecord, WarningRecord
from compliance.log.schedule import EvaluationSchedule
from console.live import RunView, live_display
from console.text import clock, clock_span, visible


@dataclass
class RunProgress:
    """Progress of the run, as the displays show it.

    Attributes:
        max_samples: number of samples after which the run ends even if it has not reached the target.
        schedule: schedule of the evaluations.
        resumed_samples: number of samples trained before the run was resumed. The run's time does not include them.
    """

    target: float
    max_samples: int
    schedule: EvaluationSchedule
    resumed_samples: int = 0
    latest: StepRecord | None = None
    warning: WarningRecord | None = None
    evaluations: list[EvaluationRecord] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Update the progress with a record."""
        if isinstance(record, StepRecord):
            self.latest = record
        elif isinstance(record, EvaluationRecord):
            self.evaluations.append(record)
        elif isinstance(record, WarningRecord):
            self.warning = record

    @property
    def eta(self) -> str:
        """Time left until the target is reached: a range if the accuracy is rising, otherwise an upper bound."""
        latest = self.latest
        # There is no rate before this run has trained any samples.
        if latest is None or latest.samples == self.resumed_samples:
            return "-"
        rate = (latest.samples - self.resumed_samples) / latest.time_s
        curve = [(evaluation.samples, evaluation.masked_lm_accuracy) for evaluation in self.evaluations]
        found = forecast(curve, self.target, self.schedule, None)
        return clock_span(*time_left(found, self.schedule, latest.samples, rate, self.max_samples))


class StepLines:
    """Display for batch logs: one line per record. Each function of ``put`` is called with each line."""

    def __init__(self, progress: RunProgress, *put: Callable[[str], None]) -> None:
        self._progress = progress
        self._put = put

    def write(self, record: Record) -> None:
        """Write one line that describes the record."""
        for put in self._put:
            put(self._text(record))

    def close(self) -> None:
        """Do nothing, because every line has been written already."""

    def _text(self, record: Record) -> str:
        if isinstance(record, StepRecord):
            skipped = f"  WARNING: {record.skipped_steps} skipped, gradients not finite" if record.skipped_steps else ""
            return (
                f"step {record.step:>6}  samples {record.samples:>9}  {record.step_ms:7.1f} ms  "
                f"{record.sequences_per_s:8.1f} seq/s  {record.tokens_per_s:9.0f} tok/s  "
                f"wait {100 * record.data_wait_ms / record.step_ms:4.1f} %  loss {record.loss:.4f}  "
                f"lr {record.learning_rate:.2e}  eta {self._progress.eta}{skipped}"
            )
        if isinstance(record, EvaluationRecord):
            return (
                f"eval {record.step:>6}  samples {record.samples:>9}  accuracy {record.masked_lm_accuracy:.4f} "
                f"({record.correct}/{record.count})  target {self._progress.target:.4f}  {record.eval_s:.2f} s"
            )
        if isinstance(record, WarningRecord):
            # The text may contain names of hosts and files, which may contain control characters.
            return f"warning at step {record.step}: {visible(record.text)}"
        if isinstance(record, PlanRecord):
            return f"plan: a step took {record.step_ms:.1f} ms, planned {record.planned_step_ms:.1f} ms"
        return f"end: {record.status} after {record.samples} samples and {record.time_s:.1f} s"


class RunPanel:
    """Display for a terminal: a panel that is redrawn in place. ``title`` says which run it shows."""

    def __init__(self, title: str, progress: RunProgress, console: Console) -> None:
        self._title = title
        self._progress = progress
        self._live = live_display(console)
        self._live.start()

    def write(self, record: Record) -> None:
        """Redraw the panel with the state of the run after this record."""
        self._live.update(self._view(record), refresh=True)

    def close(self) -> None:
        """Stop redrawing and leave the last state on the screen."""
        self._live.stop()

    def _view(self, record: Record) -> RunView:
        progress, step, warning = self._progress, self._progress.latest, self._progress.warning
        ended = isinstance(record, EndRecord)
        details = (
            []
            if step is None
            else [
                ("step", f"{step.step_ms:.1f} ms, of it {step.data_wait_ms:.2f} ms waiting for data"),
                ("loss", f"{step.loss:.4f}   (masked LM {step.masked_lm_loss:.4f})   lr {step.learning_rate:.2e}"),
            ]
        )
        return RunView(
            title=self._title,
            accuracies=[evaluation.masked_lm_accuracy for evaluation in progress.evaluations],
            target=progress.target,
            evaluated_samples=progress.evaluations[-1].samples if progress.evaluations else 0,
            samples=f"{step.samples:,} of at most {progress.max_samples:,}  (step {step.step:,})" if step else "",
            rate=f"{step.sequences_per_s:,.1f} sequences/s   {step.tokens_per_s:,.0f} tokens/s" if step else "",
            details=details,
            time_left="" if ended else f"{progress.target:.4f}, time left {progress.eta}",
            warnings=[f"step {warning.step}: {warning.text}"] if warning else [],
            end=(f"{record.status} after {clock(record.time_s)}", record.status == "success") if ended else None,
        )
