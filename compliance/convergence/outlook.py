"""Compare a set of runs with the reference points, and say when the missing runs must converge (TR 13, 22)."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compliance.convergence.reference_points import Reference, largest_batch_size, reference
from compliance.convergence.selection import olympic_mean
from compliance.log import rules
from compliance.log.rules import SUBMISSION_RUNS
from compliance.log.schedule import evaluation_interval, evaluation_samples

Outcome = Literal["pass", "scaled", "fail", "no reference", "unfinished"]

# Infinity sorts as the slowest run, which the Olympic mean drops. A second such run makes the mean infinite.
NOT_CONVERGED = math.inf

MAX_EVALUATIONS = 2**20


@dataclass(frozen=True)
class Outlook:
    """The standing of a set of runs.

    Attributes:
        reference: the reference; None in the open division and above the largest reference point.
        mean: mean samples to the target. From three runs on, the fastest and the slowest run are excluded. None before the
            first run has converged.
        verdict: "fail" as soon as two runs did not converge or the missing runs can no longer help, otherwise
            "unfinished" while runs are missing.
        scaling: factor of the score, if `mean` were final.
        sentence: the standing in words.
    """

    reference: Reference | None
    mean: float | None
    verdict: Outcome
    scaling: float
    sentence: str


def outlook(
    samples: Sequence[int | None],
    global_batch_size: int,
    ruleset: str,
    division: rules.Division = "closed",
) -> Outlook:
    """Compare a set of runs with the reference, and say when the missing runs must converge.

    Args:
        samples: number of sequences to the target of each run so far; None for a run that did not converge.
        division: in the open division there is no reference.

    Raises:
        ValueError: `reference` raises it, or there are more runs than a set has.
    """
    missing = SUBMISSION_RUNS - len(samples)
    if missing < 0:
        raise ValueError(f"{len(samples)} runs, expected at most {SUBMISSION_RUNS}")
    found = reference(ruleset, global_batch_size) if division == "closed" else None
    values = [NOT_CONVERGED if count is None else float(count) for count in samples]
    mean = _mean_so_far(values)
    head = _head(values, mean)
    scaling = found.scaling(mean) if found and mean else 1.0
    # Two runs that did not converge fail a set in either division, with or without a reference.
    if values.count(NOT_CONVERGED) > 1:
        lost = "only one run of a set may fail to converge, so this set is not a result (TR 12)"
        return Outlook(found, mean, "fail", scaling, f"{head}; {lost}.")
    if found is None:
        why = "none applies in the open division"
        if division == "closed":
            largest = largest_batch_size(ruleset)
            why = f"batch size {global_batch_size} is above the largest one, {largest}; submit reference runs (TR 13.1)"
        return Outlook(None, mean, "no reference", 1.0, f"{head}; no reference convergence point: {why}.")
    if not missing:
        assert mean is not None  # at most one run has not converged, out of three or more
        return Outlook(found, mean, found.verdict(mean), scaling, f"{head}: {_describe(found, mean)}")
    to_pass = _first_evaluation(found, values, missing, found.minimum)
    to_stand = _first_evaluation(found, values, missing, found.mean)
    sentence = (
        f"{head}. The complete set passes from a mean of {found.minimum:,.0f}, and its score stands unscaled from "
        f"{found.mean:,.0f} ({found.description}). {_condition(found, 'pass', to_pass, missing)} "
        f"{_condition(found, 'stand unscaled', to_stand, missing)}"
    )
    verdict = "unfinished" if to_pass else "fail"
    return Outlook(found, mean, verdict, scaling, sentence)


def _mean_so_far(values: Sequence[float]) -> float | None:
    converged = [value for value in values if value != NOT_CONVERGED]
    if not converged or len(values) - len(converged) > 1:
        return None
    # With one or two runs, no run can be dropped yet.
    return olympic_mean(values) if len(values) >= 3 else statistics.fmean(converged)


def _samples(found: Reference, evaluation: int) -> int:
    batch = found.global_batch_size
    return evaluation_samples(evaluation, evaluation_interval(batch), batch)


def _first_evaluation(found: Reference, values: list[float], missing: int, bound: float) -> int | None:
    """Return the earliest evaluation at which all missing runs may converge for the mean to reach `bound`."""
    # The mean rises with the index. If only one run is missing and is the slowest, it is dropped, so possibly no evaluation
    # reaches the bound.
    first = bisect_left(
        range(MAX_EVALUATIONS + 1),
        True,
        lo=1,
        key=lambda evaluation: olympic_mean(values + [_samples(found, evaluation)] * missing) >= bound,
    )
    return first if first <= MAX_EVALUATIONS else None


# In words


def _head(values: list[float], mean: float | None) -> str:
    is_complete = len(values) == SUBMISSION_RUNS
    count = f"{SUBMISSION_RUNS} runs" if is_complete else f"{len(values)} of {SUBMISSION_RUNS} runs"
    if failed := values.count(NOT_CONVERGED):
        count += f", {failed} of them not converged" + (" and dropped as the slowest" if failed == 1 else "")
    if mean is None:
        return count
    so_far = "" if is_complete else " so far"
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
    return f"{said} ({found.description})."


def _condition(found: Reference, outcome: str, evaluation: int | None, missing: int) -> str:
    runs = "the missing run converges" if missing == 1 else f"all {missing} missing runs converge"
    if evaluation is None:
        return f"It can no longer {outcome}, whatever the missing {'run does' if missing == 1 else 'runs do'}."
    if evaluation == 1:
        return f"It will {outcome} if {runs}, at any evaluation."
    return f"It will {outcome} if {runs} at evaluation {evaluation} ({_samples(found, evaluation):,}) or later."
