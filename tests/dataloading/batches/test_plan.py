"""The batch plan: every sample once per epoch, ranks with equal numbers of samples and tokens, and reproducibility."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloading.batches.permutation import shuffled
from dataloading.batches.plan import BatchPlan, cost, deal

pytestmark = pytest.mark.slow


def plan(lengths: list[int], batch: int, world: int = 1, accumulation: int = 1, seed: int = 0) -> BatchPlan:
    array = np.array(lengths)
    return BatchPlan(array, np.maximum(1, array // 7), batch, world, accumulation, seed)


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    world, accumulation = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    batch = draw(st.integers(1, 6)) * world * accumulation + draw(st.integers(0, world * accumulation - 1))
    lengths = draw(st.lists(st.integers(3, 512), min_size=1, max_size=150))
    return plan(lengths, batch, world, accumulation, draw(st.integers(0, 2**31 - 1)))


@given(plans())
def test_each_epoch_holds_every_sample_exactly_once(made: BatchPlan) -> None:
    samples, epochs = len(made.lengths), 3
    steps = -(-samples * epochs // made.global_batch_size)
    stream = np.concatenate([made.global_batch(step) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(plans(), st.integers(0, 20))
def test_ranks_share_what_one_alone_trains_on_in_numbers_as_equal_as_may_be(made: BatchPlan, step: int) -> None:
    """``replace`` copies the plan without its cached batches. The copy must give the same batches as the original."""
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


def test_a_step_costs_what_its_global_batch_does() -> None:
    samples = 156_000_000
    index = np.broadcast_to(np.uint16(100), samples)  # broadcast, so that it needs no memory
    made = BatchPlan(index, index, 16384, 4096, 1, seed=9)
    last = samples // 16384  # this batch spans the end of the first epoch and the start of the second
    tracemalloc.start()
    border = made.global_batch(last)
    made.rank_batches(last, 4095)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    ending = samples - last * 16384
    assert border.tolist() == [
        *shuffled(np.arange(samples - ending, samples), samples, 9, epoch=0),
        *shuffled(np.arange(16384 - ending), samples, 9, epoch=1),
    ]


def test_dealing_never_changes() -> None:
    """Never update the expected micro-batches: if they changed, a new version could not reproduce an old run."""
    lengths = np.array([512, 500, 430, 300, 300, 222, 128, 128, 90, 64, 40, 40, 20, 8, 5])
    assert deal(lengths, 4).tolist() == [[0, 7, 10, 13], [1, 6, 9, -1], [2, 5, 11, 14], [3, 4, 8, 12]]
    assert deal(lengths, 5).tolist() == [[0, 11, 13], [1, 9, 14], [2, 7, 12], [4, 6, 8], [3, 5, 10]]
    assert deal(lengths[:4], 4).tolist() == [[0], [1], [2], [3]]
    assert deal(lengths[::-1].copy(), 1).tolist() == [[14, 13, 12, 10, 11, 9, 7, 8, 6, 5, 3, 4, 2, 1, 0]]
    for sequences, expected in ((16, [25675699, 25651008, 25678101]), (17, [27385215, 27366762, 27348345])):
        lengths = np.arange(3 * sequences) * 7919 % 508 + 5
        assert cost(lengths)[deal(lengths, 3)].sum(axis=1).tolist() == expected


def test_impossible_plans_say_what_to_change() -> None:
    for sizes, message in (
        (([], 4, 1, 1), "holds no samples"),
        (([5, 6], 5, 2, 3), "without a sequence"),
        (([5, 6], 0, 1, 1), "without a sequence"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(*sizes)


def test_cost_is_in_proportion_to_the_encoders_operations() -> None:
    layers, hidden = 24, 1024
    lengths = np.array([1, 128, 512], np.uint16)
    tokens = lengths.astype(np.int64)
    operations = 3 * layers * (24 * hidden**2 * tokens + 4 * hidden * tokens**2)
    assert (cost(lengths) * 12 * layers * hidden == operations).all()
