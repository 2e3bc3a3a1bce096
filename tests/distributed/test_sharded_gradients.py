"""Gradients of which a rank keeps a shard alone, over gloo: the steps of whole gradients, in the memory that is promised."""

from typing import Any

import pytest

from tests.distributed.ranks import run_worker

CASES = [
    "sharded,fp32,2,1,8,captured",
    "sharded_world,bf16,4,2,5,plain",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_worker(tmp_path_factory.mktemp("sharded") / "out.json", 4, *CASES, worker="sharded_gradients_worker")


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_whole_gradients(found: dict[str, dict[str, Any]], case: str) -> None:
    """To the last bit with one micro-batch a step; with several they are added over ranks first, and then up."""
    run = found[case]
    _, dtype, _, accumulation, steps, _ = case.split(",")
    precision = 1e-5 if dtype == "fp32" else 2e-2
    assert run["equal"] == (accumulation == "1")
    for name in ("losses", "norms"):
        whole, sharded = run[name]
        assert len(whole) == int(steps)
        assert sharded == pytest.approx(whole, rel=precision)
    assert max(run["differences"]) < 10 * precision
    assert run["agreed"]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_shard_and_two_buckets(found: dict[str, dict[str, Any]], case: str) -> None:
    """Bytes as docs/scaling.md has them; what backward makes waits for its bucket to be complete and no longer."""
    strategy, _, local_size, *_ = case.split(",")
    whole, sharded = found[case]["whole"], found[case]["sharded"]
    shards = int(local_size) if strategy == "sharded" else 4
    assert whole["held"] == (8 + 20 / shards) * whole["N"]
    assert sharded["held"] == (4 + 20 / shards) * sharded["N"] + 2 * sharded["longest"]
    assert max(sharded["pending"]) <= sharded["longest"] + sharded["layer"] < 4 * sharded["N"]
    assert sharded["left"] == 0
    assert sharded["waited"]
