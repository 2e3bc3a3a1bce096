"""The plan: every sample once an epoch, equal shares, balanced tokens, and the same for everybody."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloading.sampler import Plan, deal

HISTOGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "wikipedia_length_histogram.csv"


def plan(lengths: list[int], batch: int, world: int = 1, accumulation: int = 1, seed: int = 0) -> Plan:
    array = np.array(lengths)
    return Plan(array, np.maximum(1, array // 7), batch, world, accumulation, seed)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world, accumulation = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    rounds = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(3, 512), min_size=1, max_size=150))
    return plan(lengths, world * accumulation * rounds, world, accumulation, draw(st.integers(0, 2**31 - 1)))


@given(plans())
def test_each_epoch_holds_every_sample_exactly_once(made: Plan) -> None:
    samples, epochs = len(made.lengths), 3
    steps = -(-samples * epochs // made.global_batch_size)
    stream = np.concatenate([made.global_batch(step) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(plans(), st.integers(0, 20))
def test_ranks_share_the_global_batch_in_equal_numbers(made: Plan, step: int) -> None:
    shares = [made.rank_batches(step, rank) for rank in range(made.world_size)]
    assert {len(share) for share in shares} == {made.gradient_accumulation_steps}
    assert {len(micro.indices) for share in shares for micro in share} == {made.global_batch_size // made.lanes}
    union = np.concatenate([micro.indices for share in shares for micro in share])
    assert sorted(union) == sorted(made.global_batch(step))
    expected = (made.global_batch_size, int(made.masked_counts[made.global_batch(step)].sum()))
    assert {(micro.global_sequences, micro.global_masked) for share in shares for micro in share} == {expected}


@given(plans(), st.integers(0, 20))
def test_a_fresh_plan_agrees_whatever_was_asked_before(made: Plan, step: int) -> None:
    again = Plan(
        made.lengths,
        made.masked_counts,
        made.global_batch_size,
        made.world_size,
        made.gradient_accumulation_steps,
        made.seed,
    )
    made.global_batch(step + 7)
    assert np.array_equal(made.global_batch(step), again.global_batch(step))


def test_epochs_and_seeds_give_different_orders() -> None:
    lengths = list(range(3, 103))
    first = plan(lengths, 100, seed=1)
    assert not np.array_equal(first.global_batch(0), first.global_batch(1))
    assert not np.array_equal(first.global_batch(0), plan(lengths, 100, seed=2).global_batch(0))
    assert not np.array_equal(first.global_batch(0), np.arange(100))


def test_world_size_does_not_change_what_a_step_trains_on() -> None:
    lengths = list(range(3, 203))
    assert np.array_equal(plan(lengths, 24, world=1).global_batch(5), plan(lengths, 24, world=8).global_batch(5))


def wikipedia_lengths(count: int, seed: int) -> np.ndarray:
    with HISTOGRAM.open(encoding="utf-8") as file:
        rows = [(int(row["length"]), int(row["count"])) for row in csv.DictReader(file)]
    lengths, counts = np.array(rows).T
    return np.random.default_rng(seed).choice(lengths, count, p=counts / counts.sum())


def test_tokens_are_balanced_at_64_ranks_of_48_sequences() -> None:
    lengths = wikipedia_lengths(64 * 48 * 20, seed=1)
    made = Plan(lengths, lengths // 7, 64 * 48, 64, 1, seed=3)
    imbalances = []
    for step in range(20):
        tokens = [made.lengths[made.rank_batches(step, rank)[0].indices].sum() for rank in range(64)]
        imbalances.append(max(tokens) / np.mean(tokens))
    assert np.mean(imbalances) < 1.003


def test_deal_is_a_snake() -> None:
    assert deal(np.array([1, 2, 3, 4, 5, 6]), 3).tolist() == [[5, 0], [4, 1], [3, 2]]


@pytest.mark.parametrize(
    ("lengths", "batch", "world", "accumulation", "message"),
    [
        ([], 4, 1, 1, "holds no samples"),
        ([5, 6], 3, 2, 1, "multiple of 2"),
        ([5, 6], 4, 2, 3, "multiple of 6"),
        ([5, 6], 0, 1, 1, "at least 1"),
    ],
)
def test_impossible_plans_say_what_to_change(
    lengths: list[int], batch: int, world: int, accumulation: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(lengths, batch, world, accumulation)
