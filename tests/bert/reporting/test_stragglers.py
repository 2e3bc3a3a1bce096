"""Stragglers: which ranks are reported as slow, when, and when the report is withdrawn."""

import pytest

from bert.reporting.intervals import Stragglers
from compliance.log.records import Straggler


def same_work() -> Stragglers:
    """Return a detector for four ranks of one stage on two hosts."""
    return Stragglers(["n0", "n0", "n1", "n1"], [0] * 4, [""] * 4)


def test_a_rank_is_named_after_three_intervals_in_a_row_and_once_until_it_is_fast_again() -> None:
    """A fast interval resets the count of slow intervals."""
    ranks, said = same_work(), []
    for number, seconds in enumerate([0.15] * 2 + [0.1] + [0.15] * 8 + [0.1] * 3 + [0.15] * 3, 1):
        said += [(number, *found) for found in ranks.add([0.1, 0.1, 0.1, seconds])]
    slow = "rank 3 on host n1 is slow: 150.0 ms a step of its own, 1.50 times the median"
    fast = "rank 3 on host n1 is no longer slow: 100.0 ms a step of its own, 1.00 times the median"
    assert said == [
        (6, slow, Straggler(3, "n1", True, 150.0, 100.0)),
        (14, fast, Straggler(3, "n1", False, 100.0, 100.0)),
        (17, slow, Straggler(3, "n1", True, 150.0, 100.0)),
    ]


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        # The outlier 10.0 does not move the median with which ranks are compared.
        ([0.1, 0.1, 0.119, 10.0], "3 on host n1 is slow: 10000.0 ms a step of its own, 91.32 times"),
        ([0.1, 0.1, 0.121, 0.1], "2 on host n1 is slow: 121.0 ms a step of its own, 1.21 times"),
        ([1.0, 1.0, 1.0, 1.2], None),
        ([0.0, 0.0, 0.0, 0.5], "3 on host n1 is slow: 500.0 ms a step of its own, inf times"),
        ([0.0] * 4, None),
    ],
)
def test_the_measure_is_the_median_of_all(seconds: list[float], named: str | None) -> None:
    ranks = same_work()
    said = [text for _ in range(3) for text, _ in ranks.add(seconds)]
    assert said == ([] if named is None else [f"rank {named} the median"])


def test_ranks_are_compared_with_those_of_their_own_stage_and_named_with_their_place() -> None:
    """The ranks of one stage have twice the work. A rank of the other stage takes as long as they do, so it is slow."""
    places = [f" (data {rank // 2}, pipeline {rank % 2}, tensor 0)" for rank in range(6)]
    ranks = Stragglers(["n"] * 6, stages=[0, 1] * 3, places=places)
    *before, [(text, _)] = [ranks.add([0.1, 0.2, 0.2, 0.2, 0.1, 0.2]) for _ in range(3)]
    assert before == [[], []]
    assert text.startswith("rank 2 on host n (data 1, pipeline 0, tensor 0) is slow: 200.0 ms a step of its own, 2.00")
