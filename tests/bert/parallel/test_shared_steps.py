"""Steps of ranks that share the model or the optimizer's state train as one rank does (``tests/distributed/shapes.py``)."""

import pytest

from tests.bert.parallel.forked import on_ranks, trains_in_forks
from tests.distributed.shapes import alone, require_same_training, train


@trains_in_forks
@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        (2, "2,1,1,flat,block,2,2,3,fp64"),
        (2, "1,1,1,sharded,block,2,2,3,fp64"),
        (2, "1,1,1,sharded+,block,2,2,3,accumulating"),
        pytest.param(4, "2,1,1,hierarchical,cyclic,2,1,3,fp64", marks=pytest.mark.slow),
        pytest.param(2, "1,2,2,flat,block,2,4,3,fp64", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_a_step_take_the_step_of_one_rank(ranks: int, shape: str) -> None:
    [one] = on_ranks(1, lambda mesh: train(mesh, alone(shape)))
    for found in on_ranks(ranks, lambda mesh: train(mesh, shape)):
        require_same_training(shape, one, found)
