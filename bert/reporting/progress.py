"""Progress of a run so far, and the time that it may still take."""

from dataclasses import dataclass, field

from bert.reporting.records import EvaluationRecord, Record, StepRecord, WarningRecord
from compliance.log.forecast import Schedule, forecast
from console.live import clock


@dataclass
class Progress:
    """Progress of the run, as far as the displays know it."""

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
    def eta(self) -> str:
        """Time to the evaluation that reaches the target: a range where its curve tells one, else at most."""
        if self.latest is None or self.latest.samples == self.resumed_samples:
            return "-"
        rate = (self.latest.samples - self.resumed_samples) / self.latest.time_s
        limit = (self.max_samples - self.latest.samples) / rate
        curve = [(evaluation.samples, evaluation.masked_lm_accuracy) for evaluation in self.evaluations]
        expected = forecast(curve, self.target, self.schedule, None)
        if expected.earliest is None:
            return f"at most {clock(limit)}"
        samples = [self.schedule.samples(index) for index in (expected.earliest, expected.latest) if index is not None]
        early, late = ((one - self.latest.samples) / rate for one in (samples[0], samples[-1]))
        late = limit if expected.latest is None else min(late, limit)
        return f"{clock(min(early, late))} to {clock(late)}"
