"""Shape buckets fit all micro-batches that they were chosen for and minimize padding. Other batches get their own."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.model.histogram import drawn_lengths
from dataloading.batches.plan import (
    MASKED_MULTIPLE,
    TOKENS_MULTIPLE,
    BatchPlan,
    ShapeBucket,
    choose_shape_buckets,
    draw_sizes,
    fitting,
)

SIZES = st.lists(st.tuples(st.integers(8, 4000), st.integers(0, 8)), min_size=1, max_size=40)


def waste(shape_buckets: list[ShapeBucket], tokens_N: np.ndarray) -> float:
    """Return the fraction of token slots that are padding."""
    sizes = np.array([shape_bucket.tokens for shape_bucket in shape_buckets])
    return 1 - tokens_N.sum() / sizes[np.searchsorted(sizes, tokens_N, side="right")].sum()


@given(SIZES, st.integers(1, 6))
def test_what_was_drawn_fits_and_sizes_suit_the_kernels(sizes: list[tuple[int, int]], most: int) -> None:
    tokens_N, masked_N = np.array(sizes).T
    shape_buckets = choose_shape_buckets(tokens_N, masked_N, sequences=8, max_seqlen=512, most=most)
    assert 1 <= len(shape_buckets) <= most
    tokens = [shape_bucket.tokens for shape_bucket in shape_buckets]
    assert tokens == sorted(set(tokens))
    for shape_bucket in shape_buckets:
        assert shape_bucket.tokens % TOKENS_MULTIPLE == shape_bucket.masked % MASKED_MULTIPLE == 0
        assert (shape_bucket.sequences, shape_bucket.max_seqlen) == (8, 512)
    for tokens, masked in sizes:
        chosen = fitting(ShapeBucket.around(tokens, 8, masked, 512), shape_buckets)
        assert chosen in shape_buckets
        assert chosen.tokens > tokens
        assert chosen.masked >= masked
        assert not any(tokens < shape_bucket.tokens < chosen.tokens for shape_bucket in shape_buckets)


@given(st.lists(st.integers(1, 1200), min_size=1, max_size=12), st.integers(1, 4))
def test_no_other_boundaries_waste_less(tokens: list[int], most: int) -> None:
    """Compare with every other choice of bucket sizes that has the same largest bucket."""
    tokens_N = np.array(tokens)
    chosen = choose_shape_buckets(tokens_N, np.ones_like(tokens_N), sequences=1200, max_seqlen=512, most=most)
    candidates = sorted({-(-(count + 1) // 64) * 64 for count in tokens} - {chosen[-1].tokens})
    wastes = [
        waste([ShapeBucket(size, 1200, 16, 512) for size in (*sizes, chosen[-1].tokens)], tokens_N)
        for count in range(min(most - 1, len(candidates)) + 1)
        for sizes in itertools.combinations(candidates, count)
    ]
    assert waste(chosen, tokens_N) == pytest.approx(min(wastes))


@pytest.mark.parametrize(("max_seqlen", "most_tokens"), [(512, 1152), (128, 1088)])
def test_the_last_bucket_exceeds_the_largest_size_by_a_quarter_of_its_distance_from_the_mean(
    max_seqlen: int, most_tokens: int
) -> None:
    """1000 + (1000 - 400) / 4 = 1150 tokens and an unused row are 1152 slots, unless 8 sequences have at most 1024."""
    chosen = choose_shape_buckets(np.array([100, 200, 300, 1000]), np.array([15, 30, 44, 150]), 8, max_seqlen, most=3)
    expected = ((128, 32), (320, 48), (most_tokens, 176))  # 15 % of the slots, in multiples of 16
    assert chosen == [ShapeBucket(tokens, 8, masked, max_seqlen) for tokens, masked in expected]


def test_a_batch_that_fits_nothing_gets_a_shape_bucket_of_its_own() -> None:
    assert [ShapeBucket.around(tokens, 1, masked, 1) for tokens, masked in ((63, 0), (64, 16), (127, 17))] == [
        ShapeBucket(tokens, 1, masked, 1) for tokens, masked in ((64, 16), (128, 16), (128, 32))
    ]
    shape_buckets = [ShapeBucket(128, 4, 16, 64), ShapeBucket(256, 4, 32, 64)]
    for sizes in ((320, 4, 16, 64), (64, 5, 16, 64), (64, 4, 48, 64), (64, 4, 16, 65)):
        assert fitting(ShapeBucket(*sizes), shape_buckets) == ShapeBucket(*sizes)
    assert fitting(ShapeBucket.around(127, 4, 3, 64), shape_buckets) == shape_buckets[0]
    # 128 tokens do not fit into 128 slots, because a bucket needs at least one padding token.
    assert fitting(ShapeBucket.around(128, 4, 3, 64), shape_buckets) == shape_buckets[1]
    assert fitting(ShapeBucket.around(100, 4, 17, 60), shape_buckets) == shape_buckets[1]


def test_wikipedia_wastes_less_than_one_percent_and_starts_at_once() -> None:
    """Choose buckets for one GPU's recipe (four micro-batches of 64) and test them on other batches."""
    lengths = drawn_lengths(np.random.default_rng(5), 200_000).astype(np.uint16)
    masked_counts = np.minimum(76, np.maximum(1, np.rint(0.15 * lengths))).astype(np.uint16)
    begin = time.process_time()
    tokens_N, masked_N = draw_sizes(lengths, masked_counts, 256, 4)
    shape_buckets = choose_shape_buckets(tokens_N, masked_N, 64, 512)
    assert time.process_time() - begin < 5
    assert len(tokens_N) == len(masked_N) == 2048
    assert len(draw_sizes(lengths, masked_counts, 40, 40)[0]) == 64 * 40
    assert [int(sizes.sum()) for sizes in draw_sizes(np.full(9, 7), np.full(9, 2), 8, 2)] == [2048 * 28, 2048 * 8]
    np.testing.assert_array_equal(draw_sizes(lengths, masked_counts, 256, 4), (tokens_N, masked_N))  # as on other ranks
    assert np.ptp(tokens_N.reshape(-1, 4), axis=1).max() < 512, "the micro-batches of a step are balanced"
    plan = BatchPlan(lengths, masked_counts, 256, 1, 4, seed=1)
    needed = [
        ShapeBucket.around(int(lengths[micro.indices].sum()), 64, int(masked_counts[micro.indices].sum()), 512)
        for step in range(500)
        for micro in plan.rank_batches(step, 0)
    ]
    chosen = [fitting(shape_bucket, shape_buckets) for shape_bucket in needed]
    assert sum(shape_bucket in shape_buckets for shape_bucket in chosen) >= 0.999 * len(chosen)
    slots, used = (sum(shape_bucket.tokens for shape_bucket in some) for some in (chosen, needed))
    assert 1 - used / slots < 0.01
    assert waste(shape_buckets, tokens_N) < 0.01
