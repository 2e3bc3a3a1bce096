"""What happens between ``run_start`` and ``run_stop``: steps, evaluations, records, checkpoints, and how it ends."""

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bert.checkpoints.training_state import Checkpoints
from bert.config import Config
from bert.evaluator import Evaluator, PendingAccuracy
from bert.guards.interruption import Interruption
from bert.mllog import MLLog, evaluation_samples
from bert.optimizer import learning_rate
from bert.parallel.mesh import Mesh
from bert.parallel.stragglers import SlowRanks
from bert.reporting.metrics import EndRecord, EvaluationRecord, Reporter, StepRecord, Stopwatch, WarningRecord
from bert.step import TrainingStep
from dataloading.batches.loader import Loader
from dataloading.dataset.folder import Dataset


@dataclass(frozen=True)
class Inputs:
    """What a run reads, opened as far as metadata go, and where it writes."""

    train: Dataset
    evaluation: Dataset
    vocabulary_sha256: str
    result: Path
    metrics: Path
    interval: int
    """Training samples between evaluations."""


@dataclass(frozen=True)
class Evaluation:
    """One that has been handed over: its counts, and where the run stood when it began."""

    pending: PendingAccuracy
    begin: float
    steps: int
    samples: int


@dataclass
class TimedRun:
    """Everything between ``run_start`` and ``run_stop``."""

    config: Config
    inputs: Inputs
    mesh: Mesh
    log: MLLog
    reporter: Reporter
    stopwatch: Stopwatch
    step: TrainingStep
    loader: Loader
    evaluator: Evaluator
    interruption: Interruption
    overlapping: bool = False
    """Whether the result of an evaluation is read when the step after it has been handed over. Where that takes the host
    no time, the device trains on while counts travel and lines are written, and the clock still stops at the result: the
    step changes neither the accuracy nor the samples that it took, and is lost if the target was reached."""
    checkpoints: Checkpoints | None = None
    slow_ranks: SlowRanks | None = None
    steps: int = 0
    samples: int = 0
    skipped: int = 0
    """Of the steps, those that changed nothing because a gradient was not finite."""
    bad_intervals: int = 0
    """Intervals in a row of which every step was skipped."""
    own_seconds: float = 0.0
    """A step, of this rank's own work in the interval before."""
    status: Literal["success", "aborted"] | None = None
    evaluation: Evaluation | None = None
    """The one whose result has not been read."""
    accuracy: float | None = None
    evaluated_samples: int = 0
    """Samples trained at the last evaluation."""

    def train(self) -> str:
        """Train and evaluate in turn until the target is reached, the samples are used up or a signal comes."""
        self.started = self.recorded = time.perf_counter()
        self.recorded_steps = self.steps
        self.interruption.deferred = True
        self.evaluator.read_ahead()
        points = (
            evaluation_samples(number, self.inputs.interval, self.config.training.global_batch_size)
            for number in itertools.count(1)
        )
        while self.status is None:
            due = next(due for due in points if due >= self.samples)
            self._block(due)
            if self.status is None:
                self._begin_evaluation()
        samples = self.evaluated_samples if self.status == "success" else self.samples
        self.log.run_stop(self.status, samples=samples, eval_samples=self.evaluator.samples)
        seconds = time.perf_counter() - self.started
        if self.checkpoints is not None:
            self._await_checkpoint(self.checkpoints)
        self.reporter.write(EndRecord(self.status, seconds, samples, self.accuracy))
        return self.status

    def _block(self, due: int) -> None:
        """Train up to ``due`` samples, unless the run ends before."""
        training = self.config.training
        self.log.block_start(self.samples)
        while self.status is None and self.samples < due and self.samples < training.sample_limit:
            self.stopwatch.stage.step = self.steps + 1
            with self.stopwatch.time("data_wait"):
                micro_batches = next(self.loader)
            self.step(micro_batches)
            self.steps += 1
            self.samples += training.global_batch_size
            if self.evaluation is not None:
                self._end_evaluation(self.evaluation)
            keep = self.checkpoints is not None and self.checkpoints.due(self.steps)
            at_interval = self.steps % self.config.log.interval_steps == 0 or self.samples >= due or keep
            if self.status is None and at_interval and self._record():
                self.status, keep = "aborted", True
            if keep and self.checkpoints is not None and self.status != "success" and self.bad_intervals == 0:
                self._save_checkpoint(self.checkpoints)
        self.log.block_stop(self.samples)
        if self.status is None and self.samples < due:
            self.status = "aborted"

    def _record(self) -> bool:
        """Fetch the statistics and report them; returns whether some rank was told to stop."""
        self.stopwatch.stage.enter("statistics")
        means, stopping = self.step.statistics.fetch(self._is_to_stop(), self.own_seconds)
        now = time.perf_counter()
        steps, seconds = self.steps - self.recorded_steps, now - self.recorded
        phases = {f"{name}_ms": 1000 * spent / steps for name, spent in self.stopwatch.take().items()}
        skipped = round(means["skipped_steps"])
        self.skipped += skipped
        self.reporter.write(
            StepRecord(
                step=self.steps,
                samples=self.samples,
                time_s=now - self.started,
                step_ms=1000 * seconds / steps,
                **phases,
                loss=means["masked_lm_loss"] + means["next_sentence_loss"],
                masked_lm_loss=means["masked_lm_loss"],
                next_sentence_loss=means["next_sentence_loss"],
                learning_rate=learning_rate(self.config.optimizer, max(0, self.steps - self.skipped - 1)),
                gradient_norm=means["gradient_norm"],
                tokens_per_s=means["tokens"] * steps / seconds,
                sequences_per_s=self.config.training.global_batch_size * steps / seconds,
                skipped_steps=skipped,
            )
        )
        self.recorded, self.recorded_steps = now, self.steps
        self.own_seconds = (phases["data_wait_ms"] + phases["forward_backward_ms"]) / 1000
        for line in self.slow_ranks.add(self.step.statistics.own_seconds) if self.slow_ranks else []:
            self._warn(line)
        self.bad_intervals = self.bad_intervals + 1 if skipped == steps else 0
        if self.checkpoints is not None:
            self._look_at_checkpoint(self.checkpoints)
        if self.bad_intervals == self.config.training.bad_intervals:
            self._warn(f"ending the run: no step of the last {self.bad_intervals} intervals had finite gradients")
            return True
        return stopping

    def _is_to_stop(self) -> bool:
        """Whether a signal has come to this rank, or its time is up. One rank that says so stops all."""
        minutes = self.config.training.max_minutes
        time_is_up = minutes is not None and time.perf_counter() - self.started > 60 * minutes
        return time_is_up or self.interruption.number is not None

    def _save_checkpoint(self, checkpoints: Checkpoints) -> None:
        """Begin one, when the one before is there."""
        self._await_checkpoint(checkpoints)
        self.stopwatch.stage.enter("checkpoint")
        checkpoints.save(self.steps, self.samples)

    def _await_checkpoint(self, checkpoints: Checkpoints) -> None:
        if checkpoints.writing:
            self.stopwatch.stage.enter("checkpoint_write")
            checkpoints.wait()
        self._look_at_checkpoint(checkpoints)

    def _look_at_checkpoint(self, checkpoints: Checkpoints) -> None:
        """One that could not be written costs a warning, not the run."""
        error = checkpoints.failure()
        if error is not None:
            self._warn(f"no checkpoint was written: {error.filename}: {error.strerror}")
        if checkpoints.longest_s is not None:
            self.stopwatch.stage.longest["checkpoint_write"] = checkpoints.longest_s

    def _warn(self, text: str) -> None:
        self.reporter.write(WarningRecord(self.steps, time.perf_counter() - self.started, text))

    def _begin_evaluation(self) -> None:
        begin = time.perf_counter()
        self.stopwatch.stage.enter("evaluation")
        self.log.eval_start(self.samples)
        pending = self.evaluator.start(self.step.whole_model(), self.step.autocast())
        self.evaluation = Evaluation(pending, begin, self.steps, self.samples)
        if not self.overlapping or self.samples >= self.config.training.sample_limit:
            self._end_evaluation(self.evaluation)

    def _end_evaluation(self, evaluation: Evaluation) -> None:
        """Wait for the result, report it and look whether it reaches the target."""
        self.stopwatch.stage.enter("evaluation")
        accuracy = evaluation.pending.result()
        self.log.eval_accuracy(accuracy.value, evaluation.samples)
        self.log.eval_stop(evaluation.samples)
        now = self.recorded = time.perf_counter()
        self.reporter.write(
            EvaluationRecord(
                step=evaluation.steps,
                samples=evaluation.samples,
                time_s=now - self.started,
                eval_s=now - evaluation.begin,
                masked_lm_accuracy=accuracy.value,
                correct=accuracy.correct,
                count=accuracy.count,
            )
        )
        self.evaluation, self.accuracy, self.evaluated_samples = None, accuracy.value, evaluation.samples
        at_end = evaluation.samples >= self.config.training.sample_limit
        if accuracy.value >= self.config.evaluation.target and (at_end or not self.config.evaluation.to_the_end):
            self.status = "success"
