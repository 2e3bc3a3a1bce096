"""Strategies of packing: how many packs of each combination of lengths hold the sequences of a length histogram.

This is the one-dimensional cutting-stock problem with a limit on pieces. Three answers compete: first-fit decreasing,
a greedy search for exact fits, and, where these are not within ``_GOOD_ENOUGH`` of a lower bound, the linear program over
all combinations, solved by column generation (Gilmore and Gomory 1961, 1963) and rounded.

Shape legend: C combinations, K longest combination, L = capacity + 1 possible lengths (0 stands for no sequence).
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOOD_ENOUGH = 1e-4
"""Gap of a quick answer to the lower bound, as a share of it, that is not worth a linear program."""
_CLOSE_ENOUGH = 3e-5
"""Gap at which a linear program is worth no further round."""
_MAX_ROUNDS = 60
"""Linear programs solved at most; Wikipedia's lengths need 8 with three sequences a pack, 18 with twelve."""

_PIECES = 12
"""Longest combinations in a first linear program, or twice the mean where that is more. Mostly enough, but not where long
sequences leave room that only many short ones fill."""
_FILLERS = 8
"""Lengths that the greedy search tries as a third sequence."""
_PLENTY = 4
"""The greedy search draws on pairs that together are there this many times more often than wanted."""

Combination = tuple[int, ...]
"""Lengths in one pack, longest first."""


@dataclass(frozen=True)
class PackingStrategy:
    """Counts of packs for each combination of lengths; every sequence of the histogram is in exactly one."""

    capacity: int
    """Tokens that a pack can hold."""
    combinations: tuple[Combination, ...]
    """[C] different ones."""
    counts: tuple[int, ...]
    """[C] packs of each combination, at least 1."""
    bound: int
    """No strategy for the same histogram and limits has fewer packs."""

    @cached_property
    def packs(self) -> int:
        """Number of packs."""
        return sum(self.counts)

    @cached_property
    def tokens(self) -> int:
        """Real tokens in all packs."""
        return sum(sum(lengths) * count for lengths, count in zip(self.combinations, self.counts, strict=True))

    @property
    def efficiency(self) -> float:
        """Real tokens as a share of all; 1 when there is nothing to pack."""
        return self.tokens / (self.packs * self.capacity) if self.packs else 1.0

    @property
    def efficiency_bound(self) -> float:
        """The efficiency that no strategy exceeds."""
        return self.tokens / (self.bound * self.capacity) if self.bound else 1.0


def pack_histogram(histogram: ArrayLike, capacity: int = 512, max_sequences: int | None = 3) -> PackingStrategy:
    """A strategy with close to the fewest packs possible, and never more than first-fit decreasing.

    ``histogram[l]`` [L or shorter] is the number of sequences of l tokens; ``max_sequences`` of None is no limit. Equal
    arguments give equal strategies. Raises ``ValueError`` for counts that are negative or no whole numbers, sequences
    without tokens or longer than ``capacity``, and limits below 1.
    """
    counts = _checked_histogram(histogram, capacity, max_sequences)
    if not counts.any():
        return PackingStrategy(capacity, (), (), 0)
    # However many may share a pack, no more than this of the shortest fit.
    limit = capacity // int(np.flatnonzero(counts)[0])
    limit = limit if max_sequences is None else min(limit, max_sequences)
    bound = _simple_bound(counts, limit)
    packings = [_first_fit_decreasing(counts, limit)]
    if limit > 2:
        packings.append(_exact_fits(counts, limit))
    best = min(packings, key=Counter.total)
    for pieces in _piece_limits(counts, limit):
        if limit == 1 or best.total() <= bound * (1 + _GOOD_ENOUGH):
            break
        packing, linear_bound = _linear_program(counts, limit, pieces)
        best = min(best, packing, key=Counter.total)
        bound = max(bound, linear_bound)
    return PackingStrategy(capacity, tuple(best), tuple(best.values()), bound)


