"""Tell whether a set of closed runs converges as slowly as the reference: reference convergence points (RCP), TR 13, 22.

A reference point is a set of runs of the reference model at one global batch size: the samples each needed to reach
the target. A submission whose mean is significantly below the reference's fails; one below it, but not significantly,
passes and its score is multiplied by reference mean / own mean; a slower one stands as it is.

The points are those that the installed package mlperf-logging holds for a ruleset; everything else is computed here,
to the digits of its checker, and `tests/compliance/convergence/test_convergence.py` holds the two against each other.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Literal

from compliance.convergence.selection import olympic_mean
from compliance.log import rules

Origin = Literal["exact", "interpolated", "smallest"]

SIGNIFICANCE = 0.05
"""Level of the one-sided t-test (TR 22)."""

BISECTION_WIDTH = 1e-4
"""Samples to which the RCP checker finds the minimum by halving; the same halving gives the same digits."""


@dataclass(frozen=True)
class ReferencePoint:
    """A reference point: samples to the target of the reference's runs at one batch size.

    Attributes:
        mean: without the fastest and the slowest run.
        stdev: population standard deviation of all runs.
        runs: number of runs that the t-test counts: all but two.
    """

    global_batch_size: int
    mean: float
    stdev: float
    runs: int


@dataclass(frozen=True)
class Reference:
    """Reference for a submission at one global batch size. All but `runs` and sizes in samples (sequences).

    Attributes:
        global_batch_size: the batch size that was asked for.
        mean: a submission's mean from here on stands as it is.
        stdev: standard deviation of single runs.
        minimum: a submission's mean below this fails.
        runs: number of reference runs that the t-test counts.
        origin: "exact" for a point at this batch size, "interpolated" between two, "smallest" for a batch size below
            all points kept, which is compared with the smallest of them.
        points: batch sizes of the one or two points used.
    """

    ruleset: str
    global_batch_size: int
    mean: float
    stdev: float
    minimum: float
    runs: int
    origin: Origin
    points: tuple[int, ...]

    def scaling(self, mean: float) -> float:
        """Factor of the score of a submission with this mean, at least 1 (TR 13)."""
        return max(1.0, self.mean / mean)

    def verdict(self, mean: float) -> Literal["pass", "scaled", "fail"]:
        """The outcome of a complete submission with this mean."""
        if mean < self.minimum:
            return "fail"
        return "scaled" if mean < self.mean else "pass"


def reference(ruleset: str, global_batch_size: int) -> Reference | None:
    """Return what a submission at `global_batch_size` is compared with; None above the largest reference point.

    Raises:
        ValueError: a ruleset without points of BERT, a batch size that is not positive, or no mlperf-logging.
    """
    # It may come from a log, which may hold true or 448.0 in its place.
    if not rules.is_integer(global_batch_size) or global_batch_size <= 0:
        raise ValueError(f"global_batch_size is {global_batch_size}, expected a positive integer")
    kept = pruned(ruleset)
    # A point at the batch size that was pruned away does not count: the package checker looks at the pruned ones only.
    for point in kept:
        if point.global_batch_size == global_batch_size:
            return _reference(ruleset, global_batch_size, point, "exact", (point,))
    below = [point for point in kept if point.global_batch_size < global_batch_size]
    above = [point for point in kept if point.global_batch_size > global_batch_size]
    # The official checker extrapolates to no larger batch: it asks for reference runs at that size instead.
    if not above:
        return None
    if not below:
        return _reference(ruleset, global_batch_size, above[0], "smallest", (above[0],))
    between = interpolate(below[-1], above[0], global_batch_size)
    return _reference(ruleset, global_batch_size, between, "interpolated", (below[-1], above[0]))


@lru_cache
def points(ruleset: str) -> tuple[ReferencePoint, ...]:
    """All reference points of a ruleset, by batch size.

    Raises:
        ValueError: see `reference`.
    """
    rules.check_ruleset(ruleset)
    try:
        # The data file alone: importing the module beside it brings NumPy and SciPy.
        text = (files("mlperf_logging.rcp_checker") / f"training_{ruleset}" / "rcps_bert.json").read_text("utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ValueError(
            f"the reference points of ruleset {ruleset} are not there: install mlperf-logging 4.1.68 "
            "(the project's requirements name it)"
        ) from error
    read = [(entry["BS"], entry["Epochs to converge"]) for entry in json.loads(text).values()]
    # As the RCP checker: the spread is of all runs, though the mean is without the extremes.
    # np.std, which the checker calls, divides by n, and so does pstdev.
    found = [ReferencePoint(batch, olympic_mean(runs), statistics.pstdev(runs), len(runs) - 2) for batch, runs in read]
    return tuple(sorted(found, key=lambda point: point.global_batch_size))


@lru_cache
def pruned(ruleset: str) -> tuple[ReferencePoint, ...]:
    """The points that count, by batch size: no larger batch converges faster, none is slower than its neighbours say.

    Points below the batch size of the fastest convergence go first; then, from left to right, each point above the
    straight line between its neighbours. A point is looked at again when its right neighbour has gone, but one that was
    passed is not: the RCP checker does so too.
    """
    kept = list(points(ruleset))
    fastest = min(kept, key=lambda point: point.mean)
    kept = [point for point in kept if point.global_batch_size >= fastest.global_batch_size]
    index = 1  # the two ends stay, as they have one neighbour each
    while index < len(kept) - 1:
        line = interpolate(kept[index - 1], kept[index + 1], kept[index].global_batch_size)
        if kept[index].mean > line.mean:
            del kept[index]
        else:
            index += 1
    return tuple(kept)


def interpolate(low: ReferencePoint, high: ReferencePoint, global_batch_size: int) -> ReferencePoint:
    """The point at `global_batch_size` on the line between two; the t-test counts twice a submission's runs for it."""

    def at(left: float, right: float) -> float:
        slope = (right - left) / (high.global_batch_size - low.global_batch_size)
        return slope * (global_batch_size - low.global_batch_size) + left

    return ReferencePoint(
        global_batch_size, at(low.mean, high.mean), at(low.stdev, high.stdev), 2 * rules.SUBMISSION_RUNS
    )


