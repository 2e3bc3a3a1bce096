"""Slow parts of a cluster, found by comparing its parts with one another.

Every quantity is measured several times in turns, so that what disturbs all parts at a time disturbs none more than
others. Times are compared as logarithms, each with the median of its turn. Of a part counts the median of its turns; it
is an outlier when it lies further from the other parts than chance explains. The scale is made of two: what measuring the
same part again differs by, and what the parts differ by beyond that, both as median absolute deviations. How far is too
far comes from Student's distribution with the degrees of freedom of both, for one wrong name in `CHANCE` probes over all
that is compared. So nothing is a fixed threshold: what is slow by 3 % is named where parts agree within 0.1 %, and what is
slow by 20 % is not where they differ by 10 %. Two parts cannot be judged by one another, and of three only gross faults
are seen.

The time of a path is taken apart into the sending end's share, the receiving end's share, and the rest, by medians over
the partners: that tells a slow network card from a slow path. An end with fewer than three partners is not told from its
paths.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from scipy.special import stdtrit

Array = NDArray[np.float64]
Integers = NDArray[np.int64] | Sequence[int]

CHANCE = 1000
"""One probe in so many names something that is not slow, if noise is as bell-shaped as the test takes it to be."""

# Of two turns nothing tells which one was disturbed.
_FEWEST_TURNS = 3
FEWEST_PARTNERS = 3
"""Of an end whose share is told from its paths."""
_TO_SIGMA = 1.4826
"""Standard deviations in a median absolute deviation of the normal distribution."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean: the root of pi / 2."""
_OWN_MEDIAN = 1.4
"""Deviations from the median of few turns are too small on the average: as if this many were missing (simulated)."""
_EFFICIENCY = 0.37
"""Of a median absolute deviation: so much of a sample would do for a standard deviation of the same accuracy."""
_SMALL_SAMPLE = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
"""By which a median absolute deviation of few values is too small (Croux and Rousseeuw, 1992)."""


@dataclass(frozen=True)
class Judgement:
    """Comparison of parts, in their order."""

    excess: Array
    """Logarithm of a part's time over the median of all."""
    deviations: Array
    is_outlier: NDArray[np.bool_]

    @property
    def ratios(self) -> Array:
        """Time of each part over the median of all."""
        return np.exp(self.excess)


def judge(times_TP: Array, comparisons: int, chance: int = CHANCE, fitted: int = 1) -> Judgement:
    """Compare parts P by logarithms of times of turns T, NaN where there is none.

    Args:
        comparisons: all that are made together, of which one in ``chance`` may name something wrongly.
        fitted: numbers that were fitted to the parts before, which makes what is left of them smaller than it was.
    """
    turns, parts = times_TP.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a part without any time
        # By turn: a disturbance of the whole machine moves all parts of a turn alike and drops out.
        centred_TP = times_TP - np.nanmedian(times_TP, axis=1, keepdims=True)
        excess_P = np.nanmedian(centred_TP, axis=0)
        # Once more: medians of medians need not be 0.
        excess_P = excess_P - np.nanmedian(excess_P)
        # Around each part's own median: a part that is slow in every turn repeats well.
        rest_TP = np.abs(centred_TP - np.nanmedian(centred_TP, axis=0))
        taken_P = np.maximum(1, np.isfinite(times_TP).sum(axis=0))
        # A turn's deviation from the median of its own few turns is too small on the average.
        # Numbers that were fitted before took as many degrees of freedom out of what is left.
        free = max(1, parts - fitted)
        few = (
            _TO_SIGMA
            * turns
            / (turns - _OWN_MEDIAN if turns > 2 else 1)
            * _MEDIAN_ERROR
            * np.sqrt(max(1, parts - 1) / free)
        )
        own_P = few * np.nanmedian(rest_TP, axis=0) / np.sqrt(taken_P)
        # A part's own few turns may agree by luck: it is never taken to repeat better than the typical part.
        repeated_P = np.maximum(own_P, few * np.nanmedian(rest_TP) / np.sqrt(taken_P))
        between = _TO_SIGMA * _small_sample(parts) * np.nanmedian(np.abs(excess_P)) * np.sqrt(max(1, parts - 1) / free)
    # What parts differ by holds the error of measuring them: beyond that they differ by this much.
    # The difference is negative by chance where parts differ by less than the error of measuring them.
    beyond_P = np.maximum(0.0, between**2 - repeated_P**2)
    scale_P = np.sqrt(repeated_P**2 + beyond_P)
    # Welch's formula: two variances known by unlike numbers of values make no plain Student's distribution.
    freedom_P = _freedom(repeated_P**2, _EFFICIENCY * free * (turns - 1), beyond_P, free)
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations_P = np.where(excess_P == 0, 0.0, excess_P / scale_P)
    # Two parts cannot be told apart, nor two turns judged.
    enough = turns >= _FEWEST_TURNS and parts > 2
    # One-sided, since only slow parts are looked for, and divided by all comparisons (Bonferroni).
    limit_P = -stdtrit(np.maximum(1.0, freedom_P), 1 / (chance * max(1, comparisons))) if enough else np.inf
    # A tie of all others would make anything an outlier, such as a clock's last digit.
    is_outlier = (deviations_P > limit_P) & (excess_P > 1e-3)
    # JSON and sorting need finite numbers.
    return Judgement(np.nan_to_num(excess_P), np.nan_to_num(deviations_P, posinf=1e6, neginf=-1e6), is_outlier)


