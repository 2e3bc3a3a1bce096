"""A run as a person sees it: one line an interval, or a table that refreshes in place."""

from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from bert.reporting.progress import Progress
from bert.reporting.records import EndRecord, EvaluationRecord, PlanRecord, Record, StepRecord, WarningRecord
from console.live import Row, clock, grid
from console.text import visible


class PlainLines:
    """Lines for batch logs, one an interval; ``put`` is where lines go."""

    def __init__(self, progress: Progress, *put: Callable[[str], None]) -> None:
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
            return f"warning at step {record.step}: {visible(record.text)}"
        if isinstance(record, PlanRecord):
            return f"plan: a step took {record.step_ms:.1f} ms, planned {record.planned_step_ms:.1f} ms"
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
        rows: list[Row] = []
        if (step := self._progress.latest) is not None:
            rows = [
                ("samples", f"{step.samples:,} of at most {self._progress.max_samples:,}  (step {step.step:,})"),
                ("rate", f"{step.sequences_per_s:,.1f} sequences/s   {step.tokens_per_s:,.0f} tokens/s"),
                ("step", f"{step.step_ms:.1f} ms, of it {step.data_wait_ms:.2f} ms waiting for data"),
                ("loss", f"{step.loss:.4f}   (masked LM {step.masked_lm_loss:.4f})   lr {step.learning_rate:.2e}"),
            ]
        ended = isinstance(record, EndRecord)
        left = (
            ("ended", f"{record.status} after {clock(record.time_s)}") if ended else ("time left", self._progress.eta)
        )
        rows += [("accuracy", self._progress.accuracy), left]
        if (warning := self._progress.warning) is not None:
            rows.append(("warning", f"step {warning.step}: {warning.text}"))
        target, evaluations = self._progress.target, self._progress.evaluations
        reached = evaluations[-1].masked_lm_accuracy if evaluations else 0.0
        rows.append(("", ProgressBar(total=target, completed=min(reached, target), width=48)))
        return grid(rows)
