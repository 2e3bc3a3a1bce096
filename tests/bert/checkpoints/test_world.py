"""Division of a global batch among a changed number of ranks, and the log lines about the change."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bert.checkpoints.training_state import World, changes, rebalance_batch
from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import ParallelConfig

CONFIG = RECIPES["tiny_cpu"]()


def config(batch: int, steps: int = 1) -> Config:
    return replace(
        CONFIG, training=replace(CONFIG.training, global_batch_size=batch, gradient_accumulation_steps=steps)
    )


def hosts(count: int, ranks: int = 1) -> list[str]:
    return [f"h{host}" for host in range(count) for _ in range(ranks)]


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 8), st.lists(st.integers(1, 64), max_size=4))
def test_no_micro_batch_grows_however_often_ranks_change(batch: int, first: int, steps: int, then: list[int]) -> None:
    batch = max(batch, first * steps, *then, 1)
    made = config(batch, steps)
    world = World.of(hosts(first), made)
    fitting = world.sequences
    for ranks in then:
        made = rebalance_batch(made, world, ranks)
        world = World.of(hosts(ranks), made, world)
        assert made.training.global_batch_size == batch
        assert batch >= ranks * world.accumulation  # each micro-batch has a sequence or more
        assert world.fitting == max(fitting, world.sequences)
        assert world.sequences <= fitting or fitting == 1
        if world.accumulation > 1 and world.sequences <= fitting:  # fewer micro-batches would not fit
            assert -(-batch // (ranks * (world.accumulation - 1))) > fitting
        fitting = world.fitting


def test_shares_after_ranks_were_lost_and_came_back() -> None:
    """A pipeline keeps whole rounds: 3 micro-batches are no whole round of 2 stages."""
    made = config(448, 2)
    first = World.of(hosts(4, 8), made)
    fewer = World.of(hosts(3, 8), rebalance_batch(made, first, 24), first)
    assert (first.accumulation, first.sequences) == (2, 7)
    assert (fewer.accumulation, fewer.sequences, fewer.fitting) == (3, 7, 7)
    assert World.of(hosts(4, 8), rebalance_batch(made, fewer, 32), fewer) == first
    made = replace(config(64, 2), parallel=ParallelConfig(pipeline=2))
    first = World.of(hosts(4, 2), made)
    assert (first.accumulation, first.sequences) == (2, 8)
    assert rebalance_batch(made, first, 3).training.gradient_accumulation_steps == 4


def test_hosts_that_went_came_or_moved_are_named_with_the_shares() -> None:
    first = World.of(hosts(4, 2), config(32), sites=["a"] * 8)
    assert changes(first, first) == []
    then = World.of(["h0", "h0", "h1", "h9", "h9", "\x1b[2J"], config(32, 2), first, ["b"] * 6)
    ranks = "ranks on 4 hosts, a step of each with at most"
    assert changes(first, then) == [
        "lost: host h1 (1 rank), host h2 (2 ranks), host h3 (2 ranks)",
        r"gained: host \x1b[2J (1 rank), host h9 (2 ranks)",
        f"shares of the global batch: 6 {ranks} 2 x 3 sequences; before 8 {ranks} 1 x 4 sequences",
        "host h0 is at site b; before a",
        "host h1 is at site b; before a",
    ]
    more = World.of(hosts(4, 2), config(32, 4), first)
    assert changes(first, more) == [
        f"shares of the global batch: 8 {ranks} 4 x 1 sequence; before 8 {ranks} 1 x 4 sequences"
    ]
    for count, end in ((9, "host h7 (1 rank), host h8 (1 rank)"), (10, "host h8 (1 rank) and 1 more")):
        many = World.of(hosts(count), config(32))
        assert changes(many, World.of(["h0"], config(32)))[0].endswith(end)
