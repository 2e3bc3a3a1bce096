"""Choice of a submission's runs from a longer series."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compliance.convergence.selection import FAILED, olympic_mean, select

TIMES = st.floats(1, 100) | st.just(FAILED)


def test_of_two_windows_the_slower_one() -> None:
    assert select(list(range(11)), [5.0, *[7.0] * 5, *[8.0] * 5]).window == 1
    assert select(list(range(11)), [*[8.0] * 5, *[7.0] * 5, 5.0]).window == 0


def test_a_series_whose_median_window_is_invalid_has_no_result() -> None:
    times = [*[10.0] * 8, FAILED, FAILED, 10.0, 10.0]
    assert select(list(range(12)), times).score == FAILED
    with pytest.raises(ValueError, match="9 runs, expected at least 10"):
        select(list(range(9)), [1.0] * 9)


@given(st.lists(st.tuples(st.integers(0, 50), TIMES), min_size=10, max_size=25))
def test_the_window_is_consecutive_and_its_score_in_the_middle(series: list[tuple[int, float]]) -> None:
    starts, times = [start for start, _ in series], [time for _, time in series]
    found = select(starts, times)
    order = sorted(range(len(series)), key=lambda run: starts[run])
    assert [*found.chosen] == order[found.window : found.window + 10]
    windows = [order[first : first + 10] for first in range(len(order) - 9)]
    assert found.scores == tuple(olympic_mean([times[run] for run in window]) for window in windows)
    assert found.score == olympic_mean([times[run] for run in found.chosen])
    faster = sum(score < found.score for score in found.scores)
    slower = sum(score > found.score for score in found.scores)
    assert faster <= len(found.scores) // 2
    assert slower <= (len(found.scores) - 1) // 2
