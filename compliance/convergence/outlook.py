"""Tell where a set of closed runs stands against the reference points, and what the missing runs must do (TR 13, 22).

A complete set has an outcome; of an unfinished one this says from which evaluation on the missing runs may converge, and
predicts the mean from the runs so far and the reference's spread.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compliance.convergence.reference_points import Reference, describe_origin, points, reference
from compliance.convergence.selection import olympic_mean
from compliance.log import rules
from compliance.log.rules import SUBMISSION_RUNS
from compliance.log.schedule import EvaluationSchedule, evaluation_interval

Outcome = Literal["pass", "scaled", "fail", "no reference", "unfinished"]

# Sorts as the slowest, which the Olympic mean drops; a second one makes that mean infinite.
NOT_CONVERGED = math.inf

PREDICTION_LEVEL = 0.9
PREDICTION_DRAWS = 2000
MAX_EVALUATIONS = 2**20
MAX_CASES = 12


@dataclass(frozen=True)
class EvaluationPoint:
    """A place on the evaluation schedule: its number, from 1, and the sequences trained by then."""

    index: int
    samples: int


@dataclass(frozen=True)
class CompleteSet:
    """The complete set, if all missing runs converged at one evaluation: its mean in samples, its score's factor."""

    evaluation: EvaluationPoint
    mean: float
    verdict: Literal["pass", "scaled", "fail"]
    scaling: float


@dataclass(frozen=True)
class Needed:
    """The demands on the missing runs of an unfinished set.

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
    to_pass: EvaluationPoint | None
    to_stand: EvaluationPoint | None
    cases: tuple[CompleteSet, ...]
    predicted_mean: tuple[float, float]
    pass_probability: float
    stand_probability: float


@dataclass(frozen=True)
class Outlook:
    """The standing of a set of runs.

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


def outlook(
    samples: Sequence[int | None],
    global_batch_size: int,
    ruleset: str,
    runs: int = SUBMISSION_RUNS,
    division: rules.Division = "closed",
) -> Outlook:
    """Tell where a set of runs stands, and what the missing ones must do.

    Args:
        samples: sequences to the target of each run so far; None for a run that did not converge.
        runs: runs of a complete set.
        division: in the open division there is no reference.

    Raises:
        ValueError: see `reference`; more runs than `runs`, or `runs` below three.
    """
    # The Olympic mean drops two runs, and of fewer than three nothing would be left.
    if runs < 3 or len(samples) > runs:
        raise ValueError(
            f"{len(samples)} of {runs} runs, expected a set of at least 3 runs and no more than the set has"
        )
    found = reference(ruleset, global_batch_size) if division == "closed" else None
    values = [NOT_CONVERGED if count is None else float(count) for count in samples]
    mean = _mean_so_far(values)
    failed, remaining = values.count(NOT_CONVERGED), runs - len(values)
    scaling = found.scaling(mean) if found and mean else 1.0
    head = _head(values, mean, runs)
    # Asked first: this ends a set in either division, with or without a reference.
    if failed > 1:
        lost = "only one run of a set may fail to converge, so this set is no result (TR 12)"
        return Outlook(found, mean, "fail", scaling, f"{head}; {lost}.", None)
    if found is None:
        why = "none applies in the open division" if division == "open" else _above_all(ruleset, global_batch_size)
        return Outlook(None, mean, "no reference", 1.0, f"{head}; no reference convergence point: {why}.", None)
    if remaining:
        needed = _needed(found, values, runs)
        verdict = "unfinished" if needed.to_pass else "fail"
        return Outlook(found, mean, verdict, scaling, f"{head}. {_describe_needed(found, needed)}", needed)
    assert mean is not None  # of three runs or more, all but one have converged
    return Outlook(found, mean, found.verdict(mean), scaling, f"{head}: {_describe(found, mean)}", None)


def _mean_so_far(values: Sequence[float]) -> float | None:
    converged = [value for value in values if value != NOT_CONVERGED]
    if not converged or len(values) - len(converged) > 1:
        return None
    # Of one or two runs nothing can be dropped yet.
    return olympic_mean(values) if len(values) >= 3 else statistics.fmean(converged)


def _needed(found: Reference, values: list[float], runs: int) -> Needed:
    remaining = runs - len(values)
    means = _predicted_means(found, values, remaining)
    to_pass = _first_evaluation(found, values, remaining, found.minimum)
    to_stand = _first_evaluation(found, values, remaining, found.mean)
    tail = round(len(means) * (1 - PREDICTION_LEVEL) / 2)  # draws cut off at either end of the sorted ones
    return Needed(
        remaining=remaining,
        to_pass=to_pass,
        to_stand=to_stand,
        cases=_cases(found, values, remaining, to_pass, to_stand),
        predicted_mean=(means[tail], means[-tail - 1]),
        pass_probability=sum(mean >= found.minimum for mean in means) / len(means),
        stand_probability=sum(mean >= found.mean for mean in means) / len(means),
    )


def _evaluation(found: Reference, index: int) -> EvaluationPoint:
    batch = found.global_batch_size
    # A run can only converge where it evaluates, so what the missing ones must do is said in evaluations.
    return EvaluationPoint(index, EvaluationSchedule(evaluation_interval(batch), batch).samples(index))


