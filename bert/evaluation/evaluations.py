"""Starting, awaiting, logging and reporting of a run's evaluations."""

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
    """Evaluations of a run. Training may go on while an evaluation is pending."""

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
        """Masked-LM accuracy of the last finished evaluation, or None before the first one."""
        self.samples = 0
        """Number of samples trained when the last finished evaluation began."""
        self._evaluator, self._step, self._target = evaluator, step, target
        self._log, self._reporter, self._tracker = log, reporter, tracker
        self._pending: _Pending | None = None

    @property
    def pending(self) -> bool:
        """Whether an evaluation has begun and its result has not been read yet."""
        return self._pending is not None

    def begin(self, at: Position) -> None:
        """Queue an evaluation of the current weights. Every rank must call this after the same step."""
        began = time.perf_counter()
        self._tracker.enter("evaluation")
        # Log the current number of samples: steps that run before the result arrives are not part of this evaluation.
        self._log.eval_start(at.samples)
        # Gather the weights, because each rank may have updated only its shard.
        accuracy = self._evaluator.start(self._step.gather_weights(), self._step.autocast())
        self._pending = _Pending(accuracy, began, at)

    def finish(self) -> bool:
        """Wait for the pending result, report it and return whether it reaches the target accuracy."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        # A training step may have been queued since ``begin``, so tell the watchdog that this is the evaluation again.
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
