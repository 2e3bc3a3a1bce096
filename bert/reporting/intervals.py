"""Reports on the steps of a log interval. The host waits for the device only here and in evaluations."""

import math
import time
from collections.abc import Sequence
from statistics import median

import torch

from bert.configuration.config import Config
from bert.optimizer import learning_rate
from bert.reporting.reporter import Position, Reporter
from bert.step import TrainingStep
from compliance.log.metrics import StepRecord, Straggler

SLOW_RATIO = 1.2
"""A rank is slow if its own work takes more than this multiple of the median time of the ranks of its pipeline stage."""
SLOW_INTERVALS = 3
"""Number of consecutive intervals after which a warning says that a rank is slow, or is no longer slow."""

MOST_BAD_INTERVALS = 10
"""A run ends after this many consecutive log intervals in which no step had finite gradients. Skipped steps do not
change the weights, so waiting longer rarely helps."""


class Stragglers:
    """Detector of ranks that slow down the other ranks, based on the time of each rank's own work.

    All arguments have one entry per rank. ``hosts`` holds the host names, ``stages`` holds the pipeline stages, and
    ``names`` holds the ranks' names in messages. Ranks are compared only with ranks of the same stage, because only these
    ranks have the same amount of work.
    """

    def __init__(self, hosts: Sequence[str], stages: Sequence[int], names: Sequence[str]) -> None:
        self._hosts, self._stages, self._names = hosts, stages, names
        self._in_a_row = [0] * len(hosts)
        """For each rank, for how many consecutive intervals its measured speed has contradicted `_named`."""
        self._named = [False] * len(hosts)
        """For each rank, whether the last warning says that it is slow."""

    def add(self, seconds: Sequence[float]) -> list[tuple[str, Straggler]]:
        """Add each rank's seconds per step in one interval, and return the ranks that became slow or stopped being slow.

        Each returned rank comes with the text of its warning.
        """
        # Use the median, because a few slow ranks would raise the mean.
        middles = {
            stage: median(own for own, other in zip(seconds, self._stages, strict=True) if other == stage)
            for stage in set(self._stages)
        }
        found: list[tuple[str, Straggler]] = []
        for rank, (host, own) in enumerate(zip(self._hosts, seconds, strict=True)):
            middle = middles[self._stages[rank]]
            changed = (own > SLOW_RATIO * middle) != self._named[rank]
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if changed else 0
            if self._in_a_row[rank] < SLOW_INTERVALS:
                continue
            self._in_a_row[rank], self._named[rank] = 0, not self._named[rank]
            times = own / middle if middle else float("inf")
            state = "is slow" if self._named[rank] else "is no longer slow"
            text = f"{self._names[rank]} {state}: {1000 * own:.1f} ms a step of its own, {times:.2f} times the median"
            found.append((text, Straggler(rank, host, self._named[rank], 1000 * own, 1000 * middle)))
        return found


class Intervals:
    """Reporter of the steps in each log interval: means, rates, phases and warnings."""

    def __init__(self, config: Config, step: TrainingStep, reporter: Reporter, start: Position, skipped: int) -> None:
        """Begin the first interval at the position ``start``. ``skipped`` steps were skipped before it."""
        self.bad = 0
        """Number of consecutive intervals in which every step was skipped."""
        self._config, self._reporter = config, reporter
        self._statistics, self._stopwatch, self._sites = step.statistics, step.stopwatch, step.sites
        mesh = step.mesh
        stages = [stage for _, stage, _ in mesh.coordinates.values()]
        self._stragglers = Stragglers(mesh.hosts, stages, mesh.names())
        self._skipped, self._steps = skipped, start.steps
        self._since = time.perf_counter()
        self._own_seconds = 0.0
        """Seconds per step of this rank's own work in the last interval."""

    def resume(self) -> None:
        """Restart the measurement, so that the time since the last report does not count as step time."""
        # Forget the times measured since the last report, such as the wait for other sites in an evaluation.
        self._stopwatch.reset()
        self._since = time.perf_counter()

    def report(self, at: Position, stop: bool) -> bool:
        """Fetch the statistics and report them. Every rank must call this after the same step.

        Returns whether the run must end, because some rank asked to ``stop`` or because gradients have not been finite for
        too long.
        """
        self._stopwatch.tracker.enter("statistics")
        means, stopping, own_seconds = self._statistics.fetch(stop, self._own_seconds)
        # Read the clock after the fetch, which waits for the device to finish the steps.
        now = time.perf_counter()
        steps, seconds = at.steps - self._steps, now - self._since
        # Read ``exchanged`` first, because ``take`` resets it.
        exchanged_ms = 1000 * self._stopwatch.exchanged / steps
        phases = {f"{name}_ms": 1000 * spent / steps for name, spent in self._stopwatch.take().items()}
        # Sites may skip different steps, so the mean over sites may be fractional. Round it up.
        skipped = math.ceil(round(means["skipped_steps"], 3))
        self._skipped += skipped
        # The learning rate schedule counts steps from 0 and does not count skipped steps.
        last = torch.tensor(max(0, at.steps - self._skipped - 1))
        self._reporter.write(
            StepRecord(
                step=at.steps,
                samples=at.samples,
                time_s=self._reporter.seconds,
                step_ms=1000 * seconds / steps,
                **phases,
                loss=means["masked_lm_loss"] + means["next_sentence_loss"],
                masked_lm_loss=means["masked_lm_loss"],
                next_sentence_loss=means["next_sentence_loss"],
                learning_rate=learning_rate(self._config.optimizer, last).item(),
                gradient_norm=means["gradient_norm"],
                tokens_per_s=means["tokens"] * steps / seconds,
                sequences_per_s=self._config.training.global_batch_size * steps / seconds,
                skipped_steps=skipped,
                site_bytes=0 if self._sites is None else self._sites.take_bytes(),
            )
        )
        # The time of this report counts towards the next interval.
        self._since, self._steps = now, at.steps
        # The next report sends this value to all ranks together with the statistics, which saves a separate collective.
        self._own_seconds = (phases["data_wait_ms"] + phases["forward_backward_ms"] - exchanged_ms) / 1000
        for text, straggler in self._stragglers.add(own_seconds):
            self._reporter.warn(at.steps, text, straggler)
        self.bad = self.bad + 1 if skipped == steps else 0
        # The statistics are sums over all ranks, so all ranks decide to end after the same step.
        if self.bad == MOST_BAD_INTERVALS:
            self._reporter.warn(
                at.steps, f"ending the run: no step of the last {self.bad} intervals had finite gradients"
            )
            return True
        return stopping
