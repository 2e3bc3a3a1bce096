"""The order of an epoch: a permutation for every n, uniform as far as statistics can see, and the same for ever."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataloading.batches import permutation
from dataloading.batches.permutation import shuffled

pytestmark = pytest.mark.slow

COUNT = 10_000
ORDERS = 200


def whole(count: int, seed: int = 5, epoch: int = 0) -> NDArray[np.int64]:
    return shuffled(np.arange(count), count, seed, epoch)


def test_every_small_n_is_permuted() -> None:
    for count in range(1, 1201):
        assert (np.bincount(whole(count, seed=count), minlength=count) == 1).all(), count


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.data())
def test_any_n_gives_distinct_things_below_n_and_the_same_ones_alone(
    count: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=50, unique=True))
    together = shuffled(np.array(positions), count, seed, epoch)
    assert len(set(together.tolist())) == len(positions)
    assert 0 <= together.min() <= together.max() < count
    alone = [int(shuffled(np.array([position]), count, seed, epoch)[0]) for position in positions[:5]]
    assert alone == together[:5].tolist()


def test_orders_never_change() -> None:
    """Runs are repeatable across versions only as long as these hold: do not replace them."""
    assert whole(12, seed=0, epoch=0).tolist() == [4, 9, 2, 5, 6, 3, 11, 7, 10, 8, 1, 0]
    assert whole(12, seed=2**31 - 1, epoch=7).tolist() == [3, 7, 10, 5, 8, 11, 1, 9, 4, 0, 6, 2]
    far = np.array([0, 1, 2, 78_000_000, 155_999_999])
    assert shuffled(far, 156_000_000, 1234, 3).tolist() == [95952205, 867970, 125428182, 6572966, 100052943]
    assert shuffled(np.array([0, 2**62 - 1]), 2**62, 1, 1).tolist() == [4146077551274580684, 723928504000642121]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_all_orders_of_a_few_things_are_equally_likely(count: int) -> None:
    orders = math.factorial(count)
    each = 12
    codes = [int(whole(count, epoch=epoch) @ (count ** np.arange(count))) for epoch in range(each * orders)]
    seen, counts = np.unique(codes, return_counts=True)
    assert len(seen) == orders
    assert deviation(((counts - each) ** 2 / each).sum(), orders - 1) < 4


def test_statistics_of_many_orders_are_those_of_random_ones() -> None:
    found = statistics_of_orders()
    assert max(map(abs, found.values())) < 4, found


def test_the_statistics_see_too_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "ROUNDS", 5)
    assert max(map(abs, statistics_of_orders().values())) > 8


def test_neighbouring_seeds_and_epochs_have_nothing_in_common() -> None:
    orders = [whole(COUNT, seed, epoch) for seed in range(20) for epoch in range(20)]
    coincidences = [int((one == other).sum()) for one, other in zip(orders, orders[1:] + orders[20:], strict=False)]
    assert abs(np.mean(coincidences) - 1) < 4 / math.sqrt(len(coincidences))
    assert max(coincidences) < 10


def statistics_of_orders() -> dict[str, float]:
    """Standard deviations by which statistics of 200 orders of 10,000 things differ from what random orders have."""
    orders_EN = np.stack([whole(COUNT, epoch=epoch) for epoch in range(ORDERS)])
    positions_EN = np.broadcast_to(np.arange(COUNT), orders_EN.shape)
    side = math.isqrt(COUNT)  # of the grid, so that things this far apart share a digit
    found = {
        "position and thing": dependence(positions_EN, orders_EN, COUNT),
        "low digits of position and thing": dependence(positions_EN % 64, orders_EN % 64, 64),
        "neighbours": dependence(orders_EN[:, :-1], orders_EN[:, 1:], COUNT),
        "next but one": dependence(orders_EN[:, :-2], orders_EN[:, 2:], COUNT),
        "one epoch and the next": dependence(orders_EN[:-1], orders_EN[1:], COUNT),
        "fixed points": excess((orders_EN == positions_EN).sum(), ORDERS),
    }
    for distance in (1, side):
        step_EN = orders_EN[:, distance:] - orders_EN[:, :-distance]
        pairs = step_EN.size
        ascents = int((step_EN > 0).sum())
        found |= {
            f"ascents over {distance}": (ascents - pairs / 2) / math.sqrt(pairs / 12 if distance == 1 else pairs / 4),
            f"same step over {distance}": excess((step_EN % COUNT == distance).sum(), pairs / COUNT),
            f"same column over {distance}": excess((step_EN % side == 0).sum(), pairs * (side - 1) / (COUNT - 1)),
        }
    return found


def dependence(first: NDArray[np.int64], second: NDArray[np.int64], count: int) -> float:
    """Chi-square test of independence of two numbers below ``count``, in 64 x 64 cells."""
    cells = np.bincount((first * 64 // count * 64 + second * 64 // count).ravel(), minlength=64 * 64).reshape(64, 64)
    expected = cells.sum(axis=1, keepdims=True) * cells.sum(axis=0, keepdims=True) / cells.sum()
    return deviation(((cells - expected) ** 2 / expected).sum(), 63**2)


def deviation(chi_square: float, degrees: int) -> float:
    return (chi_square - degrees) / math.sqrt(2 * degrees)


def excess(events: int, expected: float) -> float:
    """Measure the excess of a count of rare events."""
    return (events - expected) / math.sqrt(expected)
