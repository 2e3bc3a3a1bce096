"""Leaf switches inferred from measured paths: hosts under one leaf have shorter paths to one another.

Hosts are joined by their shortest measured paths first (single linkage), which needs only some of the pairs. The widest gap
between the lengths at which groups join separates the leaves. They are accepted only if paths between groups are longer than
paths within groups by more than the error of a repeated measurement, for the middle half of both kinds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

Array = NDArray[np.float64]

_FAR = 1e6
"""Distance assigned to pairs that were not measured."""
_LARGEST = 2048
"""Maximum number of hosts: the distance matrix is square."""
_CLEAR = 6.0
"""Robust deviations that must separate paths within leaves from paths between leaves."""


def leaves_of(times_TE: Array, one_E: NDArray[np.int64], other_E: NDArray[np.int64], hosts: int) -> list[int] | None:
    """Return the leaf of each host, numbered from 0 in host order, or None if the paths do not separate leaves.

    Args:
        times_TE: logarithms of path times between hosts, by turn, after the shares of the path ends were subtracted.
    """
    if not 4 <= hosts <= _LARGEST or not times_TE.size:
        return None
    # Average both directions and all rails.
    pairs, place_E = np.unique(
        np.stack([np.minimum(one_E, other_E), np.maximum(one_E, other_E)]), axis=1, return_inverse=True
    )
    place_E = np.ravel(place_E)
    times_TP = np.stack([np.bincount(place_E, turn) / np.bincount(place_E) for turn in times_TE])
    length_P = np.median(times_TP, axis=0)
    # The standard error of a median, with the constants of cluster.outliers.
    noise = 1.4826 * 1.2533 * float(np.median(np.abs(times_TP - length_P))) / np.sqrt(len(times_TP))
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
