"""A run as a person sees it: how far it is, in one line an interval or in a panel that is redrawn in place."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

from compliance.convergence.forecast import forecast
from compliance.log.records import EndRecord, EvaluationRecord, PlanRecord, Record, StepRecord, WarningRecord
from compliance.log.schedule import EvaluationSchedule
from console import live
from console.live import Row, clock
from console.text import visible


@dataclass
class RunProgress:
    """Progress of the run, as far as the displays know it."""

    target: float
    max_samples: int
    schedule: EvaluationSchedule
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
    def eta(self) -> str:
        """Time to the evaluation that reaches the target: a range where its curve tells one, else at most."""
        # Nothing has been trained yet in this run, and so there is no rate.
        if self.latest is None or self.latest.samples == self.resumed_samples:
            return "-"
        # With the time of evaluations in it, as more of them will come.
        rate = (self.latest.samples - self.resumed_samples) / self.latest.time_s
        limit = (self.max_samples - self.latest.samples) / rate
        curve = [(evaluation.samples, evaluation.masked_lm_accuracy) for evaluation in self.evaluations]
        expected = forecast(curve, self.target, self.schedule, None)
        if expected.earliest is None:
            return f"at most {clock(limit)}"
        samples = [self.schedule.samples(index) for index in (expected.earliest, expected.latest) if index is not None]
        early, late = ((one - self.latest.samples) / rate for one in (samples[0], samples[-1]))
        # The limit on samples ends a run in any case.
        late = limit if expected.latest is None else min(late, limit)
        return f"{clock(min(early, late))} to {clock(late)}"


class StepLines:
    """Lines for batch logs, one an interval; ``put`` is where lines go."""

    def __init__(self, progress: RunProgress, *put: Callable[[str], None]) -> None:
        self._progress = progress
        self._put = put

    def write(self, record: Record) -> None:
        """Put one line."""
        for put in self._put:
            put(self._text(record))

    def close(self) -> None:
        """Do nothing: every line is out."""

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
            # It may name hosts and files: what a terminal would obey is escaped.
            return f"warning at step {record.step}: {visible(record.text)}"
        if isinstance(record, PlanRecord):
            return f"plan: a step took {record.step_ms:.1f} ms, planned {record.planned_step_ms:.1f} ms"
        return f"end: {record.status} after {record.samples} samples and {record.time_s:.1f} s"


class RunPanel:
    """The panel of a run, for a person at a terminal; ``title`` says which run it is."""

    def __init__(self, title: str, progress: RunProgress, console: Console) -> None:
        self._title = title
        self._progress = progress
        self._panel = live.LivePanel(console)

    def write(self, record: Record) -> None:
        """Show the run as of this record."""
        self._panel.show(self._title, self._rows(record))

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._panel.close()

    def _rows(self, record: Record) -> list[Row]:
        progress, rows = self._progress, []
        if evaluations := progress.evaluations:
            accuracies = [evaluation.masked_lm_accuracy for evaluation in evaluations]
            rows += live.accuracy_rows(accuracies, progress.target, evaluations[-1].samples)
        if (step := progress.latest) is not None:
            rows += [
                ("samples", f"{step.samples:,} of at most {progress.max_samples:,}  (step {step.step:,})"),
                ("rate", f"{step.sequences_per_s:,.1f} sequences/s   {step.tokens_per_s:,.0f} tokens/s"),
                ("step", f"{step.step_ms:.1f} ms, of it {step.data_wait_ms:.2f} ms waiting for data"),
                ("loss", f"{step.loss:.4f}   (masked LM {step.masked_lm_loss:.4f})   lr {step.learning_rate:.2e}"),
            ]
        if isinstance(record, EndRecord):
            words = f"{record.status} after {clock(record.time_s)}"
            rows.append(live.end_row(words, is_success=record.status == "success"))
        else:
            rows.append(("target", f"{progress.target:.4f}, time left {progress.eta}"))
        warning = progress.warning
        return rows + live.warning_rows([f"step {warning.step}: {warning.text}"] if warning else [])
