"""Data that the probe sends in collectives to detect wrong results."""

from itertools import combinations
from typing import get_args

import pytest
import torch

from cluster.probe.collectives import Trial
from cluster.view import Operation


@pytest.mark.parametrize("operation", get_args(Operation))
@pytest.mark.parametrize("size", [256, 65_536])
def test_what_is_late_lost_or_out_of_place_is_wrong(operation: Operation, size: int) -> None:
    """A rank's own data, shifted elements and another rank's chunk all differ from the expected result."""
    ranks = [4, 5, 6, 7]
    trials = [Trial.of(operation, ranks, rank, size // 16, torch.device("cpu"), None) for rank in ranks]
    right = [trial.right for trial in trials]
    assert all((each[1:] != each[:-1]).all() for each in right)
    if operation == "all-reduce":
        assert all((trial.own != trial.right).all() for trial in trials)
    if operation in ("all-reduce", "reduce-scatter"):
        total = torch.stack([trial.own for trial in trials]).double().sum(dim=0)
        assert torch.equal(torch.cat(right) if operation == "reduce-scatter" else right[0], total.float())
    else:
        assert not any(torch.equal(*pair) for pair in combinations(right[0].chunk(4), 2))
