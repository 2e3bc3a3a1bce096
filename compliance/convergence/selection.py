"""Choose the runs to submit from a longer series (TR 12.1, "Scoring").

A submitter may plan more runs than the required N. The runs are sorted by start time, and any N consecutive runs are a
window. The window whose Olympic score is the median of all windows' scores is submitted. A window with more than one
failed run has an infinite score, which counts in the median. An infinite median means that there is no result.
If the number of windows is even, the slower of the two middle windows is chosen, to avoid cherry-picking.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from compliance.log.logged_run import LoggedRun
from compliance.log.rules import SUBMISSION_RUNS

FAILED = math.inf
"""Time to train of a run that did not converge or is invalid."""


@dataclass(frozen=True)
class Selection:
    """The window of consecutive runs that is submitted from a longer series.

    Attributes:
        chosen: indices of the runs to submit, in order of their start time.
        scores: Olympic mean time to train of each window; infinite if more than one run of the window failed.
        window: index of the chosen window in `scores`.
    """

    chosen: tuple[int, ...]
    scores: tuple[float, ...]
    window: int

    @property
    def score(self) -> float:
        """Olympic mean time to train of the chosen runs; infinite if the series has no valid result."""
        return self.scores[self.window]


def counted_seconds(run: LoggedRun, *, passed: bool) -> float:
    """Return the time to train that enters the score. A run whose log fails the checks counts as failed (TR 12)."""
    return FAILED if run.seconds is None or not passed else run.seconds


def select(started_ms: Sequence[int], times: Sequence[float]) -> Selection:
    """Choose the window of ten or more runs to submit, given the start time and time to train (or `FAILED`) of each run."""
    order = sorted(range(len(times)), key=lambda run: started_ms[run])
    windows = [order[first : first + SUBMISSION_RUNS] for first in range(len(times) - SUBMISSION_RUNS + 1)]
    scores = [olympic_mean([times[run] for run in window]) for window in windows]
    median = sorted(range(len(scores)), key=lambda window: scores[window])[len(scores) // 2]
    return Selection(tuple(windows[median]), tuple(scores), median)


def submitted(started_ms: Sequence[int], times: Sequence[float]) -> list[int]:
    """Return the ascending indices of the runs to submit: all of up to ten runs, otherwise those that `select` chooses."""
    if len(times) <= SUBMISSION_RUNS:
        return [*range(len(times))]
    return sorted(select(started_ms, times).chosen)


def olympic_mean(values: Sequence[float]) -> float:
    """Return the mean of at least three values without the smallest and the largest."""
    # A failed run is infinite and is dropped as the largest value. A second failed run makes the mean infinite.
    kept = sorted(values)[1:-1]
    return sum(kept) / len(kept)
