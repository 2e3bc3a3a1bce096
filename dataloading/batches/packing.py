"""Packing of several sequences into a row of ``capacity`` tokens, to reduce padding.

A strategy is the number of packs for each combination of sequence lengths. Choosing a strategy is the one-dimensional
cutting-stock problem with a limit on the sequences per pack. If the solution of first-fit decreasing is not within
``_GOOD_ENOUGH`` of a lower bound, column generation (Gilmore and Gomory 1961, 1963) solves the linear program over all
combinations, and the solution is rounded.

Shape legend: N samples, P packs, C combinations, K sequences in the longest combination, L = capacity + 1
possible lengths (0 stands for no sequence).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataloading.shards.samples import offsets_of, ragged_indices

_GOOD_ENOUGH = 1e-4
"""No linear program is solved if first-fit decreasing needs at most this fraction more packs than the lower bound."""
_CLOSE_ENOUGH = 3e-5
"""The rounds of linear programs stop when the packs exceed the lower bound by at most this fraction."""
_MAX_ROUNDS = 60
"""Maximum number of linear programs. The lengths of Wikipedia's samples need 12, with three sequences per pack."""

Combination = tuple[int, ...]
"""Lengths of the sequences in one pack, longest first."""


@dataclass(frozen=True)
class PackingStrategy:
    """Number of packs for each combination of lengths. Every sequence of the histogram is in exactly one pack."""

    capacity: int
    """Number of tokens that fit into a pack."""
    combinations: tuple[Combination, ...]
    """[C] different combinations."""
    counts: tuple[int, ...]
    """[C] number of packs of each combination, at least 1."""
    bound: int
    """Lower bound on the number of packs that any strategy needs for this histogram and these limits."""

    @property
    def packs(self) -> int:
        return sum(self.counts)

    @property
    def tokens(self) -> int:
        return sum(sum(lengths) * count for lengths, count in zip(self.combinations, self.counts, strict=True))

    @property
    def efficiency(self) -> float:
        """Share of slots that hold real tokens, or 1 if there are no sequences."""
        return self.tokens / (self.packs * self.capacity) if self.packs else 1.0

    @property
    def efficiency_bound(self) -> float:
        """Upper bound on the efficiency of any strategy."""
        return self.tokens / (self.bound * self.capacity) if self.bound else 1.0


