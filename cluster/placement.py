"""Placement: choose the hosts of a run and order them so that neighbours in the order are neighbours in the network.

Ranks are numbered in the order of their hosts. An all-reduce along a rail is a ring over the hosts in this order, and a
pipeline's stages are on consecutive hosts. A ring must enter and leave every subtree at least once, so the cheapest order
walks the tree of switches and never returns to a subtree.
"""

from collections.abc import Sequence
from itertools import groupby, takewhile

from console.text import counted

Path = tuple[str, ...]
"""Switches above a host, from the top to its leaf."""


def climb(one: Path, other: Path) -> int:
    """Return how many levels above the leaf the traffic between two hosts climbs. 0 means that they share a leaf."""
    shared = takewhile(lambda level: level[0] == level[1], zip(one, other, strict=False))
    return max(len(one), len(other)) - len([*shared])


def cost(order: Sequence[Path], group: int = 1) -> int:
    """Return the number of levels that traffic climbs, summed over neighbours in the ring and over all pairs in groups."""
    ring = sum(climb(order[place - 1], each) for place, each in enumerate(order) if place or len(order) > 2)
    starts = range(0, len(order), group)
    pairs = ((a, b) for start in starts for a in range(start, start + group) for b in range(start, a))
    return ring + sum(climb(order[a], order[b]) for a, b in pairs)


def place(paths: Sequence[Path], nodes: int, group: int = 1) -> list[int]:
    """Choose and order ``nodes`` hosts, and return their indices in ``paths``.

    Each ``group`` consecutive hosts form a group. Hosts communicate more within their group than with other groups.
    Raises ``ValueError`` if the cluster has too few hosts, or if ``nodes`` is no multiple of ``group``.
    """
    if nodes < 1 or group < 1 or nodes % group:
        raise ValueError(
            f"--nodes is {nodes} and --group is {group}; both must be at least 1, and --nodes a multiple of --group"
        )
    if nodes > len(paths):
        raise ValueError(f"--nodes is {nodes}, but the cluster has only {counted(len(paths), 'host')}")
    groups, _ = _fill(paths, 0, _choose(paths, nodes, group), group)
    return [host for members in groups for host in members]


def hosts_below(paths: Sequence[Path], hosts: Sequence[int], level: int | None = None) -> dict[Path, list[int]]:
    """Group hosts by their first ``level`` switches, or by leaf if ``level`` is None, in the order of the tree."""
    ordered = sorted(hosts, key=lambda host: (paths[host], host))
    return {path: [*below] for path, below in groupby(ordered, lambda host: paths[host][:level])}


def _choose(paths: Sequence[Path], nodes: int, group: int) -> list[int]:
    """Choose hosts from the fullest leaves of the smallest subtree that has enough hosts."""
    every = range(len(paths))
    subtrees = [tree for level in range(max(map(len, paths)) + 1) for tree in hosts_below(paths, every, level).items()]
    _, smallest = min((len(hosts), path) for path, hosts in subtrees if len(hosts) >= nodes)
    leaves = hosts_below(paths, [host for host in every if paths[host][: len(smallest)] == smallest])
    chosen: list[int] = []
    for step in (group, 1):  # first whole groups within a leaf, then single hosts
        available = {leaf: len(hosts) // step * step for leaf, hosts in leaves.items()}
        while (wanted := nodes - len(chosen)) and any(available.values()):
            # Take the fullest leaf until one leaf can supply all remaining hosts. Then take the smallest leaf that can.
            leaf = min(available, key=lambda leaf: (available[leaf] < wanted, abs(available[leaf] - wanted), leaf))
            taken = min(available.pop(leaf), wanted)
            chosen += leaves[leaf][:taken]
            leaves[leaf] = leaves[leaf][taken:]
    return chosen


def _fill(paths: Sequence[Path], level: int, hosts: list[int], group: int) -> tuple[list[list[int]], list[int]]:
    """Form groups of hosts that share their first ``level`` switches. Return the groups and the remaining hosts."""
    subtrees = hosts_below(paths, hosts, level + 1)
    groups: list[list[int]] = []
    left: list[int] = []
    is_leaf = len(subtrees) == 1 and len(next(iter(subtrees))) <= level
    for inside in subtrees.values():
        filled, over = ([], inside) if is_leaf else _fill(paths, level + 1, inside, group)
        groups += filled
        left += over
        # A group spans subtrees only if no single subtree could use its hosts.
        while len(left) >= group:
            groups.append(left[:group])
            left = left[group:]
    return groups, left
