"""Trials of a probe: the work and order of computations, wrong results of collectives, and pairs of ranks for paths."""

import math
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from bert.parallel.mesh import Mesh
from cluster.probe import collectives
from cluster.probe.collectives import CollectiveTrial
from cluster.probe.command import _schedules
from cluster.probe.computations import _COPIES, _backward_of, trials_of
from cluster.probe.links import SAMPLED, rounds_of_pairs
from cluster.probe.machine import Facts
from cluster.view import Host, Operation
from tests.cluster.probe.clocks import clock


@pytest.mark.slow
def test_counts_of_trials_equal_a_count_by_hand() -> None:
    """Counts of the first shape of each kind, by hand, in the order of its terms in `cluster.model.work.TERMS`."""
    trials = [trial for trial in trials_of(torch.device("cpu")) if "bf16" not in trial.kind]
    attention, norm, embedding = (1, 128 * 128, 128**2 * 4, 128**2 * 128), (1, 32 * 128), (1, 64 * 128, 1024 * 128)
    expected = {"linear fp32": (1, 64 * 128 * 128, 64 * 256, 128 * 128), "gelu": (1, 32 * 128), "loss": (1, 8 * 1024)}
    expected |= {"lamb": (1, 8, 8 * 4096), "batch": (1, 32)}
    for dropout in ("", " with dropout"):
        expected |= {f"attention{dropout}": attention, f"norm{dropout}": norm, f"embedding{dropout}": embedding}
    assert {trial.kind: trial.counts for trial in reversed(trials)} == expected
    kinds = Counter(trial.kind.removesuffix(" with dropout") for trial in trials)
    counts = {"linear fp32": 7, "attention": 10, "norm": 6, "embedding": 6, "gelu": 3, "loss": 3, "lamb": 3, "batch": 2}
    assert kinds == Counter(counts)
    assert {(trial.kind in ("lamb", "batch"), trial.times) for trial in trials} == {(True, 1), (False, _COPIES)}


def test_computations_run_forward_before_the_first_runs_backward_and_only_parameters_accumulate() -> None:
    order: list[tuple[str, int]] = []
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(activation: Tensor, weight: Tensor) -> Tensor:
        number = list(known).index(id(activation)) if id(activation) in known else len(known)
        known[id(activation)] = activation, weight
        order.append(("forward", number))
        output = activation * weight
        output.register_hook(lambda _: order.append(("backward", number)))
        return output

    trial = _backward_of("kind", (1, 6), forward, [(2, 3)], [(3,)])
    assert (trial.counts, trial.times) == ((1.0, 6.0), _COPIES)
    order.clear()
    for _ in range(2):
        trial.action()
    forwards = [("forward", place) for place in range(_COPIES)]
    assert order == 2 * [*forwards, *(("backward", place) for _, place in reversed(forwards))]
    for activation, weight in known.values():
        torch.testing.assert_close(activation.grad, weight.detach().expand(2, 3))
        torch.testing.assert_close(weight.grad, 2 * activation.detach().sum(0))


@pytest.mark.parametrize("operation", get_args(Operation))
@pytest.mark.parametrize("size", [256, 65_536])
def test_stale_lost_or_misplaced_data_differs_from_the_expected_result(operation: Operation, size: int) -> None:
    """A rank's own data, shifted elements and another rank's chunk all differ from the expected result."""
    ranks = [4, 5, 6, 7]
    meshes = [Mesh(rank, 8, 0, torch.device("cpu")) for rank in ranks]
    trials = [CollectiveTrial.of(operation, mesh, None, ranks, size // 16) for mesh in meshes]
    right = [trial.right for trial in trials]
    assert all((each[1:] != each[:-1]).all() for each in right)
    if operation == "all-reduce":
        assert all((trial.own != trial.right).all() for trial in trials)
    if operation in ("all-reduce", "reduce-scatter"):
        total = torch.stack([trial.own for trial in trials]).double().sum(dim=0)
        assert torch.equal(torch.cat(right) if operation == "reduce-scatter" else right[0], total.float())
    else:
        assert not any(torch.equal(*pair) for pair in combinations(right[0].chunk(4), 2))


@pytest.mark.slow
def test_message_sizes_grow_until_the_next_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repetition takes 1 s by the clock, so each of at least 3 repetitions of the next size is expected to take 4 s."""
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
            # Each timed repetition reads the clock twice. The first repetition, which connects the ranks, reads it once.
            assert time.perf_counter() == sum(2 * each + 1 for each in expected)
    finally:
        dist.destroy_process_group()


@given(st.integers(1, 700))
@example(4095)
@example(4096)
def test_pairs_of_a_round_are_disjoint_and_all_nodes_have_equally_many_partners(nodes: int) -> None:
    rounds = rounds_of_pairs(nodes)
    partners: list[set[int]] = [set() for _ in range(nodes)]
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        for one, other in pairs:
            assert 0 <= one < other < nodes
            assert other not in partners[one], "a pair comes twice"
            partners[one].add(other)
            partners[other].add(one)
    assert len(rounds) <= 3 * (math.log2(nodes) + SAMPLED) if nodes > 1 else not rounds
    assert len({len(each) for each in partners}) == 1, "all nodes are judged by as many paths"
    assert all((node + 1) % nodes in partners[node] for node in range(nodes)) or nodes == 1, "neighbours are measured"
    if 1 < nodes <= 8:
        assert len(partners[0]) == nodes - 1


def test_rounds_keep_all_hosts_and_all_cards_busy_and_pair_hosts_in_the_order_of_their_names() -> None:
    """The first rank at each card represents it: ranks 0 and 2 on host h10, and ranks 3 and 5 on host h9."""
    every = [Facts("", Host(name, 8, 0, (), ()), "CPU", 0, card) for name in ("h10", "h9") for card in "aab"]
    inside = [[(0, 1), (3, 4)], [(1, 2), (4, 5)], [(0, 2), (3, 5)]]
    assert _schedules([(0, 1, 2), (3, 4, 5)], every) == (inside, [[(3, 0), (5, 2)]])
    assert _schedules([(0,)], every) == ([], []), "one rank has nobody to send to"
