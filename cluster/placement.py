"""Placement: which hosts take part, and in which order, so that neighbours in the order are neighbours in the network.

Ranks follow the order of their hosts. All-reduce along a rail is a ring (or trees with the same neighbours) over the hosts
in this order, so that neighbours under different leaves load an uplink; the hosts of a group, such as the stages of a
pipeline, talk more than that. The cost of an order is the sum over all who talk of the levels that their traffic climbs.

Without groups, an order that never comes back to a subtree is the cheapest that there is: a ring must leave and enter every
subtree once. With groups the choice is a quadratic assignment problem: up to `EXACT_UP_TO` hosts are searched exhaustively,
with a bound, beyond that groups are filled from the leaves up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EXACT_UP_TO = 8
"""Hosts up to which every order is tried, as far as a bound does not exclude it."""

GROUP_WEIGHT = 8
"""Traffic between two hosts of a group, in units of that between neighbours of the ring."""

Path = tuple[str, ...]
"""Switches above a host, from the top to its leaf."""


@dataclass(frozen=True)
class Placing:
    """Order to be found, of ``nodes`` hosts in groups of ``group``, which with ``apart`` are under different leaves."""

    nodes: int
    group: int = 1
    apart: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.group < 1 or self.nodes % self.group:
            raise ValueError(
                f"--nodes is {self.nodes} and --group {self.group}: expected a multiple of it, both from 1 on"
            )


def climb(one: Path, other: Path) -> int:
    """Return how many levels traffic between two hosts climbs above their leaves; 0 under one leaf."""
    # Paths may have unlike lengths where a tree is uneven: then the shorter one is compared as far as it goes.
    same = next(
        (level for level, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return max(len(one), len(other)) - same


def cost(order: Sequence[Path], placing: Placing) -> int:
    """Return the sum of the levels that traffic climbs in an order of hosts, given by the switches above each."""
    total = sum(_added_cost(order, place, placing) for place in range(len(order)))
    return total + (climb(order[-1], order[0]) if len(order) > 2 else 0)  # two are neighbours once


def _added_cost(order: Sequence[Path], place: int, placing: Placing) -> int:
    """Return the cost of what the host at ``place`` of an order says to those before it."""
    one = order[place]
    # `place and`: the first host has nobody before it; the ring is closed in `cost`.
    ring = climb(order[place - 1], one) if place else 0
    return ring + GROUP_WEIGHT * sum(
        # Apart, only the same leaf costs: how far leaves lie apart is no matter for a failure of one.
        int(other == one) if placing.apart else climb(other, one)
        # Hosts of the same group that come earlier: groups are consecutive, so integer division finds its start.
        for other in order[place // placing.group * placing.group : place]
    )


def place(paths: Sequence[Path], placing: Placing) -> list[int]:
    """Return the hosts, as places in ``paths``, that take part, in their order.

    Raises ``ValueError`` where there are too few hosts, or too few leaves for groups that are to be apart.
    """
    if placing.nodes > len(paths):
        raise ValueError(f"--nodes is {placing.nodes}, and the cluster has {len(paths)} hosts")
    if placing.apart and placing.group > len(set(paths)):
        raise ValueError(f"--group is {placing.group}, and there are {len(set(paths))} leaves to have its hosts apart")
    chosen = list(range(len(paths))) if placing.nodes == len(paths) else _choose(paths, placing)
    order = _apart(paths, chosen, placing.group) if placing.apart else _together(paths, chosen, placing.group)
    # The search is exponential; what was built first is its bound from the start.
    return _search(paths, order, placing) if len(paths) <= EXACT_UP_TO else order


def _leaves(paths: Sequence[Path], hosts: Sequence[int]) -> dict[Path, list[int]]:
    """Hosts by leaf; leaves in the order of the tree, hosts in their own."""
    leaves: dict[Path, list[int]] = {}
    # Leaves sorted by path are in the order of the tree, so a walk over them never comes back to a subtree.
    for host in sorted(hosts, key=lambda host: (paths[host], host)):
        leaves.setdefault(paths[host], []).append(host)
    return leaves


def _choose(paths: Sequence[Path], placing: Placing) -> list[int]:
    """Choose hosts: of the smallest subtree that has enough, from its fullest leaves; apart, from all leaves in turn."""
    leaves = _leaves(paths, range(len(paths)))
    if placing.apart:
        # The first host of every leaf, then the second of each: a group may take one of as many leaves as there are.
        turns = sorted((turn, leaf, host) for leaf, hosts in leaves.items() for turn, host in enumerate(hosts))
        return [host for _, _, host in turns[: placing.nodes]]
    subtrees: dict[Path, list[int]] = {}
    for host, path in enumerate(paths):
        for level in range(len(path) + 1):
            subtrees.setdefault(path[:level], []).append(host)
    # The root, (), holds all hosts, so there is always one.
    enough = [(len(hosts), path) for path, hosts in subtrees.items() if len(hosts) >= placing.nodes]
    # The smallest subtree with enough hosts keeps traffic below its top; of equals the first by name.
    _, smallest = min(enough)
    within = _leaves(paths, subtrees[smallest])
    chosen: list[int] = []
    for step in (placing.group, 1):  # hosts that fill groups in their leaf, then those that are left over
        # Rounded down to whole groups: remainders are for the second round.
        there = {leaf: len(hosts) // step * step for leaf, hosts in within.items()}
        while (wanted := placing.nodes - len(chosen)) > 0 and any(there.values()):
            # The fullest leaf, until one has all that is left: of those the one with the fewest to spare.
            leaf = min(there, key=lambda leaf: (there[leaf] < wanted, abs(there[leaf] - wanted), leaf))
            taken = min(there.pop(leaf), wanted)
            chosen += within[leaf][:taken]
            within[leaf] = within[leaf][taken:]
    return chosen


def _together(paths: Sequence[Path], chosen: Sequence[int], group: int) -> list[int]:
    """Order hosts by the tree, groups filled inside a leaf where they can be, else inside the next subtree up."""

    def fill(level: int, hosts: list[int]) -> tuple[list[list[int]], list[int]]:
        """Groups of these hosts, which share ``level`` switches, and the hosts that are left over."""
        subtrees: dict[Path, list[int]] = {}
        for host in hosts:
            subtrees.setdefault(paths[host][: level + 1], []).append(host)
        # The prefix no longer grows: all of these hosts hang under one switch.
        if len(subtrees) == 1 and len(next(iter(subtrees))) <= level:  # a leaf
            whole = len(hosts) // group * group
            return [hosts[start : start + group] for start in range(0, whole, group)], hosts[whole:]
        groups: list[list[int]] = []
        left: list[int] = []
        for _, inside in sorted(subtrees.items()):
            filled, over = fill(level + 1, inside)
            groups += filled
            left += over
            # Groups across subtrees are made only of what no subtree could use itself.
            while len(left) >= group:
                groups.append(left[:group])
                left = left[group:]
        return groups, left

    groups, _ = fill(0, sorted(chosen, key=lambda host: (paths[host], host)))
    return [host for members in groups for host in members]


def _apart(paths: Sequence[Path], chosen: Sequence[int], group: int) -> list[int]:
    """Order hosts in groups that take from the leaves with the most hosts left, each leaf once a group while that can be."""
    left = _leaves(paths, chosen)
    order: list[int] = []
    while left:
        # From the fullest leaves, else the last groups would find too few different ones.
        fullest = sorted(left, key=lambda leaf: (-len(left[leaf]), leaf))
        # In order of the tree within a group, so that the ring climbs as little as may be.
        for leaf in sorted(fullest[:group]):
            order.append(left[leaf].pop(0))
            if not left[leaf]:
                del left[leaf]
    return order


def _search(paths: Sequence[Path], start: list[int], placing: Placing) -> list[int]:
    """Return the cheapest order of all, or ``start`` where none is cheaper: depth first, hosts of a leaf being alike."""
    best, least = list(start), cost([paths[host] for host in start], placing)
    left = _leaves(paths, range(len(paths)))
    order: list[int] = []

    def extend(spent: int) -> None:
        nonlocal best, least
        if len(order) == placing.nodes:
            closing = climb(paths[order[-1]], paths[order[0]]) if len(order) > 2 else 0
            if spent + closing < least:
                best, least = list(order), spent + closing
            return
        # One host of each leaf is tried: others of the leaf give the same cost, and would multiply the search.
        for hosts in left.values():
            if not hosts:
                continue
            order.append(hosts.pop(0))
            now = spent + _added_cost([paths[host] for host in order], len(order) - 1, placing)
            # Whoever else comes enters a leaf, and the ring goes back to its start.
            if now + _leaves_to_enter(left, paths[order[-1]], placing.nodes - len(order)) < least:
                extend(now)
            # To where it was taken from, so that the order of hosts within a leaf stays.
            hosts.insert(0, order.pop())

    extend(0)
    return best


def _leaves_to_enter(left: Mapping[Path, Sequence[int]], leaf: Path, hosts: int) -> int:
    """Return the fewest other leaves that ``hosts`` more hosts can be in, when those of ``leaf`` are taken first."""
    hosts -= len(left[leaf])
    entered = 0
    # The largest leaves first: the fewest that can hold all that is left.
    for size in sorted((len(members) for path, members in left.items() if path != leaf), reverse=True):
        if hosts <= 0:
            break
        hosts -= size
        entered += 1
    return entered
