"""Outlier statistics that find the slow parts of a cluster, such as ranks, hosts or links, by comparing equal parts.

Every quantity is measured in several turns. Times are compared as logarithms relative to the median of their turn, so that a
disturbance of all parts affects no part more than another. The median over all turns represents a part. A part is an outlier
if it lies further from the other parts than chance explains. Its deviation is divided by a scale that combines the error of
a repeated measurement and the differences between parts, both as median absolute deviations. The limit comes from Student's
distribution. It is such that one in ``CHANCE`` probes reports a false outlier. For example, a part that is slow by 3 % is an
outlier if the other parts agree within 0.1 %. A part that is slow by 20 % is no outlier if the other parts differ by 10 %.
If there are only two parts, neither can be judged.

The logarithm of a path's time is the sum of a share of its sending end, a share of its receiving end, and the rest, which
belongs to the path. Shares are quantiles over an end's partners. An end with a single partner cannot be distinguished from
its path. Path times also show which hosts share a leaf switch: such hosts have shorter paths to one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import squareform
from scipy.special import stdtrit

Array = NDArray[np.float64]
Integers = NDArray[np.int64] | Sequence[int]

CHANCE = 1000
"""One in this many probes reports a false outlier, if noise is normally distributed."""
LOW = 0.25
"""Quantile of an end's path times that shows its own speed, even if many partners are slow. Fast paths have fast ends."""
_STEPS = 16
"""Approximate maximum number of steps in which `judge` adds slower parts."""
FEWEST_PARTNERS = 2
"""Minimum number of measured partners of a rank. With fewer, a slow path is not attributed to the rank itself."""
_TO_SIGMA = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""
_MEDIAN_ERROR = 1.2533
"""Ratio of a median's standard error to a mean's standard error: sqrt(pi / 2)."""
_OWN_MEDIAN = 1.4
"""Deviations from a median of few turns are too small. A factor turns / (turns - this number), found by simulation, corrects
them."""
_EFFICIENCY = 0.37
"""Statistical efficiency of a median absolute deviation, relative to a standard deviation."""
_FAR = 1e6
"""Distance that is assumed for a pair of hosts without a measurement."""
_LARGEST = 2048
"""Maximum number of hosts for which leaves are found. The distance matrix grows with the square of this number."""
_CLEAR = 6.0
"""Number of robust standard deviations that must separate the paths within leaves from the paths between leaves."""
_SMALL_SAMPLE = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
"""Correction factors for the median absolute deviation of small samples (Croux and Rousseeuw, 1992)."""


@dataclass(frozen=True)
class Judgement:
    """Time of each part relative to the median part, its distance in standard deviations, and the verdict."""

    ratios: Array
    deviations: Array
    is_outlier: NDArray[np.bool_]


