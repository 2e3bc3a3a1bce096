"""The evaluations of a run: handed over, read, logged and reported."""

import time
from dataclasses import dataclass

from bert.evaluation.evaluator import Evaluator, PendingAccuracy
from bert.log.mllog import MLLog
from bert.reporting.reporter import Position, Reporter
from bert.step import TrainingStep
from bert.timing.phases import PhaseTracker
from compliance.log.records import EvaluationRecord


@dataclass(frozen=True)
class _Pending:
    """Evaluation that has been handed over: its counts, when it began, and where the run stood then."""

    accuracy: PendingAccuracy
    began: float
    at: Position


class Evaluations:
    """Evaluations of a run: begun here, their results read and reported; training may go on while one is pending."""

    def __init__(
        self,
        evaluator: Evaluator,
        step: TrainingStep,
        log: MLLog,
        reporter: Reporter,
        tracker: PhaseTracker,
        target: float,
    ) -> None:
        self.accuracy: float | None = None
        """The last one that was read."""
        self.samples = 0
        """Trained when that evaluation began."""
        self._evaluator = evaluator
        self._step = step
        self._log = log
        self._reporter = reporter
        self._tracker = tracker
        self._target = target
        self._pending: _Pending | None = None

    @property
    def pending(self) -> bool:
        """Tell whether an evaluation has been handed over whose result has not been read."""
        return self._pending is not None

    def begin(self, at: Position) -> None:
        """Hand an evaluation of the weights as they are to the device; every rank must call it after the same step."""
        began = time.perf_counter()
        self._tracker.enter("evaluation")
        # Numbers of samples are those of now: a step that follows before the result is none of this evaluation.
        self._log.eval_start(at.samples)
        # Each rank may have updated a part of the weights alone.
        accuracy = self._evaluator.start(self._step.gather_weights(), self._step.autocast())
        self._pending = _Pending(accuracy, began, at)

    def finish(self) -> bool:
        """Wait for the result that is pending and report it; returns whether it reaches the target."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._tracker.enter("evaluation")
        # A step may have been handed over since: for the watchdog this is the evaluation again.
        accuracy = pending.accuracy.result()
        self._log.eval_accuracy(accuracy.value, pending.at.samples)
        self._log.eval_stop(pending.at.samples)
        self._reporter.write(
            EvaluationRecord(
                step=pending.at.steps,
                samples=pending.at.samples,
                time_s=self._reporter.seconds,
                eval_s=time.perf_counter() - pending.began,
                masked_lm_accuracy=accuracy.value,
                correct=accuracy.correct,
                count=accuracy.count,
            )
        )
        self.accuracy, self.samples = accuracy.value, pending.at.samples
        # At least the target, as the rule of the log has it (`compliance.log.order`).
        return accuracy.value >= self._target
