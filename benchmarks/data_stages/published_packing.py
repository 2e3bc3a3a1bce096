"""The three packing algorithms of Krell et al. (arXiv 2107.02027), from their description, to compare with.

Each takes a histogram [capacity + 1] and a limit on sequences in a pack (None for none) and returns the number of packs of
each combination of lengths. All work on the histogram, longest length first where order matters.
"""

import itertools
from collections import Counter

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

Packing = Counter[tuple[int, ...]]
_SHORT, _SHORT_WEIGHT = 8, 0.09
"""Lengths below the first weigh this much in the least squares: a slot that such a sequence leaves empty costs little."""


def shortest_pack_first(histogram: NDArray[np.int64], limit: int | None) -> Packing:
    """SPFHP: a sequence goes to the pack with most space; where none has enough, all that are left open packs."""
    opened = _OpenPacks(len(histogram) - 1, limit)
    # flatnonzero reversed: lengths that occur, the longest first.
    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        # Equal packs are kept as one entry with a number, so that a step fills many at once.
        while left and (space := opened.most_space()) >= length:
            left -= opened.fill(space, length, 1, left)
        opened.add((length,), left)
    return opened.all()


def longest_pack_first(histogram: NDArray[np.int64], limit: int | None) -> Packing:
    """LPFHP: a sequence goes to the fullest pack that still has room, a new one where none has."""
    capacity = len(histogram) - 1
    opened = _OpenPacks(capacity, limit)
    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left and (space := opened.least_space(length)):
            left -= opened.fill(space, length, space // length, left)
        # What found no room opens packs that are filled with as many of its like as fit.
        most = min(capacity // length, limit or capacity)
        packs, rest = divmod(left, most)
        opened.add((length,) * most, packs)
        opened.add((length,) * rest, int(rest > 0))
    return opened.all()


def least_squares(histogram: NDArray[np.int64], limit: int) -> Packing:
    """NNLSHP: amounts of all combinations that fill a pack exactly, by non-negative least squares, rounded.

    Slots beyond what the histogram has stay empty; sequences that are left over are packed longest pack first.
    """
    capacity = len(histogram) - 1
    combinations = [
        combination for pieces in range(1, limit + 1) for combination in _partitions(capacity, pieces, capacity)
    ]
    matrix = np.zeros((capacity + 1, len(combinations)))
    for column, combination in enumerate(combinations):
        for length in combination:
            matrix[length, column] += 1
    weights = np.where(np.arange(capacity + 1) < _SHORT, _SHORT_WEIGHT, 1.0)
    # Weighted rows: a short sequence left over costs little, a long one much.
    amounts, _ = optimize.nnls(matrix * weights[:, None], histogram * weights)
    # Rounded amounts may miss some and overfill others: the rest is packed below, the surplus stays empty.
    whole = np.rint(amounts).astype(np.int64)
    left = np.maximum(0, histogram - np.rint(matrix @ whole).astype(np.int64))
    packing: Packing = Counter({combinations[index]: int(whole[index]) for index in np.flatnonzero(whole)})
    packing.update(longest_pack_first(left, limit))
    return packing


def _partitions(total: int, pieces: int, largest: int) -> list[tuple[int, ...]]:
    """List all ways to write ``total`` as ``pieces`` lengths from 1 to ``largest``, longest first."""
    if pieces == 1:
        return [(total,)] if 1 <= total <= largest else []
    return [
        (first, *rest)
        # Longest first in each combination, so that none comes twice in another order.
        for first in range(min(largest, total - pieces + 1), 0, -1)
        for rest in _partitions(total - first, pieces - 1, first)
    ]


class _OpenPacks:
    """Packs of equal contents together, by the space that they have."""

    def __init__(self, capacity: int, limit: int | None) -> None:
        self._capacity, self._limit = capacity, limit or capacity
        self._full: Packing = Counter()
        self._by_space: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(capacity + 1)]

    def most_space(self) -> int:
        """Return the largest space; 0 when there is none."""
        # From the largest space down; the number of spaces is the capacity, which is small.
        return next((space for space in range(self._capacity, 0, -1) if self._by_space[space]), 0)

    def least_space(self, length: int) -> int:
        """Return the smallest space of at least ``length``; 0 when there is none."""
        return next((space for space in range(length, self._capacity + 1) if self._by_space[space]), 0)

    def add(self, combination: tuple[int, ...], packs: int) -> None:
        """Open ``packs`` of these contents, or close them where nothing more may come."""
        space = self._capacity - sum(combination)
        if packs and space and len(combination) < self._limit:
            self._by_space[space].append((combination, packs))
        elif packs:
            self._full[combination] += packs

    def fill(self, space: int, length: int, most: int, left: int) -> int:
        """Fill up to ``most`` of the ``left`` sequences into each pack of one kind with that space; return how many."""
        combination, packs = self._by_space[space].pop()
        fitting = min(most, self._limit - len(combination))
        filled, rest = divmod(left, fitting)
        # Enough for all packs of the kind: what is left over comes with the next turn.
        if filled >= packs:
            filled, rest = packs, 0
        self.add(combination + (length,) * fitting, filled)
        self.add(combination + (length,) * rest, int(rest > 0))
        self.add(combination, packs - filled - int(rest > 0))
        return filled * fitting + rest

    def all(self) -> Packing:
        """Every pack, open or closed."""
        result = self._full.copy()
        for combination, packs in itertools.chain(*self._by_space):
            result[combination] += packs
        return result
