"""Rounds of pairs of nodes, in which the probe measures paths: disjoint, few, and equally many for every node."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from cluster.probe.command import _schedules
from cluster.probe.links import SAMPLED, rounds_of_pairs
from cluster.probe.machine import Facts
from cluster.view import Host


@given(st.integers(1, 700))
@example(4095)
@example(4096)
def test_pairs_are_disjoint_and_every_node_has_as_many(nodes: int) -> None:
    rounds = rounds_of_pairs(nodes)
    partners: list[set[int]] = [set() for _ in range(nodes)]
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        for one, other in pairs:
            assert 0 <= one < other < nodes
            assert other not in partners[one], "a pair comes twice"
            partners[one].add(other)
            partners[other].add(one)
    assert len(rounds) <= 3 * (math.log2(nodes) + SAMPLED) if nodes > 1 else not rounds
    assert len({len(each) for each in partners}) == 1, "all nodes are judged by as many paths"
    assert all((node + 1) % nodes in partners[node] for node in range(nodes)) or nodes == 1, "neighbours are measured"
    if 1 < nodes <= 8:
        assert len(partners[0]) == nodes - 1


def test_rounds_keep_all_hosts_and_all_cards_busy_and_pair_hosts_in_the_order_of_their_names() -> None:
    """The first rank at each card represents it: ranks 0 and 2 on host h10, and ranks 3 and 5 on host h9."""
    every = [Facts("", Host(name, 8, 0, (), ()), "CPU", 0, card) for name in ("h10", "h9") for card in "aab"]
    inside = [[(0, 1), (3, 4)], [(1, 2), (4, 5)], [(0, 2), (3, 5)]]
    assert _schedules([(0, 1, 2), (3, 4, 5)], every) == (inside, [[(3, 0), (5, 2)]])
    assert _schedules([(0,)], every) == ([], []), "one rank has nobody to send to"
