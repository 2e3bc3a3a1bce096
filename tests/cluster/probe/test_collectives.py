"""Data that the probe sends in collectives to detect wrong results."""

from itertools import combinations
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from bert.parallel.mesh import Mesh
from cluster.probe import collectives
from cluster.probe.collectives import Trial
from cluster.view import Operation
from tests.cluster.probe.forks import clock


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


def test_sizes_grow_until_the_next_would_take_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repetition takes a second by the clock, so the next size is expected to take 4 s, and at least 3 repetitions."""
    monkeypatch.setattr(collectives, "_LARGEST_BYTES", 2**22)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    repeats = {0.0: (3, 3, 3), 22.9: (5, 3, 3), 23.1: (5, 3, 3, 3), 45.1: (5, 5, 3, 3), 1e9: (5,) * 4}
    try:
        assert dist.group.WORLD is not None
        for seconds, expected in repeats.items():
            time = clock(1.0)
            monkeypatch.setattr(collectives, "time", time)
            mesh = Mesh(0, 1, 0, torch.device("cpu"))
            points, wrong = collectives._times(mesh, dist.group.WORLD, "all-reduce", seconds)
            sizes = [2**16, 2**18, 2**20, 2**22][: len(expected)]
            assert (points, wrong) == ([(size, 1.0, pytest.approx(8.0)) for size in sizes], [])
            # Each repetition reads the clock twice, and once before the first, which connects the ranks.
            assert time.perf_counter() == sum(2 * each + 1 for each in expected)
    finally:
        dist.destroy_process_group()
