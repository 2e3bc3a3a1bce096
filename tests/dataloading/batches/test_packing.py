"""Packing places every sequence once, respects limits, needs few packs more than the lower bound, and is reproducible."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.model.histogram import drawn_lengths, length_counts
from dataloading.batches import packing
from dataloading.batches.packing import (
    PackingStrategy,
    _first_fit_decreasing,
    _rounded,
    pack_histogram,
    pack_samples,
)

pytestmark = pytest.mark.slow

LENGTHS, COUNTS = length_counts()
WIKIPEDIA = np.bincount(LENGTHS, COUNTS).astype(np.int64)


def assert_packs_the_histogram(strategy: PackingStrategy, histogram: list[int], limit: int | None) -> None:
    packed: Counter[int] = Counter()
    for lengths, count in zip(strategy.combinations, strategy.counts, strict=True):
        assert count >= 1
        assert 0 < sum(lengths) <= strategy.capacity
        assert limit is None or len(lengths) <= limit
        assert list(lengths) == sorted(lengths, reverse=True)
        for length in lengths:
            packed[length] += count
    assert packed == {length: count for length, count in enumerate(histogram) if count}
    assert len(set(strategy.combinations)) == len(strategy.combinations)
    assert strategy.bound <= strategy.packs
    assert strategy.efficiency <= strategy.efficiency_bound <= 1


CAPACITIES = st.sampled_from([1, 8, 17, 128, 512])
LIMITS = st.sampled_from([1, 2, 3, 4, 5, 12, None])


@st.composite
def histograms(draw: st.DrawFn) -> tuple[list[int], int, int | None]:
    capacity, most = draw(CAPACITIES), draw(st.sampled_from([30, 200_000]))
    sparse = draw(st.dictionaries(st.integers(1, capacity), st.integers(1, most), max_size=25))
    return [sparse.get(length, 0) for length in range(capacity + 1)], capacity, draw(LIMITS)


@given(histograms())
@example(([0] * 513, 512, 3))
@example(([0] * 512 + [1000], 512, 3))
@example(([0, 1000], 512, 3))
@example(([0, 1000], 512, None))
@example(
    (np.bincount([1, 26, 35], [1, 32, 37]).astype(int).tolist(), 128, 12)
)  # the linear program's solution has many slots for the one sequence of length 1
@example((np.bincount([75, 118, 160, 258], [4302, 190_691, 1, 1]).astype(int).tolist(), 512, 5))  # has many solutions
def test_every_sequence_is_packed_once_within_limits(given_: tuple[list[int], int, int | None]) -> None:
    histogram, capacity, limit = given_
    strategy = pack_histogram(histogram, capacity, limit)
    assert_packs_the_histogram(strategy, histogram, limit)
    assert strategy == pack_histogram(np.array(histogram), capacity, limit)
    assert strategy.packs <= strategy.bound * 1.0002 + 2  # tolerance for rounding
    tokens = sum(length * count for length, count in enumerate(histogram))
    assert strategy.efficiency == (tokens / (strategy.packs * capacity) if tokens else 1)


@given(st.lists(st.integers(1, 20), max_size=60), st.sampled_from([1, 2, 3, 20]))
def test_first_fit_decreasing_gives_the_packs_of_a_plain_implementation(lengths: list[int], limit: int) -> None:
    packs: list[tuple[int, ...]] = []
    for length in sorted(lengths, reverse=True):
        fits = (place for place, pack in enumerate(packs) if sum(pack) + length <= 20 and len(pack) < limit)
        place = next(fits, len(packs))
        packs[place : place + 1] = [(*packs[place], length) if place < len(packs) else (length,)]
    assert _first_fit_decreasing(np.bincount(lengths, minlength=21), limit) == Counter(packs)
    assert pack_histogram(np.bincount(lengths, minlength=1), 20, limit).packs <= len(packs)


def test_packing_is_optimal_where_first_fit_decreasing_is_not() -> None:
    """51 + 26 + 23 and 27 + 27 + 23 + 23 are full packs, but first-fit decreasing puts 27 beside 51."""
    for times in (1, 5000):
        histogram = np.bincount([51, 27, 26, 23], np.array([6, 6, 6, 12]) * times).astype(np.int64)
        assert _first_fit_decreasing(np.append(histogram, [0] * 49), 4).total() == 11 * times
        strategy = pack_histogram(histogram, 100, None)
        expected = {(51, 26, 23): 6 * times, (27, 27, 23, 23): 3 * times}
        assert dict(zip(strategy.combinations, strategy.counts, strict=True)) == expected
        assert (strategy.packs, strategy.bound, strategy.tokens) == (9 * times, 9 * times, 900 * times)
        assert (strategy.efficiency, strategy.efficiency_bound) == (1, 1)
    for histogram, capacity, limit, packs, bound in (
        ([0] * 170 + [3, 3, 3], 512, 3, 4, 4),  # 1539 tokens need 4 packs of 512
        ([0] * 7 + [198] + [0] * 107 + [107], 128, None, 113, 113),  # 107 packs of 115 + 7, then packs of 18 x 7
        ([0, 7], 8, 2, 4, 4),
    ):
        strategy = pack_histogram(histogram, capacity, limit)
        assert (strategy.packs, strategy.bound) == (packs, bound)
    half = PackingStrategy(10, ((5, 5), (3,)), (2, 1), 2)
    assert (half.packs, half.tokens, half.efficiency, half.efficiency_bound) == (3, 23, 23 / 30, 23 / 20)


def test_fractional_packs_are_rounded_and_every_sequence_is_packed() -> None:
    counts = np.array([0, 0, 0, 2, 0, 3])
    assert _rounded({(5, 5): 0.9999999, (5, 3): 0.3, (3,): 0.4}, counts, 2) == {(5, 5): 1, (3,): 1, (5, 3): 1}
    assert _rounded({(3, 3): 0.4, (5,): 0.3}, counts, 2) == {(3, 3): 1, (5,): 3}


@pytest.mark.parametrize(
    ("limit", "efficiency", "most"),
    [(1, 0.49966, 0), (2, 0.80545, 2), (3, 0.99883, 13), (12, 0.99983, 15), (None, 0.99983, 10)],
)
def test_wikipedia_is_packed_close_to_the_bound_in_few_rounds(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, efficiency: float, most: int
) -> None:
    rounds: list[int] = []
    monkeypatch.setattr(packing, "_solve", lambda *given, solve=packing._solve: (rounds.append(0), solve(*given))[1])
    strategy = pack_histogram(WIKIPEDIA, 512, limit)
    assert_packs_the_histogram(strategy, WIKIPEDIA.tolist(), limit)
    assert strategy.efficiency >= efficiency
    assert strategy.efficiency_bound - strategy.efficiency < 2e-6
    assert len(rounds) <= most


def test_invalid_histograms_and_limits_are_rejected() -> None:
    counts = "a number of sequences for each length, and none of length 0"
    for histogram, capacity, limit, message in (
        *(([0, 1, -2], 8, 3, counts), ([1, 1], 8, 3, counts), ([0, 1.0], 8, 3, counts), ([[0, 1]], 8, 3, counts)),
        ([0] * 9 + [1], 8, 3, "sequences of 9 tokens; expected at most 8, the capacity"),
        ([0, 1], 8, 0, "max_sequences is 0; expected at least 1"),
        ([0], 0, None, "capacity is 0; expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_histogram(histogram, capacity, limit)
    with pytest.raises(ValueError, match="513 tokens"):
        pack_samples(np.array([5, 513]))


@given(st.lists(st.integers(1, 64), max_size=300), st.sampled_from([1, 2, 3, None]), st.integers(0, 2**31 - 1))
def test_packed_samples_follow_the_strategy_and_the_seed(values: list[int], limit: int | None, seed: int) -> None:
    lengths = np.array(values, np.uint16)
    packs = pack_samples(lengths, 64, limit, seed)
    strategy = pack_histogram(np.bincount(lengths, minlength=1), 64, limit)
    assert sorted(packs.samples) == list(range(len(values)))
    packed = Counter(
        tuple(lengths[packs.samples[start:stop]].tolist()) for start, stop in itertools.pairwise(packs.offsets)
    )
    assert packed == dict(zip(strategy.combinations, strategy.counts, strict=True))
    again = pack_samples(lengths, 64, limit, seed)
    assert np.array_equal(packs.samples, again.samples)


def test_packs_and_samples_of_equal_length_are_in_random_order() -> None:
    lengths = drawn_lengths(np.random.default_rng(0), 20_000).astype(np.uint16)
    first, other = pack_samples(lengths, seed=1), pack_samples(lengths, seed=2)
    assert not np.array_equal(first.samples, other.samples)
    longest = lengths[first.samples[first.offsets[:-1]]].astype(float)
    assert abs(np.corrcoef(longest, np.arange(len(first)))[0, 1]) < 0.05
    of_equal_length = first.samples[lengths[first.samples] == 512]
    assert abs(np.corrcoef(of_equal_length, np.arange(len(of_equal_length)))[0, 1]) < 0.05
