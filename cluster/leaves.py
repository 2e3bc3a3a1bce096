"""Leaf switches, told from measurements where no file tells them: hosts whose paths to one another are shorter.

Hosts are joined by their shortest measured paths first (single linkage), which needs only some of the pairs; the widest
gap in the lengths at which groups join is where leaves end. That there are leaves at all is believed only when paths
between groups are longer than those within by more than measuring the same path again differs by, for the middle half of
either kind.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

Array = NDArray[np.float64]

_FAR = 1e6
"""Distance of pairs that were not measured."""
_LARGEST = 2048
"""Hosts among which leaves are looked for: the matrix of distances has the square of it."""
_CLEAR = 6.0
"""Robust deviations that lie between the two kinds of paths."""


def leaves_of(times_TE: Array, one_E: NDArray[np.int64], other_E: NDArray[np.int64], hosts: int) -> list[int] | None:
    """The leaf of each host, numbered from 0 in the order of hosts; None where paths do not tell leaves apart.

    Args:
        times_TE: logarithms of times of paths between hosts, less the shares of their ends, by turns.
    """
    # With fewer than four hosts there are no two leaves of two; above the limit the matrix does not fit.
    if not 4 <= hosts <= _LARGEST or not times_TE.size:
        return None
    # A pair's path is the mean of both directions, and of all rails.
    pairs, place_E = np.unique(
        np.stack([np.minimum(one_E, other_E), np.maximum(one_E, other_E)]), axis=1, return_inverse=True
    )
    place_E = np.ravel(place_E)
    times_TP = np.stack([np.bincount(place_E, turn) / np.bincount(place_E) for turn in times_TE])
    # By turns first: the spread over turns is the noise that leaves must stand out from.
    length_P = np.median(times_TP, axis=0)
    # Standard error of a median over turns, from median absolute deviations: constants as in cluster/outliers.py.
    noise = 1.4826 * 1.2533 * float(np.median(np.abs(times_TP - length_P))) / np.sqrt(len(times_TP))
    # Pairs that were not measured join last, so that they tell nothing of leaves.
    distance = np.full((hosts, hosts), _FAR)
    # Linkage needs distances, and logarithms may be negative: the shortest path is 0.
    distance[pairs[0], pairs[1]] = distance[pairs[1], pairs[0]] = length_P - length_P.min()
    np.fill_diagonal(distance, 0.0)
    # Single linkage needs only one measured pair between neighbours; average or complete linkage would need all.
    tree = linkage(squareform(distance, checks=False), "single")
    heights = tree[:, 2]
    gaps = np.diff(heights)
    if not len(gaps) or heights[-1] >= _FAR:  # measured pairs do not join all hosts
        return None
    # The widest gap, not a fixed number of leaves: nobody says how many there are.
    cut = int(np.argmax(gaps))
    found = fcluster(tree, (heights[cut] + heights[cut + 1]) / 2, "distance")
    # A host by itself is no leaf, but perhaps a slow host, which `cluster.outliers` names.
    if len(set(found)) < 2 or np.bincount(found)[1:].min() < 2:
        return None
    is_within = found[pairs[0]] == found[pairs[1]]
    within, between = length_P[is_within], length_P[~is_within]
    # Quartiles, since a few odd paths of either kind must not join or part the two.
    if np.quantile(between, 0.25) - np.quantile(within, 0.75) < _CLEAR * noise:
        return None
    # Numbered by first appearance: SciPy's own labels depend on the order in which groups were joined.
    order: dict[int, int] = {}
    return [order.setdefault(int(leaf), len(order)) for leaf in found]
