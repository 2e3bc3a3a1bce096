"""Stragglers: which ranks are reported as slow, when, and when the report is withdrawn."""

import pytest

from bert.reporting.intervals import Stragglers

INTERVALS, RATIO = 3, 1.2


def same_work() -> Stragglers:
    """Return a detector for four ranks of one stage on two hosts."""
    return Stragglers(["n0", "n0", "n1", "n1"], [0] * 4, [""] * 4)


def said_by(ranks: Stragglers, seconds: list[float]) -> list[str]:
    return [text for text, _ in ranks.add(seconds)]


def interval(slow: float = 1.0, rank: int = 3) -> list[float]:
    """Return the seconds per step of four ranks: 0.1 each, but ``slow`` times as long for ``rank``."""
    return [0.1 * slow if place == rank else 0.1 for place in range(4)]


def test_a_rank_is_named_after_some_intervals_in_a_row_and_once_until_it_is_fast_again() -> None:
    """A fast interval resets the count of slow intervals."""
    ranks = same_work()
    said = []
    for slow, intervals in ((1.5, INTERVALS - 1), (1.0, 1), (1.5, INTERVALS + 5), (1.0, INTERVALS), (1.5, INTERVALS)):
        said.append([line for _ in range(intervals) for line in said_by(ranks, interval(slow))])
    slow = "rank 3 on host n1 is slow: 150.0 ms a step of its own, 1.50 times the median"
    fast = "rank 3 on host n1 is no longer slow: 100.0 ms a step of its own, 1.00 times the median"
    assert said == [[], [], [slow], [fast], [slow]]
    ranks = same_work()
    assert [bool(ranks.add(interval(1.5))) for _ in range(INTERVALS + 1)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        # The outlier 10.0 does not move the median with which ranks are compared.
        ([0.1, 0.1, 0.1 * (RATIO - 0.01), 10.0], "3 on host n1 is slow: 10000.0 ms a step of its own, 91.32 times"),
        ([0.1, 0.1, 0.1 * (RATIO + 0.01), 0.1], "2 on host n1 is slow: 121.0 ms a step of its own, 1.21 times"),
        ([0.1, 0.1, 0.1 * (RATIO - 0.01), 0.1], None),
        ([0.0, 0.0, 0.0, 0.5], "3 on host n1 is slow: 500.0 ms a step of its own, inf times"),
        ([0.0] * 4, None),
    ],
)
def test_the_measure_is_the_median_of_all(seconds: list[float], named: str | None) -> None:
    ranks = same_work()
    said = [line for _ in range(INTERVALS) for line in said_by(ranks, seconds)]
    assert said == ([] if named is None else [f"rank {named} the median"])


def test_ranks_are_compared_with_those_of_their_own_stage_and_named_with_their_place() -> None:
    """The ranks of one stage have twice the work. A rank of the other stage takes as long as they do, so it is slow."""
    places = [f" (data {rank // 2}, pipeline {rank % 2}, tensor 0)" for rank in range(6)]
    ranks = Stragglers(["n"] * 6, stages=[0, 1] * 3, places=places)
    said = [said_by(ranks, [0.1, 0.2, 0.2, 0.2, 0.1, 0.2]) for _ in range(INTERVALS)]
    expected = (
        "rank 2 on host n (data 1, pipeline 0, tensor 0) is slow: 200.0 ms a step of its own, 2.00 times the median"
    )
    assert said == [[]] * (INTERVALS - 1) + [[expected]]
