"""The order of samples in an epoch: a permutation of every size, and the same in all versions."""

import numpy as np
import pytest
from numpy.typing import NDArray

from dataloading.batches.permutation import shuffled

pytestmark = pytest.mark.slow


def whole(count: int, seed: int = 5, epoch: int = 0) -> NDArray[np.int64]:
    return shuffled(np.arange(count), count, seed, epoch)


def test_every_small_n_is_permuted() -> None:
    """Computing the order for some positions gives the same results as computing the whole permutation."""
    for count in range(1, 1201):
        places = whole(count, seed=count, epoch=count % 3)
        assert (np.bincount(places, minlength=count) == 1).all(), count
        assert shuffled(np.arange(0, count, 7), count, count, count % 3).tolist() == places[::7].tolist(), count


def test_orders_never_change() -> None:
    """Never update the expected orders: if they changed, a new version could not reproduce an old run."""
    assert whole(12, seed=0, epoch=0).tolist() == [4, 9, 2, 5, 6, 3, 11, 7, 10, 8, 1, 0]
    assert whole(12, seed=2**31 - 1, epoch=7).tolist() == [3, 7, 10, 5, 8, 11, 1, 9, 4, 0, 6, 2]
    far = np.array([0, 1, 2, 78_000_000, 155_999_999])
    assert shuffled(far, 156_000_000, 1234, 3).tolist() == [95952205, 867970, 125428182, 6572966, 100052943]
    assert shuffled(np.array([0, 2**62 - 1]), 2**62, 1, 1).tolist() == [4146077551274580684, 723928504000642121]
