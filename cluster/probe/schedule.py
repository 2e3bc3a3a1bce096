"""Schedule of the node pairs whose paths are measured, in rounds in which each node has at most one partner.

The nodes form a circle, and each round has pairs at one distance. The distances are the powers of two and ``SAMPLED`` more.
Usually a distance takes two rounds. It takes three if steps of this distance visit an odd number of nodes, and one if it is
half of the circle. Among up to 8 nodes every pair is measured. A node has 13 partners among 32 nodes, and 27 among 4,096.

These pairs suffice to judge each node's own link, because all nodes have the same number of partners, and to find leaf
switches, because hosts are in the order of their names. A fault of a single path is found only if its pair is measured.
"""

from math import gcd

Pairs = list[tuple[int, int]]

SAMPLED = 2
"""Number of distances besides the powers of two."""


def rounds_of_pairs(nodes: int) -> list[Pairs]:
    """Return the rounds for ``nodes`` nodes. No pair occurs twice."""
    return [pairs for distance in _distances(nodes) for pairs in _rounds_at(distance, nodes)]


def _distances(nodes: int) -> list[int]:
    half = nodes // 2
    powers = [1 << power for power in range(half.bit_length())]
    others = sorted(set(range(1, half + 1)) - set(powers))
    # Spread the samples evenly over the remaining distances.
    sampled = [others[(2 * part + 1) * len(others) // (2 * SAMPLED)] for part in range(SAMPLED)] if others else []
    return powers + sorted(set(sampled))


def _rounds_at(distance: int, nodes: int) -> list[Pairs]:
    # Steps of `distance` form gcd(distance, nodes) separate circles.
    circles = gcd(distance, nodes)
    length = nodes // circles
    rounds: list[Pairs] = [[], [], []]
    for start in range(circles):
        # A circle of two opposite nodes has only one pair.
        for step in range(length if length > 2 else 1):
            node = (start + step * distance) % nodes
            other = (node + distance) % nodes
            # Alternating steps share no node, except the last step of an odd circle, which goes into a third round.
            last_of_odd = length % 2 == 1 and step == length - 1
            rounds[2 if last_of_odd else step % 2].append((min(node, other), max(node, other)))
    return [pairs for pairs in rounds if pairs]