def _first_evaluation(found: Reference, values: list[float], remaining: int, bound: float) -> EvaluationPoint | None:
    """The earliest evaluation at which all missing runs may converge for the mean to reach `bound`."""

    def reaches(index: int) -> bool:
        return olympic_mean(values + [_evaluation(found, index).samples] * remaining) >= bound

    # The mean rises with the index. Where one run is missing, a slow one is dropped as the slowest: then no evaluation may
    # ever reach the bound.
    first = bisect_left(range(MAX_EVALUATIONS + 1), True, lo=1, key=reaches)
    return _evaluation(found, first) if first <= MAX_EVALUATIONS else None


def _cases(
    found: Reference,
    values: list[float],
    remaining: int,
    to_pass: EvaluationPoint | None,
    to_stand: EvaluationPoint | None,
) -> tuple[CompleteSet, ...]:
    """The evaluations from the last that fails to the first that stands unscaled, as far as there are such."""
    if to_pass is None:
        return ()
    first = max(1, to_pass.index - 1)  # one that fails, for contrast
    last = min(to_stand.index if to_stand else to_pass.index, first + MAX_CASES - 1)
    cases: list[CompleteSet] = []
    for index in range(first, last + 1):
        evaluation = _evaluation(found, index)
        mean = olympic_mean(values + [evaluation.samples] * remaining)
        cases.append(CompleteSet(evaluation, mean, found.verdict(mean), found.scaling(mean)))
    return tuple(cases)


def _predicted_means(found: Reference, values: list[float], remaining: int) -> list[float]:
    """Means of the complete set in draws of the missing runs, ascending; the same input gives the same draws.

    Runs are taken as normal. Their spread is estimated from the reference's runs and those so far together, their mean
    from those so far alone, and both are drawn anew each time (the Bayesian prediction with the usual flat priors);
    before the first run the reference's mean stands in.
    """
    # Always the same draws: asked again about the same logs, the answer does not change.
    draw = random.Random(0)
    known = [value for value in values if value != NOT_CONVERGED]
    centre = statistics.fmean(known) if known else found.mean
    degrees_of_freedom = found.runs - 1 + max(len(known) - 1, 0)
    # Spread around the means of either side, pooled.
    squares = found.stdev**2 * (found.runs - 1) + sum((value - centre) ** 2 for value in known)
    means: list[float] = []
    for _ in range(PREDICTION_DRAWS):
        # The variance is the squares over a draw of chi-squared, which is twice a draw of gamma with half the degrees
        # of freedom; the mean is then normal around what was seen, and so is each missing run around the mean.
        stdev = math.sqrt(squares / (2 * draw.gammavariate(degrees_of_freedom / 2, 1)))
        # The fewer runs have been seen, the less is known of the mean around which the missing ones are drawn.
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
    if mean is None:
        return count
    so_far = "" if len(values) == runs else " so far"
    trimmed = " without the fastest and the slowest run" if len(values) >= 3 else ""
    return f"{count}, mean{so_far} {mean:,.0f} samples{trimmed}"


def _describe(found: Reference, mean: float) -> str:
    verdict = found.verdict(mean)
    if verdict == "pass":
        said = f"at or above the reference's mean of {found.mean:,.0f}; the set passes and its score stands as it is"
    elif verdict == "scaled":
        said = (
            f"between the minimum of {found.minimum:,.0f} and the reference's mean of {found.mean:,.0f}; "
            f"the set passes and its score is multiplied by {found.scaling(mean):.6f}"
        )
    else:
        said = (
            f"{1 - mean / found.minimum:.2%} below the minimum of {found.minimum:,.0f} (reference's mean "
            f"{found.mean:,.0f}); the set converges faster than the reference can explain and fails"
        )
    return f"{said} ({describe_origin(found)})."


def _describe_needed(found: Reference, needed: Needed) -> str:
    low, high = needed.predicted_mean
    # The lowest mean has the largest factor.
    scaling = f"{found.scaling(low):.4f} at most" if low < found.mean else "none"
    return (
        f"The complete set passes from a mean of {found.minimum:,.0f}, and its score stands unscaled from "
        f"{found.mean:,.0f} ({describe_origin(found)}). "
        f"{_condition('pass', needed.to_pass, needed.remaining)} "
        f"{_condition('stand unscaled', needed.to_stand, needed.remaining)} "
        f"Prediction ({PREDICTION_LEVEL:.0%}): mean {low:,.0f} to {high:,.0f}, scaling {scaling}; "
        f"it passes with a probability of {_percent(needed.pass_probability)}, "
        f"unscaled {_percent(needed.stand_probability)}."
    )


def _condition(outcome: str, evaluation: EvaluationPoint | None, remaining: int) -> str:
    missing = "the missing run converges" if remaining == 1 else f"all {remaining} missing runs converge"
    if evaluation is None:
        return f"It can no longer {outcome}, whatever the missing {'run does' if remaining == 1 else 'runs do'}."
    if evaluation.index == 1:
        return f"It will {outcome} if {missing}, at any evaluation."
    return f"It will {outcome} if {missing} at evaluation {evaluation.index} ({evaluation.samples:,.0f}) or later."


def _above_all(ruleset: str, global_batch_size: int) -> str:
    largest = points(ruleset)[-1].global_batch_size
    return f"batch size {global_batch_size} is above the largest one, {largest}; submit reference runs at it (TR 13.1)"


def _percent(probability: float) -> str:
    """Percentage in words; no draw of a prediction is certain."""
    return "under 1%" if probability < 0.005 else "over 99%" if probability > 0.995 else f"{probability:.0%}"
