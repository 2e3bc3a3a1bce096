"""A random order of n things, computed only where it is asked for: neither time nor memory grows with n.

The order is a keyed bijection of [0, n). A position is written as two digits, (row, column), on a grid of n cells and a few
more. Each round adds to one digit a random function of the other, modulo the digit's base; that can be undone, so it is a
bijection whatever the function (an alternating Feistel network over two digits, as in NIST SP 800-38G). What lands outside
[0, n) goes through the network again until it is inside, which keeps it one (cycle walking: Black and Rogaway 2002).

The random functions are streams of SplitMix64 (Steele, Lea and Flood 2014), one a round, in exact integer arithmetic: an
order is the same on every machine and for every version of NumPy. It is part of what makes a run repeatable, so no change
may alter it; a test holds some orders in full.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dataloading.shards.samples import SPLITMIX64_GAMMA, scrambled

ROUNDS = 16
"""Large n need the fewest: in 200 orders of 10,000 things, statistics aimed at the grid see 5 rounds and not 6. Small n need
more, since a round draws few random numbers there: the distance from a uniform choice of all n! orders, which can be
computed exactly, is 2e-5 for n = 4, 5e-3 for n = 6 and 0.03 for n = 8 after 16 rounds, and falls with every further one."""


def shuffled(positions: NDArray[np.integer], count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return what stands at ``positions`` in the order of ``range(count)`` that belongs to ``(seed, epoch)``.

    Args:
        positions: [P], each at least 0 and less than ``count``.
        count: at least 1 and at most 2**62.
        seed: at least 0 and less than 2**64.
        epoch: at least 0 and less than 2**64.
    """
    rows = math.isqrt(count - 1) + 1  # the square root, rounded up
    rows += rows % 2  # on a grid of odd sides every round is an even permutation, and half of the orders never come
    columns = -(-count // rows)
    # The seed is scrambled before the epoch is added, so that no sum of the two stands for another pair.
    (start,) = _stream(_stream(np.uint64(seed), np.zeros(1, np.uint64)), np.array([epoch], np.uint64))
    keys = _stream(start, np.arange(ROUNDS, dtype=np.uint64))
    cells = positions.astype(np.uint64)
    outside = np.arange(len(cells))
    while len(outside):
        cells[outside] = _network(cells[outside], rows, columns, keys)
        outside = outside[cells[outside] >= count]
    return cells.astype(np.int64)


def _network(cells: NDArray[np.uint64], rows: int, columns: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return where each cell of the grid goes; one round a key, on rows and columns in turn."""
    row, column = np.divmod(cells, np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2:
            column = _added(column, row, key, columns)
        else:
            row = _added(row, column, key, rows)
    return row * np.uint64(columns) + column


def _added(digit: NDArray[np.uint64], other: NDArray[np.uint64], key: np.uint64, base: int) -> NDArray[np.uint64]:
    """``digit`` plus a random function of ``other``, modulo ``base``, which is at most 2**32."""
    base_64 = np.uint64(base)
    # 32 random bits times the base, the upper half of it: below the base without a division.
    total = (_stream(key, other) >> np.uint64(32)) * base_64 >> np.uint64(32)
    total += digit
    # Less than twice the base, so that one subtraction is the remainder.
    total -= base_64 * (total >= base_64)
    return total


def _stream(key: np.uint64 | NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers ``index`` of the SplitMix64 stream that starts from ``key``: 64 random bits each."""
    bits = (index + np.uint64(1)) * SPLITMIX64_GAMMA
    bits += key
    return scrambled(bits)
