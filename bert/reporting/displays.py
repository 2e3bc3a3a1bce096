"""Display of a run: one line per log interval, evaluation and warning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from compliance.convergence.forecast import forecast, time_left
from compliance.log.records import EvaluationRecord, Metrics, PlanRecord, Record, StepRecord, WarningRecord
from compliance.log.schedule import EvaluationSchedule
from console.text import clock_span, visible


@dataclass
class StepLines:
    """Sink that describes each record in one line and calls every function in ``put`` with the line.

    After ``max_samples`` samples, the run ends even if it has not reached the target. ``resumed_samples`` is the number of
    samples trained before the run was resumed, which the run's time does not include.
    """

    put: Sequence[Callable[[str], None]]
    target: float
    max_samples: int
    schedule: EvaluationSchedule
    resumed_samples: int = 0
    records: Metrics = field(default_factory=Metrics)

    @property
    def eta(self) -> str:
        """Time left until the target is reached: a range if the accuracy is rising, otherwise an upper bound."""
        steps = self.records.steps
        # There is no rate before this run has trained any samples.
        if not steps or steps[-1].samples == self.resumed_samples:
            return "-"
        samples = steps[-1].samples
        rate = (samples - self.resumed_samples) / steps[-1].time_s
        curve = [(evaluation.samples, evaluation.masked_lm_accuracy) for evaluation in self.records.evaluations]
        found = forecast(curve, self.target, self.schedule, None)
        return clock_span(*time_left(found, self.schedule, samples, rate, self.max_samples))

    def write(self, record: Record) -> None:
        self.records.add(record)  # first, because the time left depends on it
        text = self._text(record)
        for put in self.put:
            put(text)

    def close(self) -> None:
        """Do nothing, because every line has been written already."""

    def _text(self, record: Record) -> str:
        if isinstance(record, StepRecord):
            skipped = f"  WARNING: {record.skipped_steps} skipped, gradients not finite" if record.skipped_steps else ""
            return (
                f"step {record.step:>6}  samples {record.samples:>9}  {record.step_ms:7.1f} ms  "
                f"{record.sequences_per_s:8.1f} seq/s  {record.tokens_per_s:9.0f} tok/s  "
                f"wait {100 * record.data_wait_ms / record.step_ms:4.1f} %  loss {record.loss:.4f}  "
                f"lr {record.learning_rate:.2e}  eta {self.eta}{skipped}"
            )
        if isinstance(record, EvaluationRecord):
            return (
                f"eval {record.step:>6}  samples {record.samples:>9}  accuracy {record.masked_lm_accuracy:.4f} "
                f"({record.correct}/{record.count})  target {self.target:.4f}  {record.eval_s:.2f} s"
            )
        if isinstance(record, WarningRecord):
            # The text may contain names of hosts and files, which may contain control characters.
            return f"warning at step {record.step}: {visible(record.text)}"
        if isinstance(record, PlanRecord):
            return f"plan: a step took {record.step_ms:.1f} ms, planned {record.planned_step_ms:.1f} ms"
        return f"end: {record.status} after {record.samples} samples and {record.time_s:.1f} s"
