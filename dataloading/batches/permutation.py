"""Random permutations of n items that can be evaluated at single positions. Neither time nor memory grows with n.

The permutation is a keyed bijection of [0, n). A position is written as two digits, (row, column), on a grid of at least n
cells. Each round adds a random function of one digit to the other digit, modulo that digit's base. Such a round is a
bijection, and the rounds form an alternating Feistel network, as in NIST SP 800-38G. Results outside [0, n) go through
the network again until they are inside (cycle walking: Black and Rogaway 2002).

The random functions are streams of SplitMix64 (Steele, Lea and Flood 2014) in exact integer arithmetic, so an order is
the same on every machine and with every version of NumPy. Any change to the algorithm makes earlier runs unrepeatable.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dataloading.shards.samples import SPLITMIX64_GAMMA, scrambled

ROUNDS = 16
"""Number of rounds. In 200 orders of 10,000 items, statistical tests find regular patterns after 5 rounds, but not
after 6. A small n needs more rounds, because each round draws few random numbers. After 16 rounds, the distance from a
uniform choice among all n! orders is 2e-5 for n = 4 and 0.03 for n = 8."""


def shuffled(positions: NDArray[np.integer], count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the items at ``positions`` [P] in the random order of ``range(count)`` for ``(seed, epoch)``.

    Positions are at least 0 and less than ``count``, which is from 1 to 2**62. Both ``seed`` and ``epoch`` are at least 0
    and less than 2**64.
    """
    rows = math.isqrt(count - 1) + 1  # the square root, rounded up
    rows += rows % 2  # if rows and columns were both odd, half of all orders could not occur
    columns = -(-count // rows)
    # Scramble the seed first, so that different (seed, epoch) pairs give different starts.
    (start,) = _stream(_stream(np.uint64(seed), np.zeros(1, np.uint64)), np.array([epoch], np.uint64))
    keys = _stream(start, np.arange(ROUNDS, dtype=np.uint64))
    cells = positions.astype(np.uint64)
    outside = np.arange(len(cells))
    while len(outside):
        cells[outside] = _network(cells[outside], rows, columns, keys)
        outside = outside[cells[outside] >= count]
    return cells.astype(np.int64)


def _network(cells: NDArray[np.uint64], rows: int, columns: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the new position of each grid cell. Each key gives one round, which changes the row or the column."""
    row, column = np.divmod(cells, np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2:
            column = _added(column, row, key, columns)
        else:
            row = _added(row, column, key, rows)
    return row * np.uint64(columns) + column


def _added(digit: NDArray[np.uint64], other: NDArray[np.uint64], key: np.uint64, base: int) -> NDArray[np.uint64]:
    """Return ``digit`` plus a random function of ``other``, modulo ``base``, which is at most 2**32."""
    base_64 = np.uint64(base)
    # Multiplying 32 random bits by the base and taking the upper half gives a number below the base.
    total = (_stream(key, other) >> np.uint64(32)) * base_64 >> np.uint64(32)
    total += digit
    # The sum is less than twice the base, so one subtraction gives the remainder.
    total -= base_64 * (total >= base_64)
    return total


def _stream(key: np.uint64 | NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the 64-bit numbers at positions ``index`` of the SplitMix64 stream that starts from ``key``."""
    bits = (index + np.uint64(1)) * SPLITMIX64_GAMMA
    bits += key
    return scrambled(bits)
