"""Evaluations of a run: started, awaited, logged and reported."""

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
    accuracy: PendingAccuracy
    began: float
    at: Position


class Evaluations:
    """Evaluations of a run. Training may go on while one is pending."""

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
        """Result of the last finished evaluation."""
        self.samples = 0
        """Training samples when that evaluation began."""
        self._evaluator, self._step, self._target = evaluator, step, target
        self._log, self._reporter, self._tracker = log, reporter, tracker
        self._pending: _Pending | None = None

    @property
    def pending(self) -> bool:
        """Tell whether an evaluation has begun and its result has not been read."""
        return self._pending is not None

    def begin(self, at: Position) -> None:
        """Queue an evaluation of the current weights; every rank must call it after the same step."""
        began = time.perf_counter()
        self._tracker.enter("evaluation")
        # The numbers of samples are those of now: a step before the result is not part of this evaluation.
        self._log.eval_start(at.samples)
        # Each rank may have updated only a part of the weights.
        accuracy = self._evaluator.start(self._step.gather_weights(), self._step.autocast())
        self._pending = _Pending(accuracy, began, at)

    def finish(self) -> bool:
        """Wait for the pending result and report it; return whether it reaches the target."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        # A step may have been queued since; for the watchdog this is the evaluation again.
        self._tracker.enter("evaluation")
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
        return accuracy.value >= self._target
