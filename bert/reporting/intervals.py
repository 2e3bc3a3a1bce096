"""The steps of an interval, reported: but for the results of evaluations, where the loop's host waits for the device."""

import time
from collections.abc import Sequence
from statistics import median

from bert.configuration.config import Config
from bert.optimizer import learning_rate
from bert.reporting.reporter import Position, Reporter
from bert.reporting.statistics import Statistics
from bert.timing.stopwatch import Stopwatch
from compliance.log.records import StepRecord, Straggler

SLOW_RATIO = 1.2
"""A rank is slow if it takes so many times the median."""
SLOW_INTERVALS = 3
"""Before a rank is named, it is slow in so many intervals in a row."""


class Stragglers:
    """Search for ranks that hold up the others, by the time of each one's own work; ``hosts`` are their names by rank."""

    def __init__(
        self,
        hosts: Sequence[str],
        stages: Sequence[int] | None = None,
        places: Sequence[str] | None = None,
    ) -> None:
        """Ranks are compared with those of the same one of ``stages``, whose work is the same. ``places`` are those in the
        mesh, as a rank's name goes on with them.
        """
        self._hosts = hosts
        self._stages = stages or [0] * len(hosts)
        self._places = places or [""] * len(hosts)
        self._in_a_row = [0] * len(hosts)
        """Intervals in which each was slow, or no longer slow if it has been named."""
        self._named = [False] * len(hosts)

    def add(self, seconds: Sequence[float]) -> list[tuple[str, Straggler | None]]:
        """Take in an interval's seconds a step, by rank; return warnings, with the rank whose state has changed."""
        # The median, which a few slow ranks do not move, as they would a mean.
        middles = {
            stage: median(own for own, other in zip(seconds, self._stages, strict=True) if other == stage)
            for stage in set(self._stages)
        }
        lines: list[tuple[str, Straggler | None]] = []
        for rank, (host, own) in enumerate(zip(self._hosts, seconds, strict=True)):
            middle = middles[self._stages[rank]]
            is_slow = own > SLOW_RATIO * middle
            # Both ways by one count: a rank is named, and taken back, after as many intervals.
            changed = is_slow != self._named[rank]
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if changed else 0
            if self._in_a_row[rank] == SLOW_INTERVALS:
                self._in_a_row[rank], self._named[rank] = 0, not self._named[rank]
                times = own / middle if middle else float("inf")
                state = "is slow" if self._named[rank] else "is no longer slow"
                spent = f"{1000 * own:.1f} ms a step of its own, {times:.2f} times the median"
                straggler = Straggler(rank, host, self._named[rank], 1000 * own, 1000 * middle)
                lines.append((f"rank {rank} on host {host}{self._places[rank]} {state}: {spent}", straggler))
        return lines


class Intervals:
    """Report of the steps since the last report: means, rates, phases, and what a person should look at."""

    def __init__(
        self,
        config: Config,
        statistics: Statistics,
        stopwatch: Stopwatch,
        reporter: Reporter,
        stragglers: Stragglers,
        start: Position,
        skipped: int,
    ) -> None:
        """The first interval begins now, after ``start``, before which so many steps were ``skipped``."""
        self.bad = 0
        """Intervals in a row of which every step was skipped."""
        self._config = config
        self._statistics = statistics
        self._stopwatch = stopwatch
        self._reporter = reporter
        self._stragglers = stragglers
        self._skipped = skipped
        self._steps = start.steps
        self._since = time.perf_counter()
        self._own_seconds = 0.0
        """A step, of this rank's own work in the interval before."""

    def resume(self) -> None:
        """Count what came since the last report towards no step."""
        self._since = time.perf_counter()

    def report(self, at: Position, stop: bool) -> bool:
        """Fetch the statistics and report them; every rank must call it after the same step.

        Returns whether the run is to end: some rank was told to ``stop``, or gradients do not become finite again.
        """
        self._stopwatch.tracker.enter("statistics")
        means, stopping = self._statistics.fetch(stop, self._own_seconds)
        # Behind the fetch, which waits for the device: the steps are done by now.
        now = time.perf_counter()
        steps, seconds = at.steps - self._steps, now - self._since
        # Read before ``take``, which sets it to zero.
        exchanged_ms = 1000 * self._stopwatch.exchanged / steps
        phases = {f"{name}_ms": 1000 * spent / steps for name, spent in self._stopwatch.take().items()}
        skipped = round(means["skipped_steps"])
        self._skipped += skipped
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
                # The schedule counts from 0, and a skipped step not at all.
                learning_rate=learning_rate(self._config.optimizer, max(0, at.steps - self._skipped - 1)),
                gradient_norm=means["gradient_norm"],
                tokens_per_s=means["tokens"] * steps / seconds,
                sequences_per_s=self._config.training.global_batch_size * steps / seconds,
                skipped_steps=skipped,
            )
        )
        # What follows, and the writing above, counts to the next interval.
        self._since, self._steps = now, at.steps
        # Made known with the next fetch: telling it at once would be another collective.
        self._own_seconds = (phases["data_wait_ms"] + phases["forward_backward_ms"] - exchanged_ms) / 1000
        for text, straggler in self._stragglers.add(self._statistics.own_seconds):
            self._reporter.warn(at.steps, text, straggler)
        self.bad = self.bad + 1 if skipped == steps else 0
        # Statistics are sums over all ranks: all end here after the same step.
        if self.bad == self._config.training.bad_intervals:
            self._reporter.warn(
                at.steps, f"ending the run: no step of the last {self.bad} intervals had finite gradients"
            )
            return True
        return stopping