def _freedom(one_P: Array, of_one: float, other_P: Array, of_other: float) -> Array:
    """Degrees of freedom of a sum of two variances (Welch and Satterthwaite)."""
    # 0 / 0 where nothing scatters at all; one degree of freedom is the most careful answer then.
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom_P = (one_P + other_P) ** 2 / (one_P**2 / max(1, of_one) + other_P**2 / max(1, of_other))
    return np.nan_to_num(freedom_P, nan=1.0)


def _small_sample(number: int) -> float:
    # Beyond nine values the correction is n / (n - 0.8) (Croux and Rousseeuw).
    return _SMALL_SAMPLE.get(number, number / (number - 0.8) if number > 1 else 1.0)


@dataclass(frozen=True)
class PathTimes:
    """Times of paths, taken apart: logarithms, by turns T. Parts K of the network are those that no path joins."""

    sending_TN: Array
    receiving_TN: Array
    rest_TE: Array
    level_TK: Array
    part_N: NDArray[np.int64]
    """The part that each end is in: of its rail, or its host."""


def take_apart(
    times_TE: Array, source_E: Integers, target_E: Integers, nodes: int, kind_E: Integers | None = None
) -> PathTimes:
    """Take logarithms of times of paths E apart into shares of their ends N and rests, by turns T.

    Paths of one ``kind_E`` are compared among themselves: those under one leaf switch, and those through several. Ends are
    compared with those that paths join them to; what such a part of the network has in common is its level. The fit is one
    of medians (Tukey's median polish), so that a single slow path moves no end, nor a slow end the others.
    """
    rest_TE, source_E, target_E = times_TE.copy(), np.asarray(source_E), np.asarray(target_E)
    kinds_E = np.zeros(times_TE.shape[1]) if kind_E is None else np.asarray(kind_E)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for kind in np.unique(kinds_E):
            # Kinds differ by the network's structure, not by faults: each has its own zero.
            rest_TE[:, kinds_E == kind] -= np.nanmedian(rest_TE[:, kinds_E == kind], axis=1, keepdims=True)
        # An undirected graph: ends are comparable only where some chain of paths joins them.
        joined = coo_matrix((np.ones(len(source_E)), (source_E, target_E)), shape=(nodes, nodes))
        parts, part_N = connected_components(joined, directed=False)
        members = [part_N == part for part in range(parts)]
        level_TK = np.stack([np.nanmedian(rest_TE[:, inside[source_E]], axis=1) for inside in members], axis=1)
        rest_TE -= level_TK[:, part_N[source_E]]
        ends = [_partners(source_E, nodes), _partners(target_E, nodes)]
        shares = [np.zeros((len(rest_TE), nodes)) for _ in ends]
        # Median polish takes a few rounds to settle.
        for _ in range(8):
            for share_TN, paths_NK, of_E in zip(shares, ends, (source_E, target_E), strict=True):
                # A column of NaN for places that no path fills: nanmedian passes over them.
                padded = np.concatenate([rest_TE, np.full((len(rest_TE), 1), np.nan)], axis=1)
                step_TN = np.nan_to_num(np.nanmedian(padded[:, paths_NK], axis=2))
                # Too few paths to tell an end from them: its share stays with these.
                step_TN[:, (paths_NK < rest_TE.shape[1]).sum(axis=1) < FEWEST_PARTNERS] = 0.0
                # What all ends of a part have in common is its level, which no end is to take.
                for inside in members:
                    step_TN[:, inside] -= np.median(step_TN[:, inside], axis=1, keepdims=True)
                share_TN += step_TN
                rest_TE = rest_TE - step_TN[:, np.asarray(of_E)]
    return PathTimes(shares[0], shares[1], rest_TE, level_TK, part_N)


def _partners(end_E: Integers, nodes: int) -> NDArray[np.int64]:
    """The paths at each node, as rows of the same length: filled up with the number of paths, which is none's."""
    order = np.argsort(end_E, kind="stable")
    counts = np.bincount(end_E, minlength=nodes)
    rows = np.full((nodes, max(1, counts.max(initial=0))), len(order))
    column = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows[np.asarray(end_E, dtype=np.int64)[order], column] = order
    return rows