def judge(
    times_TP: Array, comparisons: int, chance: int = CHANCE, fitted: int = 1, fewest: int | None = None
) -> Judgement:
    """Compare parts P by the logarithms of their times in turns T, of which there are at least three.

    One in ``chance`` probes of ``comparisons`` comparisons each reports a false outlier. ``fitted`` is the number of
    parameters that were fitted to the times. It matters because fitting makes the residuals smaller.

    Several outliers among few parts widen the scale and hide each other. With ``fewest``, compare first only the ``fewest``
    fastest parts, then more, until one of them is an outlier. Then judge all parts by the scale of these fastest parts.
    """
    parts = times_TP.shape[1]
    order_P = np.argsort(np.median(times_TP - np.median(times_TP, axis=1, keepdims=True), axis=0))
    for count in (*range(fewest or parts, parts, max(1, parts // _STEPS)), parts):
        judgement = _compare(times_TP, order_P[:count], comparisons, chance, fitted)
        if judgement.is_outlier[order_P[:count]].any():
            break
    return judgement


def _compare(times_TP: Array, fastest: NDArray[np.int64], comparisons: int, chance: int, fitted: int) -> Judgement:
    turns, parts = len(times_TP), len(fastest)
    centred_TP = times_TP - np.median(times_TP[:, fastest], axis=1, keepdims=True)
    excess_P = np.median(centred_TP, axis=0)
    excess_P = excess_P - np.median(excess_P[fastest])
    rest_TP = np.abs(centred_TP - np.median(centred_TP, axis=0))
    free = max(1, parts - fitted)
    residual = np.sqrt((parts - 1) / free)
    few = _TO_SIGMA * _MEDIAN_ERROR * residual * turns / (turns - _OWN_MEDIAN)
    # A part has only a few times, which may agree by chance, so assume at least the typical error of all parts.
    repeated_P = few * np.maximum(np.median(rest_TP, axis=0), np.median(rest_TP[:, fastest])) / np.sqrt(turns)
    small_sample = _SMALL_SAMPLE.get(parts) or parts / (parts - 0.8)
    between = _TO_SIGMA * small_sample * np.median(np.abs(excess_P[fastest])) * residual
    # This is the variance between parts that the measurement error does not explain.
    beyond_P = np.maximum(0.0, between**2 - repeated_P**2)
    scale_P = np.sqrt(repeated_P**2 + beyond_P)
    repeats = max(1, _EFFICIENCY * free * (turns - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        # These are the degrees of freedom of a sum of two variances (Welch-Satterthwaite). They are NaN if both are 0.
        freedom_P = scale_P**4 / (repeated_P**4 / repeats + beyond_P**2 / free)
        deviations_P = np.where(excess_P == 0, 0.0, excess_P / scale_P)
    # The test is one-sided, and the chance is divided by the number of comparisons (Bonferroni).
    limit_P = -stdtrit(np.fmax(1.0, freedom_P), 1 / (chance * comparisons)) if parts > 2 else np.inf
    # If all other parts have equal times, the clock's last digit could make an outlier. So require an excess of 0.1 %.
    is_outlier = (deviations_P > limit_P) & (excess_P > 1e-3)
    return Judgement(np.exp(excess_P), np.clip(deviations_P, -1e6, 1e6), is_outlier)


@dataclass(frozen=True)
class PathTimes:
    """Logarithms of path times by turn T, decomposed into shares of ends N, rests of paths E, and levels of components K.

    A component is a set of ends that paths connect with one another, such as a rail. ``component_N`` is the component of
    each end.
    """

    sending_TN: Array
    receiving_TN: Array
    rest_TE: Array
    level_TK: Array
    component_N: NDArray[np.int64]


def take_apart(
    times_TE: Array,
    source_E: Integers,
    target_E: Integers,
    nodes: int,
    kind_E: Integers | None = None,
    quantile: float = 0.5,
) -> PathTimes:
    """Decompose the logarithms of path times into shares of the ends N and a rest for each path E, by turn T.

    Only paths of the same ``kind_E`` are compared, such as paths under one leaf switch. Each share is a ``quantile`` of
    the times of an end's paths. `LOW` finds slow ends even if many of their partners are slow.
    """
    source_E, target_E = np.asarray(source_E), np.asarray(target_E)
    kinds_E = np.zeros(len(source_E), int) if kind_E is None else np.asarray(kind_E)
    rest_TE = times_TE - _quantiles(times_TE, kinds_E, kinds_E.max() + 1, quantile)[:, kinds_E]
    # Ends are comparable only if a chain of paths joins them.
    joined = coo_matrix((np.ones(len(source_E)), (source_E, target_E)), shape=(nodes, nodes))
    components, component_N = connected_components(joined, directed=False)
    level_TK = _quantiles(rest_TE, component_N[source_E], components, quantile)
    rest_TE -= level_TK[:, component_N[source_E]]
    sending_TN, receiving_TN = (_quantiles(rest_TE, of_E, nodes, quantile) for of_E in (source_E, target_E))
    for share_TN, of_E in ((sending_TN, source_E), (receiving_TN, target_E)):
        share_TN[:, np.bincount(of_E, minlength=nodes) < FEWEST_PARTNERS] = 0.0
    rest_TE -= sending_TN[:, source_E] + receiving_TN[:, target_E]
    return PathTimes(sending_TN, receiving_TN, rest_TE, level_TK, component_N)


def _quantiles(times_TE: Array, group_E: NDArray[np.integer], groups: int, quantile: float) -> Array:
    """Return a quantile of each group in each turn, or NaN for an empty group."""
    order_E, count_G = np.argsort(group_E, kind="stable"), np.bincount(group_E, minlength=groups)
    column_E = np.arange(len(group_E)) - np.repeat(np.cumsum(count_G) - count_G, count_G)
    members_TGM = np.full((len(times_TE), groups, count_G.max()), np.nan)
    members_TGM[:, group_E[order_E], column_E] = times_TE[:, order_E]
    members_TGM.sort(axis=2)  # NaN sorts last
    return members_TGM[:, np.arange(groups), (np.maximum(0, count_G - 1) * quantile).astype(int)]


def leaves_of(times_TE: Array, one_E: NDArray[np.int64], other_E: NDArray[np.int64], hosts: int) -> list[int] | None:
    """Return the leaf switch of each host, numbered from 0 in host order, or None if the paths do not separate leaves.

    ``times_TE`` has the logarithms of path times between hosts, by turn, without the shares of the path ends.

    Hosts are joined by their shortest measured paths first (single linkage), which needs only some of the pairs. The widest
    gap between the lengths at which groups join separates the leaves. The leaves are accepted only if the lower quartile of
    paths between groups exceeds the upper quartile of paths within groups by `_CLEAR` times the measurement error.
    """
    if hosts > _LARGEST:
        return None
    # Average the paths of each pair of hosts over both directions and all rails.
    pairs, place_E = np.unique(
        np.stack([np.minimum(one_E, other_E), np.maximum(one_E, other_E)]), axis=1, return_inverse=True
    )
    place_E = np.ravel(place_E)
    times_TP = np.stack([np.bincount(place_E, turn) / np.bincount(place_E) for turn in times_TE])
    length_P = np.median(times_TP, axis=0)
    noise = _TO_SIGMA * _MEDIAN_ERROR * float(np.median(np.abs(times_TP - length_P))) / np.sqrt(len(times_TP))
    distance = np.full((hosts, hosts), _FAR)
    distance[pairs[0], pairs[1]] = distance[pairs[1], pairs[0]] = length_P - length_P.min()
    np.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), "single")
    heights = tree[:, 2]
    gaps = np.diff(heights)
    if not len(gaps) or heights[-1] >= _FAR:  # the measured pairs do not join all hosts
        return None
    cut = int(np.argmax(gaps))
    found = fcluster(tree, (heights[cut] + heights[cut + 1]) / 2, "distance")
    # A group of one host is probably a slow host and not a leaf.
    if len(set(found)) < 2 or np.bincount(found)[1:].min() < 2:
        return None
    is_within = found[pairs[0]] == found[pairs[1]]
    within, between = length_P[is_within], length_P[~is_within]
    if np.quantile(between, 0.25) - np.quantile(within, 0.75) < _CLEAR * noise:
        return None
    # Renumber the leaves, because SciPy's labels depend on the order in which groups were joined.
    order: dict[int, int] = {}
    return [order.setdefault(int(leaf), len(order)) for leaf in found]