def _checked_histogram(histogram: ArrayLike, capacity: int, max_sequences: int | None) -> NDArray[np.int64]:
    """[L] the same counts, zeros appended."""
    if capacity < 1:
        raise ValueError(f"capacity of {capacity} tokens, expected at least 1")
    if max_sequences is not None and max_sequences < 1:
        raise ValueError(f"at most {max_sequences} sequences in a pack, expected at least 1, or None for no limit")
    given = np.asarray(histogram)
    if given.ndim != 1:
        raise ValueError(f"a histogram of shape {given.shape}, expected one count for each length")
    whole = given.astype(np.int64)
    if not np.array_equal(whole, given):
        raise ValueError("the histogram holds counts that are no whole numbers: expected numbers of sequences")
    if (whole < 0).any():
        length = int(np.flatnonzero(whole < 0)[0])
        raise ValueError(f"the histogram has {whole[length]} sequences of length {length}, expected 0 or more")
    if len(whole) and whole[0]:
        raise ValueError(f"the histogram has {whole[0]} sequences without tokens: leave them out")
    if whole[capacity + 1 :].any():
        longest = int(np.flatnonzero(whole)[-1])
        raise ValueError(
            f"the histogram has sequences of length {longest}, over the capacity of {capacity} tokens: raise the "
            "capacity or cut the sequences"
        )
    counts = np.zeros(capacity + 1, np.int64)
    counts[: min(len(whole), capacity + 1)] = whole[: capacity + 1]
    return counts


