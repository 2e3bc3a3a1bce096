"""Choose which runs of a longer series a submission takes: TR 12.1, "Scoring".

A submitter may plan M > N runs, sort them by the time of their start, and submit the N consecutive ones whose Olympic
score is the median of those of all such windows. A window with more than one failed run scores infinity and counts in
the median; if the median is infinite, there is no result. Taking the fastest window is prohibited.

The rule says nothing on an even number of windows, which has two in the middle. Here it is the slower of them: the
choice that cannot be called cherry-picking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FAILED = math.inf
"""Time to train of a run that did not converge or is no valid result."""


@dataclass(frozen=True)
class Selection:
    """The window of a series of runs that stands for all of it.

    Attributes:
        order: all runs, as indices into the input, by the time of their start.
        scores: Olympic time to train of each window of consecutive runs, in the unit of the input; infinite where more
            than one run of the window failed.
        window: index into `scores` of the one to submit.
        runs: runs of a window.
    """

    order: tuple[int, ...]
    scores: tuple[float, ...]
    window: int
    runs: int

    @property
    def chosen(self) -> tuple[int, ...]:
        """The runs to submit, as indices into the input, by the time of their start."""
        return self.order[self.window : self.window + self.runs]

    @property
    def score(self) -> float:
        """Olympic time to train of the chosen runs; infinite when the series has no valid result."""
        return self.scores[self.window]


def select(started_ms: Sequence[int], times: Sequence[float], runs: int = 10) -> Selection:
    """The window to submit of a series of at least `runs` runs.

    Args:
        started_ms: when each run was started; runs that started at the same time keep their order.
        times: time to train of each run; `FAILED` for a failed one.
        runs: runs of a submission, at least three.

    Raises:
        ValueError: fewer runs than a submission takes.
    """
    if len(started_ms) != len(times) or runs < 3:
        raise ValueError(
            f"{len(started_ms)} starts and {len(times)} times, expected as many, and windows of at least 3"
        )
    if len(times) < runs:
        raise ValueError(f"{len(times)} runs, expected at least {runs}: run the missing ones")
    # sorted() keeps the order of runs that started in the same millisecond.
    order = sorted(range(len(times)), key=lambda run: started_ms[run])
    scores = [
        olympic_mean([times[run] for run in order[first : first + runs]]) for first in range(len(times) - runs + 1)
    ]
    ranked = sorted(range(len(scores)), key=lambda window: scores[window])
    return Selection(tuple(order), tuple(scores), ranked[len(scores) // 2], runs)


def olympic_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest of at least three values.

    Raises:
        ValueError: fewer values.
    """
    if len(values) < 3:
        raise ValueError(f"{len(values)} runs, expected at least 3: the fastest and the slowest are dropped")
    # One failed run, infinite, is the largest and goes; of two, one stays and makes the mean infinite.
    kept = sorted(values)[1:-1]
    return sum(kept) / len(kept)