def _reference(
    ruleset: str, global_batch_size: int, point: ReferencePoint, origin: Origin, used: tuple[ReferencePoint, ...]
) -> Reference:
    minimum = minimum_mean(point.mean, point.stdev, point.runs)
    sizes = tuple(point.global_batch_size for point in used)
    return Reference(ruleset, global_batch_size, point.mean, point.stdev, minimum, point.runs, origin, sizes)


def minimum_mean(mean: float, stdev: float, runs: int) -> float:
    """Smallest mean of a submission that is not significantly below a reference with `runs` runs.

    Both sides are given the reference's spread, so that the t-test's limit is known in closed form: mean - t x stdev x
    sqrt(1/runs + 1/8), with runs + 8 - 2 degrees of freedom. Halving towards it ends on the official digits.
    """
    if stdev == 0:
        return mean
    submitted = rules.SUBMISSION_RUNS - 2
    t = student_t_quantile(1 - SIGNIFICANCE, runs + submitted - 2)
    limit = mean - t * stdev * math.sqrt(1 / runs + 1 / submitted)
    # From the same ends as there; others would give other last digits.
    low, high = 0.0, mean
    while high - low > BISECTION_WIDTH:
        middle = (low + high) / 2
        low, high = (low, middle) if middle > limit else (middle, high)
    return (low + high) / 2


# By hand and not from SciPy, which takes about a second to import, in every command that shows a convergence.
def student_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """The `probability` quantile of Student's t distribution, for a probability of at least one half.

    By halving on the finite sums that the distribution function has for whole degrees of freedom (Abramowitz and Stegun,
    26.7.3 and 26.7.4).
    """
    low, high = 0.0, 1.0
    while (1 + _t_between(high, degrees_of_freedom)) / 2 < probability:
        high *= 2
    # Until no floating-point number lies between them.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if (1 + _t_between(middle, degrees_of_freedom)) / 2 < probability else (low, middle)
    return high


def _t_between(t: float, degrees_of_freedom: int) -> float:
    """Probability that a t variable lies between -t and t."""
    angle = math.atan(t / math.sqrt(degrees_of_freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    # With x the angle: sin x (1 + cos^2 x / 2 + 3 cos^4 x / 8 + ...) for an even number, and 2 / pi times x + sin x
    # (cos x + 2 cos^3 x / 3 + ...) for an odd one.
    odd = degrees_of_freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(2 + odd, degrees_of_freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def describe_origin(found: Reference) -> str:
    """Say in words where a reference comes from."""
    if found.origin == "exact":
        return f"reference point at batch size {found.points[0]}"
    if found.origin == "interpolated":
        return f"interpolated between the reference points at batch sizes {found.points[0]} and {found.points[1]}"
    return f"no reference point at or below batch size {found.global_batch_size}: compared with {found.points[0]}"