def _simple_bound(counts: NDArray[np.int64], limit: int) -> int:
    """Packs that are needed at least, without solving anything.

    Beside a sequence of capacity - r tokens fits nothing longer than r. Sequences of r or fewer tokens hold only so many
    tokens, and whatever space they cannot fill is lost.
    """
    capacity = len(counts) - 1
    lengths = np.arange(capacity + 1)
    half = (capacity + 1) // 2  # sequences longer than this are never in one pack with each other
    space = np.cumsum((lengths * counts[::-1])[:half])
    filling = np.cumsum((lengths * counts)[:half])
    lost = int((space - filling).max(initial=0))
    tokens = int(lengths @ counts)
    return max(-(-int(counts.sum()) // limit), -(-(tokens + lost) // capacity))


def _first_fit_decreasing(counts: NDArray[np.int64], limit: int) -> Counter[Combination]:
    """Pack by first-fit decreasing, all packs of equal contents at once."""
    capacity = len(counts) - 1
    packing: Counter[Combination] = Counter()
    opened: list[tuple[int, Combination, int]] = []  # space, contents, number of such packs, in order of opening
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
            # Of these packs some are filled, at most one is filled in part, and the rest stays as it was.
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


def _exact_fits(counts: NDArray[np.int64], limit: int) -> Counter[Combination]:
    """Longest first: as many of a length as leave room for one or two others, then others that fill the room exactly.

    All pairs that do so are drawn on in proportion to what is there of them, so that no length runs out early. Where no
    pair is left, one of the most frequent lengths goes in before it; where that does not help either, the next smaller
    sum is tried. Good when packs may hold many sequences.
    """
    capacity = len(counts) - 1
    left = counts.copy()
    packing: Counter[Combination] = Counter()

    def draw_pairs(base: Combination, room: int, packs: int) -> int:
        """Packs of ``base`` and a pair (or one) of ``room`` tokens in all; returns how many, at most ``packs``."""
        shorter = np.arange(room // 2 + 1)
        usable = np.minimum(left[shorter], left[room - shorter])
        usable[0] = left[room] if room else packs  # one sequence that fills the room alone, or nothing to fill
        if room and room % 2 == 0:
            usable[-1] = left[room // 2] // 2  # a pair of equals takes two
        drawn = _proportional(usable, packs)
        left[shorter] -= drawn
        left[room - shorter] -= drawn
        left[0] = 0  # stands for no sequence, of which there are none to take
        for pair in np.flatnonzero(drawn).tolist():
            others = tuple(other for other in (room - pair, pair) if other)
            packing[tuple(sorted(base + others, reverse=True))] += int(drawn[pair])
        return int(drawn.sum())

    for length in np.flatnonzero(counts)[::-1].tolist():
        copies = min(max(1, capacity // length - 1), limit - 2)
        packs, rest = divmod(int(left[length]), copies)
        left[length] = 0
        base, room = (length,) * copies, capacity - copies * length
        if rest:
            packing[base[:rest]] += 1
        packs -= draw_pairs(base, room, packs)
        if packs and room and copies + 3 <= limit:
            for filler in np.argsort(-left[: room + 1], kind="stable")[:_FILLERS].tolist():
                taken = min(packs, int(left[filler]))
                if taken:
                    left[filler] -= taken
                    drawn = draw_pairs((*base, filler), room - filler, taken)
                    left[filler] += taken - drawn
                    packs -= drawn
        while packs:
            room -= 1
            packs -= draw_pairs(base, room, packs)
    return packing


def _proportional(usable: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """``wanted`` drawn from the largest of ``usable`` in proportion, or all of it where that is less."""
    total = int(usable.sum())
    if total <= wanted:
        return usable
    order = np.argsort(-usable, kind="stable")
    largest = order[: int(np.searchsorted(np.cumsum(usable[order]), min(total, _PLENTY * wanted))) + 1]
    share = usable[largest]
    drawn = (share * (wanted / int(share.sum()))).astype(np.int64)
    before = np.cumsum(share - drawn) - (share - drawn)
    result = np.zeros_like(usable)
    # What rounding down has left is taken from the first ones that have more.
    result[largest] = drawn + np.clip(wanted - int(drawn.sum()) - before, 0, share - drawn)
    return result


def _piece_limits(counts: NDArray[np.int64], limit: int) -> list[int]:
    """Longest combinations for a linear program, and for another where the first leaves packing and bound apart."""
    per_pack = int(len(counts[1:]) * counts.sum() / (counts @ np.arange(len(counts))))  # if nothing were lost
    return sorted({min(limit, max(_PIECES, 2 * per_pack)), limit})


def _linear_program(counts: NDArray[np.int64], limit: int, pieces: int) -> tuple[Counter[Combination], int]:
    """A rounded solution of the linear program over combinations of ``pieces``, and a lower bound on packs of ``limit``.

    Column generation: solve over few combinations, price the lengths by the dual solution, add for each length the best
    combination at those prices, repeat until none is worth more than the pack that it costs. Prices from a linear program
    jump about, so combinations are sought at a mean with the best prices so far (Wentges 1997). Any prices give a bound:
    the value of all sequences over the value of the best pack.
    """
    capacity = len(counts) - 1
    lengths = np.flatnonzero(counts)
    # To begin with, a length is worth its share of a pack.
    best_prices = np.where(counts > 0, np.arange(capacity + 1) / capacity, 0.0)
    columns, bound = _starting_columns(best_prices, lengths, pieces), 0.0
    used, amounts = columns, np.zeros(0)
    for _ in range(_MAX_ROUNDS):
        used = columns
        amounts, prices = _solve(columns, counts)
        if amounts.sum() - bound <= _CLOSE_ENOUGH * bound:
            break
        fresh = columns[:0]
        # Ever closer to the program's own prices, until some combination is worth more than a pack at them.
        for weight in (0.6, 0.3, 0.0):
            mixed = weight * best_prices + (1 - weight) * prices
            found, value = _best_combinations(mixed, lengths, pieces)
            if mixed @ counts / value > bound:
                best_prices, bound = mixed / value, mixed @ counts / value
            fresh = found[prices[found].sum(1) > 1 + 1e-7]  # only these can improve the program
            if len(fresh):
                break
        if not len(fresh):
            break
        # Those worth clearly less than a pack go, which keeps the program small; at other prices they are found again.
        columns = np.unique(np.concatenate([columns[prices[columns].sum(1) > 0.98], fresh]), axis=0)
    # More pieces may be worth more than any combination priced so far: the bound has to hold for them too.
    if pieces < limit:
        bound = best_prices @ counts / _best_combinations(best_prices, lengths, limit)[1]
    chosen = _at_own_lengths(used, amounts, counts)
    # Less a little: an error of rounding must not raise the bound to the next integer.
    return _rounded(chosen, counts, limit), int(np.ceil(bound * (1 - 1e-9)))


def _starting_columns(prices: NDArray[np.float64], lengths: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """[C, K] each length alone, and good combinations at prices a little off the given ones."""
    rng = np.random.default_rng(0)
    alone = np.zeros((len(lengths), limit), np.int64)  # with these alone every histogram can be packed
    alone[:, 0] = lengths
    shaken = [np.where(prices > 0, prices + rng.uniform(0, 1e-3, len(prices)), 0.0) for _ in range(4)]
    return np.unique(np.concatenate([alone, *(_best_combinations(each, lengths, limit)[0] for each in shaken)]), axis=0)


def _best_combinations(
    prices: NDArray[np.float64], lengths: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.int64], float]:
    """[C, K] the most valuable combination with each of ``lengths`` in it, zeros last, and the highest value."""
    capacity = len(prices) - 1
    tables: dict[int, tuple[NDArray[np.float64], NDArray[np.int64]]] = {}

    def table(pieces: int) -> NDArray[np.float64]:
        """[L] highest value of at most ``pieces`` lengths in each space; the choice is kept beside it."""
        if pieces not in tables:
            if pieces == 1:
                values = np.maximum.accumulate(prices)
                first_of_value = np.append(True, values[1:] > values[:-1])
                tables[1] = values, np.maximum.accumulate(np.where(first_of_value, np.arange(capacity + 1), 0))
            else:
                # Two tables of half as many pieces make one: some log2(pieces) of them, in place of one a piece.
                one, other = table(pieces - pieces // 2), table(pieces // 2)
                padded = np.concatenate([np.full(capacity, -np.inf), other])
                # [L, L]: row s, column a holds the value of the space s - a
                rest = np.lib.stride_tricks.sliding_window_view(padded, capacity + 1)[:, ::-1]
                sums = rest + one
                choice = sums.argmax(1)
                tables[pieces] = sums[np.arange(capacity + 1), choice], choice
        return tables[pieces][0]

    def contents(pieces: int, space: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        share = tables[pieces][1][space]
        if pieces == 1:
            return [share]
        return contents(pieces - pieces // 2, share) + contents(pieces // 2, space - share)

    values = prices[lengths] + table(limit - 1)[capacity - lengths]
    combinations = np.stack([lengths, *contents(limit - 1, capacity - lengths)], axis=1)
    return -np.sort(-combinations, axis=1), float(values.max())


def _solve(columns: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The linear program over ``columns`` [C, K]: packs of each [C] and prices [L].

    Covering each length is enough, and a slot for one may serve the next shorter one that occurs: that changes no
    optimum, and keeps prices from falling where lengths grow, which saves most of the rounds.
    """
    from scipy import optimize, sparse  # here, as it takes longer to load than most packings take

    lengths = np.flatnonzero(counts)
    row_of = np.zeros(len(counts), np.int64)
    row_of[lengths] = np.arange(len(lengths))
    column, position = np.nonzero(columns)
    rows = row_of[columns[column, position]]
    cover = sparse.csc_array((np.ones(len(rows)), (rows, column)), shape=(len(lengths), len(columns)))
    steps = len(lengths) - 1
    # Column i takes a slot from length i + 1, counted among those that occur, and gives it to length i.
    down = sparse.eye_array(len(lengths), steps) - sparse.eye_array(len(lengths), steps, k=-1)
    scale = counts.sum() / 1e5  # to where the solver's absolute tolerances suit
    solved = optimize.linprog(
        np.concatenate([np.ones(len(columns)), np.zeros(steps)]),
        A_ub=-sparse.hstack([cover, down], format="csc"),
        b_ub=-counts[lengths] / scale,
        method="highs-ds",
    )
    if solved.status:
        raise RuntimeError(f"the linear program of the packing was not solved: {solved.message}")
    prices = np.zeros(len(counts))
    prices[lengths] = np.maximum(0.0, -solved.ineqlin.marginals)
    return np.maximum(0.0, solved.x[: len(columns)]) * scale, prices


def _at_own_lengths(
    columns: NDArray[np.int64], amounts: NDArray[np.float64], counts: NDArray[np.int64]
) -> dict[Combination, float]:
    """Amounts of combinations with exactly ``counts`` slots of each length.

    Longest first, slots that a length has too many of go to the next shorter one, and in the end are left out.
    """
    chosen = {
        tuple(int(length) for length in columns[index] if length): float(amounts[index])
        for index in np.flatnonzero(amounts > 1e-9)
    }
    lengths = [0, *np.flatnonzero(counts).tolist()]
    for shorter, longer in reversed(list(itertools.pairwise(lengths))):
        having = [each for each in chosen if longer in each]
        left = sum(chosen[each] * each.count(longer) for each in having) - float(counts[longer])
        for combination in having:
            while left > 1e-6 and longer in combination and chosen[combination] > 0:
                change = min(left, chosen[combination])
                place = combination.index(longer)
                others = (*combination[:place], *combination[place + 1 :])
                changed = tuple(sorted((*others, shorter), reverse=True)) if shorter else others
                chosen[combination] -= change
                chosen[changed] = chosen.get(changed, 0.0) + change
                left -= change
                combination = changed  # may hold the longer one again
    chosen.pop((), None)
    return chosen


def _rounded(chosen: Mapping[Combination, float], counts: NDArray[np.int64], limit: int) -> Counter[Combination]:
    """Whole packs: amounts rounded down, then one more of the largest fractions, then first-fit decreasing."""
    left = counts.tolist()
    packing: Counter[Combination] = Counter()

    def take(combination: Combination, packs: int) -> None:
        needed = Counter(combination)
        packs = min([packs, *(left[length] // number for length, number in needed.items())])
        if packs:
            packing[combination] += packs
            for length, number in needed.items():
                left[length] -= packs * number

    # An amount that falls short of a whole number by the solver's rounding is that number.
    for combination, amount in chosen.items():
        take(combination, int(amount + 1e-6))
    # Largest fraction first, then by content, so that equal arguments give equal packings.
    for combination in sorted(chosen, key=lambda each: (int(chosen[each]) - chosen[each], each)):
        take(combination, 1)
    packing.update(_first_fit_decreasing(np.array(left), limit))
    return packing