def pack_histogram(histogram: ArrayLike, capacity: int = 512, max_sequences: int | None = 3) -> PackingStrategy:
    """Return a strategy with nearly the fewest possible packs, and never more packs than first-fit decreasing.

    ``histogram[l]`` [L or shorter] is the number of sequences of l tokens. ``max_sequences`` limits the sequences in a
    pack; None means no limit. Equal arguments give equal strategies. Raises ``ValueError`` for counts that are negative
    or not integers, for sequences that are empty or longer than ``capacity``, and for limits below 1.
    """
    counts = _checked_histogram(histogram, capacity, max_sequences)
    if not counts.any():
        return PackingStrategy(capacity, (), (), 0)
    limit = capacity // int(np.flatnonzero(counts)[0])
    limit = limit if max_sequences is None else min(limit, max_sequences)
    tokens = int(counts @ np.arange(capacity + 1))
    bound = max(-(-int(counts.sum()) // limit), -(-tokens // capacity))
    best = _first_fit_decreasing(counts, limit)
    if best.total() > bound * (1 + _GOOD_ENOUGH):
        packing, linear_bound = _linear_program(counts, limit, best)
        best = min(best, packing, key=Counter.total)
        bound = max(bound, linear_bound)
    return PackingStrategy(capacity, tuple(best), tuple(best.values()), bound)


@dataclass(frozen=True)
class Packs:
    """Assignment of samples to packs. Pack p holds ``samples[offsets[p]:offsets[p + 1]]``, longest first."""

    samples: NDArray[np.int64]
    """[N] sample numbers."""
    offsets: NDArray[np.int64]
    """[P + 1]"""

    def __len__(self) -> int:
        return len(self.offsets) - 1


def pack_samples(
    lengths: NDArray[np.integer], capacity: int = 512, max_sequences: int | None = 3, seed: int | Sequence[int] = 0
) -> Packs:
    """Assign every sample to exactly one pack.

    ``lengths`` [N] are in tokens. Their histogram determines which lengths share a pack.

    ``seed`` determines the random order of the packs and the random places of samples of equal length. Uses at most 70
    bytes of memory per sample. Raises ``ValueError`` for the same faults as `pack_histogram`.
    """
    strategy = pack_histogram(np.bincount(lengths, minlength=1), capacity, max_sequences)
    lengths = lengths.astype(np.min_scalar_type(capacity), copy=False)  # NumPy sorts 16-bit integers by fast radix sort
    rng = np.random.default_rng(seed)
    packs = rng.permutation(np.repeat(np.arange(len(strategy.counts), dtype=np.int32), strategy.counts))
    sizes = np.array([len(lengths) for lengths in strategy.combinations], np.int64)
    flat = np.fromiter((length for lengths in strategy.combinations for length in lengths), lengths.dtype)
    slots = flat[ragged_indices(offsets_of(sizes)[packs], sizes[packs])]
    offsets = offsets_of(sizes[packs])
    del packs
    # Sort the slots by length, sort the samples by length, and match them in this order. The samples are shuffled before
    # the stable sort, so that samples of equal length get random places.
    shuffled = rng.permutation(len(lengths))
    by_length = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    samples = np.empty(len(lengths), np.int64)
    samples[np.argsort(slots, kind="stable")] = by_length
    return Packs(samples, offsets)


def _checked_histogram(histogram: ArrayLike, capacity: int, max_sequences: int | None) -> NDArray[np.int64]:
    """Check the arguments, and return the counts padded with zeros [L]."""
    for name, limit in (("capacity", capacity), ("max_sequences", max_sequences)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} is {limit}; expected at least 1")
    given = np.asarray(histogram)
    counts = np.zeros(capacity + 1, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu" or (given < 0).any() or given[:1].any():
        raise ValueError("the histogram must hold a number of sequences for each length, and none of length 0")
    if given[capacity + 1 :].any():
        longest = int(np.flatnonzero(given)[-1])
        raise ValueError(
            f"there are sequences of {longest} tokens; expected at most {capacity}, the capacity of a pack"
        )
    counts[: len(given)] = given[: capacity + 1]
    return counts


def _first_fit_decreasing(counts: NDArray[np.int64], limit: int) -> Counter[Combination]:
    """Pack by first-fit decreasing, processing all packs with equal contents at once."""
    capacity = len(counts) - 1
    packing: Counter[Combination] = Counter()
    opened: list[tuple[int, Combination, int]] = []  # items: (free space, contents, number of equal packs)
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        offered, opened = [*opened, (capacity, (), left)], []
        for space, contents, packs in offered:
            if space < length or not left:
                if contents:
                    opened.append((space, contents, packs))
                continue
            fitting = min(space // length, limit - len(contents))
            filled, rest = divmod(left, fitting)
            if filled >= packs:
                filled, rest = packs, 0
            left -= filled * fitting + rest
            partly = int(rest > 0)
            # Of these equal packs, some are filled, at most one is partly filled, and the others do not change.
            for added, number in ((fitting, filled), (rest, partly), (0, packs - filled - partly)):
                now = contents + (length,) * added
                if now and number:
                    if space > added * length and len(now) < limit:
                        opened.append((space - added * length, now, number))
                    else:
                        packing[now] += number
    for _, contents, packs in opened:
        packing[contents] += packs
    return packing


def _linear_program(
    counts: NDArray[np.int64], limit: int, start: Iterable[Combination]
) -> tuple[Counter[Combination], int]:
    """Solve and round the linear program over all combinations of at most ``limit`` sequences.

    Returns the packs and a lower bound on the number of packs. ``start`` holds good combinations, for example the result
    of first-fit decreasing.

    The method is column generation. Each round solves the program over a few combinations, and takes the dual solution as
    the prices of the lengths. Then it adds, for each length, the most valuable combination that contains the length. The
    rounds end when no combination is worth more than a pack. Prices fluctuate between rounds, so the search first uses the
    mean of the current prices and the best prices so far (Wentges 1997). Any prices give a lower bound on the number of
    packs: the value of all sequences divided by the value of the best pack.
    """
    lengths = np.flatnonzero(counts)
    # The initial price of a length is the share of a pack that it fills.
    best_prices, bound = np.where(counts > 0, np.arange(len(counts)) / (len(counts) - 1), 0.0), 0.0
    # Combinations of a single length ensure that every histogram can be packed.
    singles = [(length,) for length in lengths.tolist()]
    # The rows [C, K] are different combinations, padded with zeros at the end.
    columns = np.array(sorted({(*each, *[0] * (limit - len(each))) for each in (*start, *singles)}), np.int64)
    used, amounts = columns, np.zeros(0)
    for _ in range(_MAX_ROUNDS):
        used = columns
        amounts, prices = _solve(columns, counts)
        if amounts.sum() - bound <= _CLOSE_ENOUGH * bound:
            break
        fresh = columns[:0]
        for searched in ((best_prices + prices) / 2, prices):
            found, value = _best_combinations(searched, lengths, limit)
            if searched @ counts / value > bound:
                best_prices, bound = searched / value, searched @ counts / value
            # A combination takes one pack. It can save packs only if its samples are worth more than one.
            fresh = found[prices[found].sum(1) > 1 + 1e-7]
            if len(fresh):
                break
        if not len(fresh):
            break
        # Keep all combinations. If one were dropped, the rounds could find and drop it again without end.
        columns = np.unique(np.concatenate([columns, fresh]), axis=0)
    chosen = {tuple(filter(None, used[index].tolist())): amounts[index] for index in np.flatnonzero(amounts > 1e-9)}
    # Lower the bound slightly, so that a rounding error does not raise it to the next integer.
    return _rounded(chosen, counts, limit), int(np.ceil(bound * (1 - 1e-9)))


def _best_combinations(
    prices: NDArray[np.float64], lengths: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.int64], float]:
    """Return the most valuable combination for each length [C, K], padded with zeros, and the largest value."""
    capacity = len(prices) - 1
    values, choices = np.zeros(capacity + 1), []
    # values[s] is the highest value that fits into a space of s tokens. Each round allows one more sequence.
    for _ in range(limit - 1):
        padded = np.concatenate([np.full(capacity, -np.inf), values])
        # [L, L]: row s, column a holds the price of length a plus the highest value for the remaining space s - a
        sums = np.lib.stride_tricks.sliding_window_view(padded, capacity + 1)[:, ::-1] + prices
        choices.append(sums.argmax(axis=1))
        values, previous = sums[np.arange(capacity + 1), choices[-1]], values
        if np.array_equal(values, previous):  # another sequence adds no value
            break
    combinations = np.zeros((len(lengths), limit), np.int64)
    combinations[:, 0], space = lengths, capacity - lengths
    for place, choice in enumerate(reversed(choices), 1):
        combinations[:, place] = choice[space]
        space = space - choice[space]
    return -np.sort(-combinations, axis=1), float((prices[lengths] + values[capacity - lengths]).max())


def _solve(columns: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Solve the linear program over ``columns`` [C, K]. Return the number of packs of each column [C] and the prices [L].

    Every sequence must have a slot. Slots may be left over, which keeps prices non-negative.
    """
    from scipy import optimize, sparse  # imported here, so that other uses of this module do not wait for it

    lengths = np.flatnonzero(counts)
    row_of = np.zeros(len(counts), np.int64)
    row_of[lengths] = np.arange(len(lengths))
    column, position = np.nonzero(columns)
    rows = row_of[columns[column, position]]
    cover = sparse.csc_array((np.ones(len(rows)), (rows, column)), shape=(len(lengths), len(columns)))
    scale = counts.sum() / 1e5  # the solver's absolute tolerances suit counts with the sum 1e5
    solved = optimize.linprog(np.ones(len(columns)), A_ub=-cover, b_ub=-counts[lengths] / scale, method="highs-ds")
    if solved.status:
        raise RuntimeError(f"the linear program of the packing was not solved: {solved.message}")
    prices = np.zeros(len(counts))
    prices[lengths] = np.maximum(0.0, -solved.ineqlin.marginals)
    return np.maximum(0.0, solved.x) * scale, prices


def _rounded(chosen: Mapping[Combination, float], counts: NDArray[np.int64], limit: int) -> Counter[Combination]:
    """Round to whole packs: round down, add packs with the largest fractions, and pack the rest by first-fit decreasing."""
    left = Counter(dict(enumerate(counts.tolist())))
    packing: Counter[Combination] = Counter()

    def take(combination: Combination, packs: int) -> int:
        needed = Counter(combination)
        taken = min([packs, *(left[length] // number for length, number in needed.items())])
        if taken:
            packing[combination] += taken
            for length, number in needed.items():
                left[length] -= taken * number
        return taken

    for combination, amount in chosen.items():
        packs = int(amount)
        while packs and combination:
            packs -= take(combination, packs)
            # Reduce the combination to the sequences that are left. The other slots of its packs stay empty.
            combination = tuple((Counter(combination) & left).elements())
    # Sort equal fractions by combination, so that equal arguments give equal packings.
    for combination in sorted(chosen, key=lambda each: (int(chosen[each]) - chosen[each], each)):
        take(combination, 1)
    packing.update(_first_fit_decreasing(np.array([*left.values()]), limit))
    return packing
