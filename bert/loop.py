"""Training loop from ``run_start`` to ``run_stop``: steps, evaluations, reports, checkpoints and the end of the run."""

import itertools
import signal
import time
from dataclasses import dataclass
from typing import Literal

from bert.checkpoints.trained import TrainedWeights
from bert.checkpoints.writer import Checkpoints
from bert.configuration.config import Config
from bert.evaluation import Evaluator
from bert.guards.interruption import Interruption
from bert.log.mllog import MLLog
from bert.reporting.intervals import Intervals
from bert.reporting.reporter import Position, Reporter
from bert.step import TrainingStep
from compliance.log.metrics import NAN, EndRecord, EvaluationRecord
from compliance.log.schedule import EvaluationSchedule
from dataloading.batches.loader import Loader

Status = Literal["success", "aborted"]


@dataclass(frozen=True)
class Run:
    """Objects of a run, which are built before the clock starts."""

    config: Config
    schedule: EvaluationSchedule
    start: Position
    log: MLLog
    reporter: Reporter
    intervals: Intervals
    loader: Loader
    step: TrainingStep
    evaluator: Evaluator
    checkpoints: Checkpoints
    trained: TrainedWeights
    interruption: Interruption


def train(run: Run) -> Status:
    """Train and evaluate in turn until the target is reached, a limit is reached or a signal arrives.

    Without a target, reaching the sample limit is a success.
    """
    training, log, stopwatch = run.config.training, run.log, run.step.stopwatch
    at, status, accuracy = run.start, None, NAN
    run.reporter.begin()
    # From now on, a signal stops all ranks after the same step.
    run.interruption.defer()
    # ``run_start`` has been logged, so data may be read.
    run.evaluator.read_ahead()
    run.intervals.resume()

    # The schedule of evaluations has no end, so the loop ends only when the run has a status.
    for due in map(run.schedule.samples, itertools.count(run.schedule.index_after(at.samples))):
        log.block_start(at.samples)
        end = min(due, training.sample_limit)
        while status is None and at.samples < end:
            stopwatch.tracker.step = at.steps + 1
            with stopwatch.time("data_wait"):
                # The first call starts the prefetching, because no data may be read before ``run_start``.
                micro_batches = next(run.loader)
            run.step(micro_batches)
            at = Position(at.steps + 1, at.samples + training.global_batch_size)
            run.step.meet_sites(at.steps)

            # These decisions depend only on position and settings, so that all ranks call the same collectives. A signal,
            # which only one rank may have received, is shared by ``report``.
            keep = run.checkpoints.due(at.steps)
            # Also report at the end and before an evaluation, so that the evaluation's time does not count as step time.
            if at.steps % run.config.log.interval_steps == 0 or at.samples >= end or keep:
                if run.intervals.report(at, _is_to_stop(run)):
                    status, keep = "aborted", True
                    if run.interruption.number is not None:
                        # launch/slurm.sub repeats runs whose log has this line.
                        log.line(f"# stopped by {signal.Signals(run.interruption.number).name}")
                # A background thread writes checkpoints. Check for its errors here, where the host waits anyway.
                run.checkpoints.poll(at)

            # Do not save while steps are being skipped: a bad checkpoint would replace a good one.
            if keep and run.intervals.bad == 0:
                run.checkpoints.save(at)
        log.block_stop(at.samples)

        if status is None and at.samples < due:
            status = "aborted"  # the run reached its sample limit before the next evaluation
        if status is None:
            accuracy = _evaluate(run, at)
            run.intervals.resume()
            target = run.config.evaluation.target
            if accuracy >= target if target is not None else at.samples >= training.sample_limit:
                status = "success"
        if status is not None:
            break

    assert status is not None
    log.run_stop(status, samples=at.samples, eval_samples=run.evaluator.samples)
    seconds = run.reporter.seconds
    run.step.gather_weights()  # this completes an exchange between sites if one is in progress
    # Wait for the last checkpoint only now: the clock has been stopped, so writing it takes no time of the run.
    run.checkpoints.wait(at)
    run.reporter.end(at.steps, EndRecord(status, seconds, at.samples, accuracy))
    return status


def _evaluate(run: Run, at: Position) -> float:
    """Evaluate the current weights, log and report the result, and return the masked-LM accuracy."""
    began = time.perf_counter()
    run.log.eval_start(at.samples)
    # Gather the weights, because each rank may have updated only its shard, and sites may have different weights.
    model = run.step.gather_weights()
    run.step.stopwatch.tracker.enter("evaluation")
    found = run.evaluator(model, run.step.autocast())
    run.log.eval_accuracy(found.value, at.samples)
    run.log.eval_stop(at.samples)
    seconds = time.perf_counter() - began
    times = at.steps, at.samples, run.reporter.seconds, seconds
    record = EvaluationRecord(*times, found.value, found.correct, found.count, found.perplexity)
    run.reporter.write(record)
    run.trained.evaluated(record)
    return found.value


def _is_to_stop(run: Run) -> bool:
    """Tell whether this rank received a signal or has reached its time limit. If one has, all ranks stop."""
    minutes = run.config.training.max_minutes
    time_is_up = minutes is not None and run.reporter.seconds > 60 * minutes
    return time_is_up or run.interruption.number is not None
