"""Rounds of pairs of nodes, in which the probe measures paths: disjoint, few, and equally many for every node."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from cluster.probe.links import SAMPLED, rounds_of_pairs


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
