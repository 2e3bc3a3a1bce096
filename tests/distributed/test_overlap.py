"""The step on several ranks over gloo. Overlapping reduction with backward, captured or eager, changes no result, and
neither does gathering weights during the forward pass.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.orders import STEPS, compare_orders
from tests.distributed.ranks import run_on_ranks


@pytest.mark.parametrize(
    ("ranks", "accumulation", "strategies"),
    [(2, 2, ("flat", "sharded")), (4, 1, ("hierarchical", "sharded", "sharded_world"))],
)
def test_every_order_of_the_step_gives_the_same_weights(
    tmp_path: Path, ranks: int, accumulation: int, strategies: Sequence[str]
) -> None:
    """Compare on one host and on two, with micro-batches padded alternately to several shape buckets."""
    found = run_on_ranks(tmp_path, ranks, compare_orders, accumulation, *strategies)
    assert found.keys() == set(strategies)
    for name, run in found.items():
        assert run["overlap_is_same"], name
        assert run["capturing_is_same"], name
        assert run["recomputing_is_same"], name
        if name.startswith("sharded"):
            assert_weights_came_beside_forward(name, run)
        # Backward fills the last bucket at its very end. With overlap, all buckets have started by then, else none.
        assert run["buckets"] > 5
        assert run["early_after"] == [0] * STEPS
        assert run["early_overlapped"] == [run["buckets"]] * STEPS
        assert set(run["early_captured"]) == {run["buckets"]}
        # Each of two sizes has a graph for the last micro-batch and one for earlier ones, if there are any. The update
        # has another. One of eight micro-batches has a size without a graph.
        assert run["graphs"] == 2 * accumulation + 1
        assert run["replays"] == (STEPS if accumulation == 1 else 2 * STEPS - 1) + STEPS
        # Compare with a single message after backward, because the sum of two numbers is the same in either order.
        if ranks == 2 and name == "flat":
            assert run["one_message_is_same"]
        assert run["difference"] < 1e-6, name
        assert run["losses"] == pytest.approx(run["whole_losses"], rel=1e-5)
        assert run["losses"][0] != run["losses"][-1]


def assert_weights_came_beside_forward(name: str, run: dict[str, Any]) -> None:
    """Check that all weights except the embeddings' arrived while an earlier part of the model was computed."""
    assert run["held_is_same"], name
    assert run["held"] >= (STEPS + 1) * run["buckets"] / 2, "in the warm-up step and those that follow"
    assert run["held"] < (STEPS + 1) * run["buckets"], "once a step"
    assert run["phases"] == ["forward_backward"]
    assert run["fp8_follows"], name
