"""Account of a run's time, in seconds of its result: what it would have been without this or that.

All comes from the metrics that the run recorded: the parts of its steps on rank 0, its evaluations, and its warnings of
stragglers. A part that is taken away takes no other part with it, and nothing is said of samples: the run is the same one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.view import View
from compliance.log.records import Straggler, read_metrics

PARTS = ("data_wait_ms", "forward_backward_ms", "reduce_ms", "update_ms")


@dataclass(frozen=True)
class Interval:
    """Steps since the record before, and the seconds of all of them by part."""

    last_step: int
    steps: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class SlowRank:
    """A rank that the run named, from one step to another, with its own and the median milliseconds of a step."""

    rank: int
    host: str
    first_step: int
    last_step: float
    own_ms: float
    median_ms: float


@dataclass
class Recorded:
    """A run as its metrics have it."""

    seconds: float = 0.0
    evaluations: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    stragglers: list[SlowRank] = field(default_factory=list)

    def part(self, name: str) -> float:
        """Seconds of a part, of all steps."""
        return sum(interval.seconds[name] for interval in self.intervals)


@dataclass(frozen=True)
class Saving:
    """Seconds that a run would have been shorter, at most."""

    without: str
    seconds: float


def read_run(path: Path) -> Recorded:
    """Read a run's metrics. Raises ``ValueError`` where the file has no records of steps."""
    metrics = read_metrics(path)
    # Each of these has the run's clock; the largest is the end even of a run that was cut off.
    timed = [*metrics.steps, *metrics.evaluations, *([metrics.end] if metrics.end else [])]
    run = Recorded(
        seconds=max((record.time_s for record in timed), default=0.0),
        evaluations=sum(record.eval_s for record in metrics.evaluations),
    )
    last = 0
    for record in metrics.steps:
        # Records have means over their interval, which covers several steps.
        steps = max(0, record.step - last)
        run.intervals.append(
            Interval(record.step, steps, {name: steps * getattr(record, name) / 1000 for name in PARTS})
        )
        last = max(last, record.step)
    for warning in metrics.warnings:
        if warning.straggler is not None:
            _note(run, warning.straggler, warning.step)
    if not last or not run.seconds:
        raise ValueError(f"{path}: no record of steps; expected metrics_N.jsonl of a run, beside its result_N.txt")
    return run


def _note(run: Recorded, rank: Straggler, step: int) -> None:
    if rank.is_slow:
        # A median above its own time would be a rank that is not slow.
        median_ms = min(rank.own_ms, rank.median_ms)
        run.stragglers.append(SlowRank(rank.rank, rank.host, step, math.inf, rank.own_ms, median_ms))
        return
    # Only the open entry of the rank: it may have been slow before, and fast, and slow again.
    for place, each in enumerate(run.stragglers):
        if each.rank == rank.rank and each.last_step == math.inf:
            run.stragglers[place] = replace(each, last_step=step)


def savings(run: Recorded, view: View | None = None) -> list[Saving]:
    """List what the run would have saved without, the largest first. ``view``: of the cluster that it ran on."""
    found = [
        Saving("waiting for the reduction (perfect overlap)", run.part("reduce_ms")),
        Saving("waiting for data", run.part("data_wait_ms")),
        Saving("evaluations", run.evaluations),
    ]
    ranks = {(each.rank, each.host) for each in run.stragglers}
    # By the host as well: after a restart a rank's number may be on another.
    for rank, host in ranks:
        its_own = [each for each in run.stragglers if (each.rank, each.host) == (rank, host)]
        found.append(Saving(f"rank {rank} on host {host}", _without(run, its_own)))
    for host in {host for _, host in ranks}:
        # A host's line beside its only rank's would be the same figure twice.
        if sum(each == host for _, each in ranks) > 1:
            found.append(Saving(f"host {host}", _without(run, [each for each in run.stragglers if each.host == host])))
    if view is not None and (ratio := _slowest_link(view)) > 1:
        without = f"uneven links (the slowest takes {ratio:.2f} times as long)"
        found.append(Saving(without, run.part("reduce_ms") * (1 - 1 / ratio)))
    return sorted((each for each in found if each.seconds > 0), key=lambda each: -each.seconds)


def _without(run: Recorded, left_out: Sequence[SlowRank]) -> float:
    """Seconds that others had to wait for ranks: their own time over that of the next slowest, or the median."""
    saved = 0.0
    for interval in run.intervals:
        here = [each for each in run.stragglers if each.first_step < interval.last_step <= each.last_step]
        slowest = _slowest(here)
        others = _slowest([each for each in here if each not in left_out])
        # Without any straggler a step still takes the median rank's time.
        median = min((each.median_ms for each in here), default=0.0)
        saved += interval.steps * max(0.0, slowest - max(others, median)) / 1000
    return saved


def _slowest(stragglers: Iterable[SlowRank]) -> float:
    return max((each.own_ms for each in stragglers), default=0.0)


def _slowest_link(view: View) -> float:
    """Return the time of the slowest link between hosts, or in the host where there is one, over the median."""
    times = [link.seconds_per_byte for link in view.links_between_hosts or view.links]
    typical = statistics.median(times) if times else 0.0
    return max(times) / typical if typical else 1.0


def report(run: Recorded, view: View | None = None) -> list[str]:
    """Lines that say where the time went, and what it would have been without."""
    known = {name: run.part(name) for name in PARTS}
    # Start, checkpoints, and whatever else no part counts.
    other = max(0.0, run.seconds - sum(known.values()) - run.evaluations)
    lines = [f"{run.seconds:.2f} s from start to end, {run.intervals[-1].last_step:,} steps"]
    for name, seconds in [*known.items(), ("evaluations", run.evaluations), ("start and other", other)]:
        title = name.removesuffix("_ms").replace("_", " ")
        lines.append(f"  {title:<20}{seconds:10.2f} s{100 * seconds / run.seconds:7.1f} %")
    lines.append("it would have been, at most that much shorter, without")
    for each in savings(run, view):
        left = max(0.0, run.seconds - each.seconds)
        lines.append(f"{left:10.2f} s  {100 * each.seconds / run.seconds:5.1f} % less  {each.without}")
    if not run.stragglers:
        lines.append("no rank was named as a straggler in this run")
    return lines
