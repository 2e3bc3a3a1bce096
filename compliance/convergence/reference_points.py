"""Whether a set of closed runs converges as slowly as the reference: reference convergence points (RCP), TR 13 and 22.

A reference point is a set of runs of the reference model at one global batch size: the samples each needed to reach
the target. A submission whose mean is significantly below the reference's fails; one below it, but not significantly,
passes and its score is multiplied by reference mean / own mean; a slower one stands as it is.

The points are those that the installed package mlperf-logging holds for a ruleset; everything else is computed here,
to the digits of its checker, and `tests/bert/test_convergence.py` holds the two against each other.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Literal

from compliance.log import rules
from compliance.log.schedule import Schedule, evaluation_interval
from compliance.package.selection import olympic_mean

Origin = Literal["exact", "interpolated", "smallest"]
Outcome = Literal["pass", "scaled", "fail", "no reference", "unfinished"]

SUBMISSION_RUNS = 10
"""Runs of a BERT submission (TR 12)."""

SIGNIFICANCE = 0.05
"""Level of the one-sided t-test (TR 22)."""

BISECTION_WIDTH = 1e-4
"""Samples to which the official checker finds the minimum by halving; the same halving gives the same digits."""

NOT_CONVERGED = math.inf

PREDICTION_LEVEL = 0.9
PREDICTION_DRAWS = 2000
MAX_EVALUATIONS = 2**20
MAX_CASES = 12


@dataclass(frozen=True)
class Point:
    """One reference point: samples to the target of the reference's runs at one batch size.

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
    """What a submission at one global batch size is compared with. All but `runs` and sizes in samples (sequences).

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


@dataclass(frozen=True)
class Evaluation:
    """A place on the evaluation schedule.

    Attributes:
        index: number of the evaluation, from 1.
        samples: sequences trained when it is taken.
    """

    index: int
    samples: int


@dataclass(frozen=True)
class Case:
    """The complete set, if all missing runs converged at one evaluation.

    Attributes:
        mean: of the complete set, in samples.
        scaling: factor of the score.
    """

    evaluation: Evaluation
    mean: float
    verdict: Literal["pass", "scaled", "fail"]
    scaling: float


@dataclass(frozen=True)
class Needed:
    """What the missing runs of an unfinished set must do.

    Attributes:
        remaining: how many are missing.
        to_pass: if all of them converge at this evaluation or later, the set passes; None when it no longer can.
        to_stand: the same for a score without scaling.
        cases: what becomes of the set if all of them converge at one evaluation, for the evaluations that matter.
        predicted_mean: interval that holds the mean of the complete set with a probability of 90 %, from the runs so
            far and the reference's spread.
        pass_probability: by the same prediction.
        stand_probability: probability of a score without scaling.
    """

    remaining: int
    to_pass: Evaluation | None
    to_stand: Evaluation | None
    cases: tuple[Case, ...]
    predicted_mean: tuple[float, float]
    pass_probability: float
    stand_probability: float


@dataclass(frozen=True)
class Outlook:
    """Where a set of runs stands.

    Attributes:
        reference: None in the open division and above the largest reference point.
        mean: mean samples to the target, without the fastest and the slowest run from three runs on; None before the
            first run has converged.
        verdict: "fail" as soon as two runs did not converge or the missing ones cannot help any more; else "unfinished"
            while runs are missing.
        scaling: factor of the score, were `mean` final.
        sentence: all of it in words.
        needed: None when all runs are there, or two did not converge, or there is no reference.
    """

    reference: Reference | None
    mean: float | None
    verdict: Outcome
    scaling: float
    sentence: str
    needed: Needed | None


def reference(ruleset: str, global_batch_size: int) -> Reference | None:
    """What a submission at `global_batch_size` is compared with; None above the largest reference point.

    Raises:
        ValueError: a ruleset without points of BERT, a batch size that is not positive, or no mlperf-logging.
    """
    if not rules.is_integer(global_batch_size) or global_batch_size <= 0:
        raise ValueError(f"global_batch_size is {global_batch_size}, expected a positive integer")
    kept = pruned(ruleset)
    for point in kept:
        if point.global_batch_size == global_batch_size:
            return _reference(ruleset, global_batch_size, point, "exact", (point,))
    below = [point for point in kept if point.global_batch_size < global_batch_size]
    above = [point for point in kept if point.global_batch_size > global_batch_size]
    if not above:
        return None
    if not below:
        return _reference(ruleset, global_batch_size, above[0], "smallest", (above[0],))
    between = interpolate(below[-1], above[0], global_batch_size)
    return _reference(ruleset, global_batch_size, between, "interpolated", (below[-1], above[0]))


@lru_cache
def points(ruleset: str) -> tuple[Point, ...]:
    """All reference points of a ruleset, by batch size.

    Raises:
        ValueError: see `reference`.
    """
    rules.check_ruleset(ruleset)
    try:
        text = (files("mlperf_logging.rcp_checker") / f"training_{ruleset}" / "rcps_bert.json").read_text("utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ValueError(
            f"the reference points of ruleset {ruleset} are not there: install mlperf-logging 4.1.68 "
            "(the project's requirements name it)"
        ) from error
    found = [_point(entry["BS"], entry["Epochs to converge"]) for entry in json.loads(text).values()]
    return tuple(sorted(found, key=lambda point: point.global_batch_size))


@lru_cache
def pruned(ruleset: str) -> tuple[Point, ...]:
    """The points that count, by batch size: no larger batch converges faster, none is slower than its neighbours say.

    Points below the batch size of the fastest convergence go first; then, from left to right, each point above the
    straight line between its neighbours. A point is looked at again when its right neighbour has gone, but one that was
    passed is not: the official checker does so too.
    """
    kept = list(points(ruleset))
    fastest = min(kept, key=lambda point: point.mean)
    kept = [point for point in kept if point.global_batch_size >= fastest.global_batch_size]
    index = 1
    while index < len(kept) - 1:
        line = interpolate(kept[index - 1], kept[index + 1], kept[index].global_batch_size)
        if kept[index].mean > line.mean:
            del kept[index]
        else:
            index += 1
    return tuple(kept)


def interpolate(low: Point, high: Point, global_batch_size: int) -> Point:
    """The point at `global_batch_size` on the line between two; the t-test counts twice a submission's runs for it."""

    def at(left: float, right: float) -> float:
        slope = (right - left) / (high.global_batch_size - low.global_batch_size)
        return slope * (global_batch_size - low.global_batch_size) + left

    return Point(global_batch_size, at(low.mean, high.mean), at(low.stdev, high.stdev), 2 * SUBMISSION_RUNS)


