"""Compare a set of runs with the reference convergence points (RCP), and say when the missing runs must converge.

A point has the number of samples that the reference model needs to reach the target (TR 13, 22). A set of closed runs fails
if its mean is significantly below the reference's mean. If its mean is below but not significantly, the set passes and its
score is multiplied by reference mean / own mean. The RCP checker of mlperf-logging computes the points, the interpolation
and the limit of the t-test.
"""

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from compliance.convergence.selection import FAILED, olympic_mean
from compliance.log import rules
from compliance.log.findings import shown
from compliance.log.logged_run import LoggedRun
from compliance.log.rules import SUBMISSION_RUNS
from compliance.log.schedule import EvaluationSchedule, evaluation_interval
from compliance.official.process import the_worker
from console.text import counted

Origin = Literal["exact", "interpolated", "smallest"]
Outcome = Literal["pass", "scaled", "fail", "no reference", "unfinished", "unknown"]

MAX_EVALUATIONS = 2**20


@dataclass(frozen=True)
class Reference:
    """Reference for a submission at one global batch size, in samples (sequences).

    Attributes:
        mean: mean samples. A submission with at least this mean keeps its score.
        stdev: standard deviation of single runs.
        minimum: minimum mean. A submission with a smaller mean fails.
        origin: "exact" for a point at this batch size, "interpolated" between two points, or "smallest" for a batch size
            below all points. Such a submission is compared with the point of the smallest batch size.
        points: batch sizes of the one or two points used.
    """

    ruleset: str
    global_batch_size: int
    mean: float
    stdev: float
    minimum: float
    origin: Origin
    points: tuple[int, ...]

    def scaling(self, mean: float) -> float:
        """Return the score's scaling factor for a submission with this mean, at least 1 (TR 13)."""
        return max(1.0, self.mean / mean)

    def verdict(self, mean: float) -> Literal["pass", "scaled", "fail"]:
        if mean < self.minimum:
            return "fail"
        return "scaled" if mean < self.mean else "pass"

    @property
    def description(self) -> str:
        if self.origin == "exact":
            return f"reference point at batch size {self.points[0]}"
        if self.origin == "interpolated":
            return f"interpolated between the reference points at batch sizes {self.points[0]} and {self.points[1]}"
        return f"no reference point at or below batch size {self.global_batch_size}: compared with {self.points[0]}"


def reference(ruleset: str, global_batch_size: int) -> Reference | None:
    """Return the reference for a global batch size; None if it is above the batch size of the largest reference point.

    Raises ``ValueError`` if the ruleset has no points for BERT, the batch size is not positive, or mlperf-logging is
    missing.
    """
    # The batch size may come from a log, which may contain true or 448.0 instead of an integer.
    if not rules.POSITIVE_INTEGER.accepts(global_batch_size):
        raise ValueError(f"global_batch_size is {global_batch_size}, expected a positive integer")
    answer = _ask(ruleset, global_batch_size)
    if answer["origin"] == "none":
        return None
    figures = answer["mean"], answer["stdev"], answer["minimum"]
    return Reference(ruleset, global_batch_size, *figures, answer["origin"], tuple(answer["points"]))


@lru_cache(maxsize=64)
def _ask(ruleset: str, global_batch_size: int) -> dict[str, Any]:
    rules.check_ruleset(ruleset)
    answer = the_worker().answer("reference", global_batch_size, ruleset)
    if "crash" in answer:
        raise ValueError(f"ruleset {ruleset} has no reference convergence points: {answer['crash']}")
    return answer


@dataclass(frozen=True)
class Outlook:
    """Comparison of a set of runs with the reference. Runs of the set may be missing.

    Attributes:
        reference: the reference; None in the open division and for a batch size above the largest reference point.
        mean: mean samples to the target, without the fastest and the slowest run if there are three or more runs. None
            if no run has converged, or if two or more runs did not converge.
        verdict: "fail" as soon as two runs did not converge or the missing runs can no longer help, otherwise
            "unfinished" while runs are missing. It is "unknown" if no count of sequences in a log can be trusted.
        scaling: factor by which the score would be multiplied if `mean` did not change any more.
        sentence: the comparison in words.
        note: how the sequences were counted; "" if they are epoch_num of the last evaluation, which the RCP checker reads.
        by_train_samples: whether the RCP checker has to be told to read train_samples.
    """

    reference: Reference | None
    mean: float | None
    verdict: Outcome
    scaling: float
    sentence: str
    note: str = ""
    by_train_samples: bool = False

    @property
    def applied_scaling(self) -> float:
        """Factor by which the score is multiplied: `scaling` if the verdict is "scaled", else 1."""
        return self.scaling if self.verdict == "scaled" else 1.0


