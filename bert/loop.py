"""Training loop from ``run_start`` to ``run_stop``: steps, evaluations, reports, checkpoints and the end of the run."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bert.checkpoints.writer import Checkpoints
from bert.configuration.config import Config
from bert.evaluation.evaluations import Evaluations
from bert.evaluation.evaluator import Evaluator
from bert.guards.interruption import Interruption
from bert.log.mllog import MLLog, evaluation_samples
from bert.reporting.intervals import Intervals, Stragglers
from bert.reporting.reporter import Position, Reporter
from bert.step import TrainingStep
from bert.timing.stopwatch import Stopwatch
from compliance.log.records import NAN, EndRecord
from dataloading.batches.loader import Loader

Status = Literal["success", "aborted"]


@dataclass(frozen=True)
class Run:
    """Objects of a run, which are built before the clock starts."""

    config: Config
    evaluation_interval: int
    """Number of training samples between evaluations."""
    start: Position
    skipped: int
    """Number of steps before ``start`` that changed nothing because a gradient was not finite."""
    overlapping: bool
    """Whether the result of an evaluation is read only after queueing the next step, so that the device stays busy
    during the all-reduce. The clock still stops at the result. That step changes neither the accuracy nor the number of
    samples of the evaluation, and is discarded if the target was reached."""
    log: MLLog
    reporter: Reporter
    stopwatch: Stopwatch
    loader: Loader
    step: TrainingStep
    evaluator: Evaluator
    checkpoints: Checkpoints
    stragglers: Stragglers
    interruption: Interruption


def train(run: Run) -> Status:
    """Train and evaluate in turn until the target is reached, a limit is reached or a signal arrives."""
    training, log, tracker = run.config.training, run.log, run.stopwatch.tracker
    at, status = run.start, None
    run.reporter.begin()
    # From now on, a signal stops all ranks after the same step.
    run.interruption.defer()
    # ``run_start`` has been logged, so data may be read.
    run.evaluator.read_ahead()
    intervals = Intervals(run.config, run.step.statistics, run.stopwatch, run.reporter, run.stragglers, at, run.skipped)
    evaluations = Evaluations(run.evaluator, run.step, log, run.reporter, tracker, run.config.evaluation.target)

    for due in _evaluation_points(run):
        log.block_start(at.samples)
        end = min(due, training.sample_limit)
        while status is None and at.samples < end:
            tracker.step = at.steps + 1
            with run.stopwatch.time("data_wait"):
                # The first call starts the prefetching; the loader has not read any data before.
                micro_batches = next(run.loader)
            run.step(micro_batches)
            at = at.after(training.global_batch_size)

            # Collect the previous block's evaluation only after queueing a step, so that the device stays busy during
            # the all-reduce.
            if evaluations.pending:
                status = _finish(run, evaluations, intervals)

            # These decisions depend only on position and settings, so that all ranks call the same collectives. A signal,
            # which only one rank may have received, is shared by ``report``.
            keep = run.checkpoints.due(at.steps)
            # Also report before an evaluation, so that its time does not count as step time, and at the end.
            at_interval = at.steps % run.config.log.interval_steps == 0 or at.samples >= end or keep
            if status is None and at_interval:
                if intervals.report(at, _is_to_stop(run)):
                    status, keep = "aborted", True
                # A background thread writes checkpoints. Check for its errors here, where the host waits anyway.
                run.checkpoints.look(at)

            # Do not save while steps are being skipped: a bad checkpoint would replace a good one.
            if keep and status != "success" and intervals.bad == 0:
                run.checkpoints.save(at)
        log.block_stop(at.samples)

        if status is None and at.samples < due:
            status = "aborted"  # the sample limit is reached
        if status is None:
            evaluations.begin(at)
            # At the sample limit, there is no next step that could overlap the all-reduce.
            if not run.overlapping or at.samples >= training.sample_limit:
                status = _finish(run, evaluations, intervals)
        if status is not None:
            break

    # The evaluation points never end, so the loop above ends only when it has a status.
    assert status is not None
    # After a success, report the evaluation's samples: the step that ran during the evaluation does not count.
    samples = evaluations.samples if status == "success" else at.samples
    log.run_stop(status, samples=samples, eval_samples=run.evaluator.samples)
    seconds = run.reporter.seconds
    # Writing the last checkpoint is not part of the timed run.
    run.checkpoints.wait(at)
    accuracy = NAN if evaluations.accuracy is None else evaluations.accuracy
    run.reporter.end(at.steps, EndRecord(status, seconds, samples, accuracy))
    return status


def _evaluation_points(run: Run) -> Iterator[int]:
    """Return an endless iterator over the numbers of samples at which evaluations are due."""
    points = (
        evaluation_samples(number, run.evaluation_interval, run.config.training.global_batch_size)
        for number in itertools.count(1)
    )
    # Count from the first evaluation, so that a resumed run keeps the schedule.
    return itertools.dropwhile(lambda due: due < run.start.samples, points)


def _finish(run: Run, evaluations: Evaluations, intervals: Intervals) -> Status | None:
    """Wait for the pending evaluation and return the run's status. The wait does not count as step time."""
    reached = evaluations.finish()
    intervals.resume()
    at_end = evaluations.samples >= run.config.training.sample_limit
    return "success" if reached and (at_end or not run.config.evaluation.to_the_end) else None


def _is_to_stop(run: Run) -> bool:
    """Tell whether this rank received a signal or has reached its time limit. One such rank stops all ranks."""
    minutes = run.config.training.max_minutes
    time_is_up = minutes is not None and run.reporter.seconds > 60 * minutes
    return time_is_up or run.interruption.number is not None
