"""Schedule of pairs: who measures the path to whom, in rounds in which everybody has at most one partner.

With n nodes in a circle, a round holds pairs at one distance; each distance d takes two rounds, or three where the circle
of steps of d has an odd number of nodes, and one where d is half of n. Distances are the powers of two, and ``SAMPLED``
others. So the number of rounds grows with the logarithm of n: up to 8 nodes every pair is there, 32 nodes have 13 rounds
and 13 partners each, 4,096 nodes 27 rounds and 27 partners. More than that is sampled: of 4,095 paths that a node has, 27.

That is enough to judge every node's own link, because all nodes have the same number of partners, and a fault of its link
shows with all of them, in whichever direction it lies. It is enough to find the leaf switches, because nodes are in the
order of their names, which leaves follow, and neighbours are among the pairs. A fault of a single path deep in the
network is seen only if the path is among the sampled ones.
"""

from math import gcd

Pairs = list[tuple[int, int]]

SAMPLED = 2
"""Distances besides the powers of two."""


def rounds_of_pairs(nodes: int) -> list[Pairs]:
    """The rounds for ``nodes`` nodes; in each, pairs are disjoint, and over all no pair comes twice."""
    return [pairs for distance in distances(nodes) for pairs in _rounds_at(distance, nodes)]


def distances(nodes: int) -> list[int]:
    """Distances on the circle at which pairs are, the neighbours first."""
    half = nodes // 2
    # Doubling distances: every node reaches any other in few steps, and short distances are dense.
    powers = [1 << power for power in range(half.bit_length())]
    others = sorted(set(range(1, half + 1)) - set(powers))
    # Evenly over what is left, not near its ends: short distances are among the powers already.
    sampled = [others[(2 * part + 1) * len(others) // (2 * SAMPLED)] for part in range(SAMPLED)] if others else []
    return powers + sorted(set(sampled))


def _rounds_at(distance: int, nodes: int) -> list[Pairs]:
    # Steps of `distance` run around gcd(distance, nodes) separate circles.
    circles = gcd(distance, nodes)
    length = nodes // circles
    # A circle of even length takes two rounds; of odd length its last step needs a third.
    rounds: list[Pairs] = [[], [], []]
    for start in range(circles):
        # Two nodes opposite each other are one pair, not one in each direction.
        for step in range(length if length > 2 else 1):
            node = (start + step * distance) % nodes
            last_of_odd = length % 2 == 1 and step == length - 1
            other = (node + distance) % nodes
            # Alternating steps share no node, so a round has each node at most once.
            rounds[2 if last_of_odd else step % 2].append((min(node, other), max(node, other)))
    return [pairs for pairs in rounds if pairs]