def _point(global_batch_size: int, samples: Sequence[float]) -> Point:
    return Point(global_batch_size, olympic_mean(samples), statistics.pstdev(samples), len(samples) - 2)


def _reference(
    ruleset: str, global_batch_size: int, point: Point, origin: Origin, used: tuple[Point, ...]
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
    submitted = SUBMISSION_RUNS - 2
    t = student_t_quantile(1 - SIGNIFICANCE, runs + submitted - 2)
    limit = mean - t * stdev * math.sqrt(1 / runs + 1 / submitted)
    low, high = 0.0, mean
    while high - low > BISECTION_WIDTH:
        middle = (low + high) / 2
        low, high = (low, middle) if middle > limit else (middle, high)
    return (low + high) / 2


def student_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """The `probability` quantile of Student's t distribution, for a probability of at least one half.

    By halving on the finite sums that the distribution function has for whole degrees of freedom (Abramowitz and Stegun,
    26.7.3 and 26.7.4).
    """
    low, high = 0.0, 1.0
    while (1 + _t_between(high, degrees_of_freedom)) / 2 < probability:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if (1 + _t_between(middle, degrees_of_freedom)) / 2 < probability else (low, middle)
    return high


def _t_between(t: float, degrees_of_freedom: int) -> float:
    """Probability that a t variable lies between -t and t."""
    angle = math.atan(t / math.sqrt(degrees_of_freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees_of_freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(2 + odd, degrees_of_freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def outlook(
    samples: Sequence[int | None],
    global_batch_size: int,
    ruleset: str,
    runs: int = SUBMISSION_RUNS,
    division: rules.Division = "closed",
) -> Outlook:
    """Where a set of runs stands, and what the missing ones must do.

    Args:
        samples: sequences to the target of each run so far; None for a run that did not converge.
        runs: runs of a complete set.
        division: in the open division there is no reference.

    Raises:
        ValueError: see `reference`; more runs than `runs`, or `runs` below three.
    """
    if runs < 3 or len(samples) > runs:
        raise ValueError(f"{len(samples)} runs of {runs}, expected at least 3 in a set and no more than that")
    found = reference(ruleset, global_batch_size) if division == "closed" else None
    values = [NOT_CONVERGED if count is None else float(count) for count in samples]
    mean = _mean_so_far(values)
    failed, remaining = values.count(NOT_CONVERGED), runs - len(values)
    scaling = found.scaling(mean) if found and mean else 1.0
    head = _head(values, mean, runs)
    if failed > 1:
        lost = "only one run of a set may fail to converge, so this set is no result (TR 12)"
        return Outlook(found, mean, "fail", scaling, f"{head}; {lost}.", None)
    if found is None:
        why = "none applies in the open division" if division == "open" else _above_all(ruleset, global_batch_size)
        return Outlook(None, mean, "no reference", 1.0, f"{head}; no reference convergence point: {why}.", None)
    if remaining or mean is None:
        needed = _needed(found, values, runs)
        verdict = "unfinished" if needed.to_pass else "fail"
        return Outlook(found, mean, verdict, scaling, f"{head}. {_describe_needed(found, needed)}", needed)
    return Outlook(found, mean, found.verdict(mean), scaling, f"{head}: {_describe(found, mean)}", None)


def _mean_so_far(values: Sequence[float]) -> float | None:
    converged = [value for value in values if value != NOT_CONVERGED]
    if not converged or len(values) - len(converged) > 1:
        return None
    return olympic_mean(values) if len(values) >= 3 else statistics.fmean(converged)


def _needed(found: Reference, values: list[float], runs: int) -> Needed:
    remaining = runs - len(values)
    means = _predicted_means(found, values, remaining)
    to_pass = _first_evaluation(found, values, remaining, found.minimum)
    to_stand = _first_evaluation(found, values, remaining, found.mean)
    tail = round(len(means) * (1 - PREDICTION_LEVEL) / 2)
    return Needed(
        remaining=remaining,
        to_pass=to_pass,
        to_stand=to_stand,
        cases=_cases(found, values, remaining, to_pass, to_stand),
        predicted_mean=(means[tail], means[-tail - 1]),
        pass_probability=sum(mean >= found.minimum for mean in means) / len(means),
        stand_probability=sum(mean >= found.mean for mean in means) / len(means),
    )


def _evaluation(found: Reference, index: int) -> Evaluation:
    batch = found.global_batch_size
    return Evaluation(index, Schedule(evaluation_interval(batch), batch).samples(index))


def _first_evaluation(found: Reference, values: list[float], remaining: int, bound: float) -> Evaluation | None:
    """The earliest evaluation at which all missing runs may converge for the mean to reach `bound`."""

    def reaches(index: int) -> bool:
        return olympic_mean(values + [_evaluation(found, index).samples] * remaining) >= bound

    high = 1
    while not reaches(high):
        high *= 2
        if high > MAX_EVALUATIONS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return _evaluation(found, high)


def _cases(
    found: Reference, values: list[float], remaining: int, to_pass: Evaluation | None, to_stand: Evaluation | None
) -> tuple[Case, ...]:
    """The evaluations from the last that fails to the first that stands unscaled, as far as there are such."""
    if to_pass is None:
        return ()
    first = max(1, to_pass.index - 1)
    last = min(to_stand.index if to_stand else to_pass.index, first + MAX_CASES - 1)
    cases: list[Case] = []
    for index in range(first, last + 1):
        evaluation = _evaluation(found, index)
        mean = olympic_mean(values + [evaluation.samples] * remaining)
        cases.append(Case(evaluation, mean, found.verdict(mean), found.scaling(mean)))
    return tuple(cases)


def _predicted_means(found: Reference, values: list[float], remaining: int) -> list[float]:
    """Means of the complete set in draws of the missing runs, ascending; the same input gives the same draws.

    Runs are taken as normal. Their spread is estimated from the reference's runs and those so far together, their mean
    from those so far alone, and both are drawn anew each time (the Bayesian prediction with the usual flat priors);
    before the first run the reference's mean stands in.
    """
    draw = random.Random(0)
    known = [value for value in values if value != NOT_CONVERGED]
    centre = statistics.fmean(known) if known else found.mean
    degrees_of_freedom = found.runs - 1 + max(len(known) - 1, 0)
    squares = found.stdev**2 * (found.runs - 1) + sum((value - centre) ** 2 for value in known)
    means: list[float] = []
    for _ in range(PREDICTION_DRAWS):
        stdev = math.sqrt(squares / (2 * draw.gammavariate(degrees_of_freedom / 2, 1)))
        shifted = draw.gauss(centre, stdev / math.sqrt(len(known) or found.runs))
        means.append(olympic_mean(values + [draw.gauss(shifted, stdev) for _ in range(remaining)]))
    return sorted(means)


def _head(values: list[float], mean: float | None, runs: int) -> str:
    count = f"{runs} runs" if len(values) == runs else f"{len(values)} of {runs} runs"
    failed = values.count(NOT_CONVERGED)
    if failed:
        count += f", {failed} of them not converged"
    if failed == 1:
        count += " and dropped as the slowest"
    so_far = "" if len(values) == runs else " so far"
    return count + (f", mean{so_far} {_number(mean)} samples" if mean is not None else "")


def _describe(found: Reference, mean: float) -> str:
    verdict = found.verdict(mean)
    if verdict == "pass":
        said = (
            f"at or above the reference's mean of {_number(found.mean)}; the set passes and its score stands as it is"
        )
    elif verdict == "scaled":
        said = (
            f"between the minimum of {_number(found.minimum)} and the reference's mean of {_number(found.mean)}; "
            f"the set passes and its score is multiplied by {found.scaling(mean):.6f}"
        )
    else:
        said = (
            f"{1 - mean / found.minimum:.2%} below the minimum of {_number(found.minimum)} (reference's mean "
            f"{_number(found.mean)}); the set converges faster than the reference can explain and fails"
        )
    return f"{said} ({describe_origin(found)})."


def describe_origin(found: Reference) -> str:
    """Where a reference comes from, in words."""
    if found.origin == "exact":
        return f"reference point at batch size {found.points[0]}"
    if found.origin == "interpolated":
        return f"interpolated between the reference points at batch sizes {found.points[0]} and {found.points[1]}"
    return f"no reference point at or below batch size {found.global_batch_size}: compared with {found.points[0]}"


def _describe_needed(found: Reference, needed: Needed) -> str:
    low, high = needed.predicted_mean
    scaling = f"{found.scaling(low):.4f} at most" if low < found.mean else "none"
    return (
        f"The complete set passes from a mean of {_number(found.minimum)}, and its score stands unscaled from "
        f"{_number(found.mean)} ({describe_origin(found)}). "
        f"{_condition('pass', needed.to_pass, needed.remaining)} "
        f"{_condition('stand unscaled', needed.to_stand, needed.remaining)} "
        f"Prediction ({PREDICTION_LEVEL:.0%}): mean {_number(low)} to {_number(high)}, scaling {scaling}; "
        f"it passes with a probability of {_percent(needed.pass_probability)}, "
        f"unscaled {_percent(needed.stand_probability)}."
    )


def _condition(outcome: str, evaluation: Evaluation | None, remaining: int) -> str:
    missing = "the missing run converges" if remaining == 1 else f"all {remaining} missing runs converge"
    if evaluation is None:
        return f"It can no longer {outcome}, whatever the missing {'run does' if remaining == 1 else 'runs do'}."
    if evaluation.index == 1:
        return f"It will {outcome} if {missing}, at any evaluation."
    return f"It will {outcome} if {missing} at evaluation {evaluation.index} ({_number(evaluation.samples)}) or later."


def _above_all(ruleset: str, global_batch_size: int) -> str:
    largest = points(ruleset)[-1].global_batch_size
    return f"batch size {global_batch_size} is above the largest one, {largest}; submit reference runs at it (TR 13.1)"


def _percent(probability: float) -> str:
    """No draw of a prediction is certain."""
    return "under 1%" if probability < 0.005 else "over 99%" if probability > 0.995 else f"{probability:.0%}"


def _number(samples: float) -> str:
    return f"{samples:,.0f}"