def outlook_of(
    runs: Sequence[LoggedRun],
    global_batch_size: int,
    ruleset: str,
    division: rules.Division = "closed",
    *,
    failed: int = 0,
) -> Outlook:
    """Compare logged runs with the reference as `outlook` does. `failed` more runs did not converge.

    Runs in progress are left out, because they may still converge.

    The sequences come from epoch_num, or from train_samples if epoch_num does not count sequences. A count is not used
    if other records of the same log contradict it.
    """
    ended = [run for run in runs if run.is_ended]
    samples = [*(run.converged_samples() for run in ended), *[None] * failed]
    found = outlook(samples, global_batch_size, ruleset, division)
    if unknown := [run for run in ended if run.is_unknown]:
        run = unknown[0]
        why = f"{run.doubt or 'no evaluation'}; train_samples {shown(run.value('train_samples'))}"
        which = f"{counted(len(unknown), 'log')} of {len(ended)} {'has' if len(unknown) == 1 else 'have'}"
        sentence = f"convergence cannot be judged: {which} no count of sequences that can be trusted ({why})."
        return replace(found, mean=None, verdict="unknown", scaling=1.0, sentence=sentence)
    notes = []
    if doubted := [run for run in ended if run.doubt and run.converged_samples()]:
        notes.append(
            f"train_samples counts the sequences of {counted(len(doubted), 'log')}, because of {doubted[0].doubt}"
        )
    if late := [run for run in ended if run.went_on]:
        reached, last = late[0].reached or 0, len(late[0].accuracies)
        at = f"such as evaluation {reached + 1} of {last}"
        notes.append(f"in {counted(len(late), 'log')} that went on, the first evaluation at the target counts, {at}")
    note = "; ".join(notes)
    sentence = f"{found.sentence.removesuffix('.')}; {note}." if note else found.sentence
    return replace(found, sentence=sentence, note=note, by_train_samples=bool(doubted))


def outlook(
    samples: Sequence[int | None],
    global_batch_size: int,
    ruleset: str,
    division: rules.Division = "closed",
) -> Outlook:
    """Compare a set of runs with the reference, and say when the missing runs must converge.

    `samples` has the number of sequences that each of at most ten runs needed to reach the target, or None for a run that
    did not converge. The open division has no reference. Raises ``ValueError`` as `reference` does.
    """
    missing = SUBMISSION_RUNS - len(samples)
    found = reference(ruleset, global_batch_size) if division == "closed" else None
    values = [FAILED if count is None else float(count) for count in samples]
    mean = _mean_so_far(values)
    head = _head(values, mean)
    scaling = found.scaling(mean) if found and mean else 1.0
    # Two runs that did not converge fail a set in either division, with or without a reference.
    if values.count(FAILED) > 1:
        lost = "only one run of a set may fail to converge, so this set is not a result (TR 12)"
        return Outlook(found, mean, "fail", scaling, f"{head}; {lost}.")
    if found is None:
        why = "none applies in the open division"
        if division == "closed":
            largest = _ask(ruleset, global_batch_size)["largest"]
            why = f"batch size {global_batch_size} is above the largest one, {largest}; submit reference runs (TR 13.1)"
        return Outlook(None, mean, "no reference", 1.0, f"{head}; no reference convergence point: {why}.")
    basis = f"mean {found.mean:,.0f}, minimum {found.minimum:,.0f}, {found.description}"
    if not missing:
        assert mean is not None  # because at most one of the ten runs has not converged
        verdict = found.verdict(mean)
        said = {
            "pass": "the set passes, and its score stands as it is",
            "scaled": f"the set passes, and its score is multiplied by {scaling:.6f}",
            "fail": "the set converges faster than the reference can explain, and fails",
        }
        return Outlook(found, mean, verdict, scaling, f"{head}: {said[verdict]} (reference: {basis}).")
    to_pass = _first_evaluation(found, values, missing, found.minimum)
    to_stand = _first_evaluation(found, values, missing, found.mean)
    sentence = (
        f"{head} (reference: {basis}). {_condition(found, 'pass', to_pass, missing)} "
        f"{_condition(found, 'pass unscaled', to_stand, missing)}"
    )
    return Outlook(found, mean, "unfinished" if to_pass else "fail", scaling, sentence)


def _mean_so_far(values: Sequence[float]) -> float | None:
    converged = [value for value in values if value != FAILED]
    if not converged or len(values) - len(converged) > 1:
        return None
    # The Olympic mean drops two runs, so one or two runs have only a plain mean.
    return olympic_mean(values) if len(values) >= 3 else statistics.fmean(converged)


def _samples(found: Reference, evaluation: int) -> int:
    batch = found.global_batch_size
    return EvaluationSchedule(evaluation_interval(batch), batch).samples(evaluation)


def _first_evaluation(found: Reference, values: list[float], missing: int, bound: float) -> int | None:
    """Return the first evaluation for which the mean is at least `bound` if all missing runs converge there."""
    # The mean rises with the evaluation at which the missing runs converge, so bisection finds the first one. A single
    # missing run that becomes the slowest is dropped from the mean. Then the mean may never reach the bound.
    first = bisect_left(
        range(MAX_EVALUATIONS + 1),
        True,
        lo=1,
        key=lambda evaluation: olympic_mean(values + [_samples(found, evaluation)] * missing) >= bound,
    )
    return first if first <= MAX_EVALUATIONS else None


def _head(values: list[float], mean: float | None) -> str:
    is_complete = len(values) == SUBMISSION_RUNS
    count = f"{SUBMISSION_RUNS} runs" if is_complete else f"{len(values)} of {SUBMISSION_RUNS} runs"
    if failed := values.count(FAILED):
        count += f", {failed} of them not converged" + (" and dropped as the slowest" if failed == 1 else "")
    if mean is None:
        return count
    so_far = "" if is_complete else " so far"
    trimmed = " without the fastest and the slowest run" if len(values) >= 3 else ""
    return f"{count}, mean{so_far} {mean:,.0f} samples{trimmed}"


def _condition(found: Reference, outcome: str, evaluation: int | None, missing: int) -> str:
    runs = counted(missing, "missing run")
    if evaluation is None:
        return f"The set can no longer {outcome}, whatever the {runs} may do."
    verb = "converges" if missing == 1 else "converge"
    when = f"at evaluation {evaluation} ({_samples(found, evaluation):,}) or later"
    return f"The set will {outcome} if the {runs} {verb} {when}."
