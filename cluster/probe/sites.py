"""Sites: groups of hosts that only slow links join, as the hosts state them or as the measured paths show them."""

from collections.abc import Sequence

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from cluster.probe.links import Paths

SLOWER = 5.0
"""Minimum ratio of path times between sites to path times within a site. The switches of one room are rarely oversubscribed
by more than four to one, so a larger ratio means another network."""


def find_sites(stated: Sequence[str], paths: Paths | None, host_of: Sequence[int]) -> list[str]:
    """Return the name of each host's site, all "" if there is a single site.

    The names are ``stated`` if any host states one. Otherwise the widest gap between the times of host pairs separates
    fast from slow pairs, and hosts that fast pairs join form a site. Such sites must be unambiguous: at least two hosts in
    each, because a single host probably has a slow link; no slow pair within a site; and a slow pair between any two sites.
    """
    if any(stated) or paths is None:
        return [*stated]
    ends_2E = np.sort(np.array(host_of)[np.stack([paths.source_E, paths.target_E])], axis=0)
    pairs_2P, place_E = np.unique(ends_2E, axis=1, return_inverse=True)
    # Take the slowest of both directions and all cards: a fast pair has no slow path.
    times_P = np.zeros(pairs_2P.shape[1])
    np.maximum.at(times_P, np.ravel(place_E), np.median(paths.seconds_per_byte_TE, axis=0))
    ordered_P = np.sort(times_P)
    ratios = ordered_P[1:] / ordered_P[:-1]
    if not len(ratios) or ratios.max() < SLOWER:
        return [*stated]
    is_fast_P = times_P <= ordered_P[ratios.argmax()]
    one, other = pairs_2P[:, is_fast_P]
    joined = coo_matrix((np.ones(len(one)), (one, other)), shape=(len(stated), len(stated)))
    sites, site_H = connected_components(joined, directed=False)
    site_2P = site_H[pairs_2P]
    is_within_P = site_2P[0] == site_2P[1]
    compared = np.unique(np.sort(site_2P[:, ~is_within_P], axis=0), axis=1).shape[1]
    if np.bincount(site_H).min() < 2 or (is_within_P != is_fast_P).any() or compared < sites * (sites - 1) // 2:
        return [*stated]
    return [f"site{site}" for site in site_H]
