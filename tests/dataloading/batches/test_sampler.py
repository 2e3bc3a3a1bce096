"""The batch sampler: every sample once per epoch, ranks with equal shares, equal results everywhere, and shape buckets."""

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.model.histogram import drawn_lengths
from dataloading.batches.permutation import shuffled
from dataloading.batches.sampler import BatchSampler, ShapeBucket, choose_shape_buckets, cost, deal, draw_sizes, fitting

pytestmark = pytest.mark.slow


def sampler(lengths: list[int], batch: int, world: int = 1, accumulation: int = 1, seed: int = 0) -> BatchSampler:
    array = np.array(lengths)
    return BatchSampler(array, np.maximum(1, array // 7), batch, world, accumulation, seed)


@st.composite
def samplers(draw: st.DrawFn) -> BatchSampler:
    world, accumulation = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    batch = draw(st.integers(1, 6)) * world * accumulation + draw(st.integers(0, world * accumulation - 1))
    lengths = draw(st.lists(st.integers(3, 512), min_size=1, max_size=150))
    return sampler(lengths, batch, world, accumulation, draw(st.integers(0, 2**31 - 1)))


@given(samplers())
def test_each_epoch_holds_every_sample_exactly_once(made: BatchSampler) -> None:
    samples, epochs = len(made.lengths), 3
    steps = -(-samples * epochs // made.global_batch_size)
    stream = np.concatenate([made.global_batch(step) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(samplers(), st.integers(0, 20))
def test_ranks_divide_the_global_batch_and_agree_on_its_counts(made: BatchSampler, step: int) -> None:
    """``replace`` copies the sampler without its cached batches. The copy must give the same batches as the original."""
    batch = replace(made).global_batch(step)
    shares = [made.rank_batches(step, rank) for rank in range(made.world_size)]
    assert {len(share) for share in shares} == {made.gradient_accumulation_steps}
    sizes = [len(micro.indices) for share in shares for micro in share]
    assert min(sizes) >= 1
    assert max(sizes) == -(-made.global_batch_size // made.micro_batches)
    union = np.concatenate([micro.indices for share in shares for micro in share])
    (whole,) = replace(made, world_size=1, gradient_accumulation_steps=1).rank_batches(step, 0)
    assert sorted(union) == sorted(whole.indices) == sorted(batch)
    expected = (made.global_batch_size, int(made.masked_counts[batch].sum()))
    micro_batches = [whole, *(micro for share in shares for micro in share)]
    assert {(micro.global_sequences, micro.global_masked) for micro in micro_batches} == {expected}
    for turn in zip(*shares, strict=True):
        most = tuple(
            max(int(sizes[micro.indices].sum()) for micro in turn) for sizes in (made.lengths, made.masked_counts)
        )
        assert {(micro.largest_tokens, micro.largest_masked) for micro in turn} == {most}


def test_a_step_of_a_large_data_set_takes_little_memory() -> None:
    samples = 156_000_000
    index = np.broadcast_to(np.uint16(100), samples)  # broadcast, so that it needs no memory
    made = BatchSampler(index, index, 16384, 4096, 1, seed=9)
    last = samples // 16384  # this batch spans the end of the first epoch and the start of the second
    tracemalloc.start()
    made.global_batch(last)
    made.rank_batches(last, 4095)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def test_deal_returns_the_recorded_micro_batches() -> None:
    """Never update the expected micro-batches: if they changed, a new version could not reproduce an old run."""
    lengths = np.array([512, 500, 430, 300, 300, 222, 128, 128, 90, 64, 40, 40, 20, 8, 5])
    assert deal(lengths, 4).tolist() == [[0, 7, 10, 13], [1, 6, 9, -1], [2, 5, 11, 14], [3, 4, 8, 12]]
    assert deal(lengths, 5).tolist() == [[0, 11, 13], [1, 9, 14], [2, 7, 12], [4, 6, 8], [3, 5, 10]]
    assert deal(lengths[:4], 4).tolist() == [[0], [1], [2], [3]]
    assert deal(lengths[:8], 4).tolist() == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert deal(lengths[:6], 2).tolist() == [[0, 4, 3], [1, 2, 5]]
    assert deal(lengths[::-1].copy(), 1).tolist() == [[14, 13, 12, 10, 11, 9, 7, 8, 6, 5, 3, 4, 2, 1, 0]]
    for sequences, expected in ((16, [25675699, 25651008, 25678101]), (17, [27385215, 27366762, 27348345])):
        lengths = np.arange(3 * sequences) * 7919 % 508 + 5
        assert cost(lengths)[deal(lengths, 3)].sum(axis=1).tolist() == expected


def test_empty_data_sets_and_batches_too_small_for_the_ranks_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"holds no samples: check data\.train"):
        sampler([], 4)
    for sizes in ((5, 2, 3), (0, 1, 1)):
        with pytest.raises(
            ValueError, match=rf"training\.global_batch_size {sizes[0]} leaves some .* without a sequence"
        ):
            sampler([5, 6], *sizes)
    assert sampler([5, 6], 6, 2, 3).micro_batches == 6


def test_cost_is_proportional_to_the_encoders_operations() -> None:
    layers, hidden, tokens = 24, 1024, np.array([1, 128, 512])
    operations = 3 * layers * (24 * hidden**2 * tokens + 4 * hidden * tokens**2)
    assert (cost(tokens.astype(np.uint16)) * 12 * layers * hidden == operations).all()


def whole(count: int, seed: int = 5, epoch: int = 0) -> NDArray[np.int64]:
    return shuffled(np.arange(count), count, seed, epoch)


def test_orders_of_up_to_1200_items_are_permutations() -> None:
    """Computing the order for some positions gives the same results as computing the whole permutation."""
    for count in range(1, 1201):
        places = whole(count, seed=count, epoch=count % 3)
        assert (np.bincount(places, minlength=count) == 1).all(), count
        assert shuffled(np.arange(0, count, 7), count, count, count % 3).tolist() == places[::7].tolist(), count


def test_orders_equal_the_recorded_orders() -> None:
    """Never update the expected orders: if they changed, a new version could not reproduce an old run."""
    assert whole(12, seed=0, epoch=0).tolist() == [4, 9, 2, 5, 6, 3, 11, 7, 10, 8, 1, 0]
    assert whole(12, seed=2**31 - 1, epoch=7).tolist() == [3, 7, 10, 5, 8, 11, 1, 9, 4, 0, 6, 2]
    far = np.array([0, 1, 2, 78_000_000, 155_999_999])
    assert shuffled(far, 156_000_000, 1234, 3).tolist() == [95952205, 867970, 125428182, 6572966, 100052943]
    assert shuffled(np.array([0, 2**62 - 1]), 2**62, 1, 1).tolist() == [4146077551274580684, 723928504000642121]


SIZES = st.lists(st.tuples(st.integers(8, 4000), st.integers(0, 8)), min_size=1, max_size=40)


def waste(shape_buckets: list[ShapeBucket], tokens_N: np.ndarray) -> float:
    """Return the fraction of token slots that are padding."""
    sizes = np.array([shape_bucket.tokens for shape_bucket in shape_buckets])
    return 1 - tokens_N.sum() / sizes[np.searchsorted(sizes, tokens_N, side="right")].sum()


@given(SIZES, st.integers(1, 6))
def test_every_drawn_size_fits_a_shape_bucket(sizes: list[tuple[int, int]], most: int) -> None:
    tokens_N, masked_N = np.array(sizes).T
    shape_buckets = choose_shape_buckets(tokens_N, masked_N, sequences=8, max_seqlen=512, most=most)
    assert 1 <= len(shape_buckets) <= most
    tokens = [shape_bucket.tokens for shape_bucket in shape_buckets]
    assert tokens == sorted(set(tokens))
    for shape_bucket in shape_buckets:
        assert shape_bucket.tokens % 64 == shape_bucket.masked % 16 == 0
        assert (shape_bucket.sequences, shape_bucket.max_seqlen) == (8, 512)
    for tokens, masked in sizes:
        chosen = fitting(ShapeBucket.around(tokens, 8, masked, 512), shape_buckets)
        assert chosen in shape_buckets
        assert chosen.tokens > tokens
        assert chosen.masked >= masked
        assert not any(tokens < shape_bucket.tokens < chosen.tokens for shape_bucket in shape_buckets)


@given(st.lists(st.integers(1, 1200), min_size=1, max_size=12), st.integers(1, 4))
def test_no_other_bucket_sizes_need_less_padding(tokens: list[int], most: int) -> None:
    """Compare the padding of the chosen bucket sizes with the padding of every other choice with the same largest bucket."""
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
def test_the_last_shape_bucket_is_larger_than_the_largest_drawn_size(max_seqlen: int, most_tokens: int) -> None:
    """1000 + (1000 - 400) / 4 = 1150 tokens and an unused row need 1152 slots. Eight sequences of 128 need 1088 slots."""
    chosen = choose_shape_buckets(np.array([100, 200, 300, 1000]), np.array([15, 30, 44, 150]), 8, max_seqlen, most=3)
    expected = ((128, 32), (320, 48), (most_tokens, 176))  # masked: 15 % of the tokens, rounded up to multiples of 16
    assert chosen == [ShapeBucket(tokens, 8, masked, max_seqlen) for tokens, masked in expected]


def test_a_batch_that_fits_no_shape_bucket_gets_a_new_one() -> None:
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


def test_shape_buckets_for_wikipedia_have_less_than_one_percent_padding() -> None:
    """Choose buckets for one GPU's recipe (four micro-batches of 64) and test them on other batches."""
    lengths = drawn_lengths(np.random.default_rng(5), 200_000).astype(np.uint16)
    masked_counts = np.minimum(76, np.maximum(1, np.rint(0.15 * lengths))).astype(np.uint16)
    tokens_N, masked_N = draw_sizes(lengths, masked_counts, 256, 4)
    shape_buckets = choose_shape_buckets(tokens_N, masked_N, 64, 512)
    assert len(tokens_N) == len(masked_N) == 2048
    assert len(draw_sizes(lengths, masked_counts, 40, 40)[0]) == 64 * 40
    both = draw_sizes(np.array([500, 3]), np.array([7, 1]), 4, 2)  # either sample may be drawn any number of times
    assert [set(sizes.tolist()) for sizes in both] == [{6, 503, 1000}, {2, 8, 14}]
    assert [int(sizes.sum()) for sizes in draw_sizes(np.full(9, 7), np.full(9, 2), 8, 2)] == [2048 * 28, 2048 * 8]
    np.testing.assert_array_equal(draw_sizes(lengths, masked_counts, 256, 4), (tokens_N, masked_N))  # reproducible
    assert np.ptp(tokens_N.reshape(-1, 4), axis=1).max() < 512, "the micro-batches of a step are balanced"
    made = BatchSampler(lengths, masked_counts, 256, 1, 4, seed=1)
    tokens_N = np.array([lengths[each.indices].sum() for step in range(500) for each in made.rank_batches(step, 0)])
    assert (tokens_N < shape_buckets[-1].tokens).mean() >= 0.999
    assert waste(shape_buckets, np.minimum(tokens_N, shape_buckets[-1].tokens - 1)) < 0.01
