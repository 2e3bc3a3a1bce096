"""The step on several ranks over gloo. Overlapping reduction with backward, captured or eager, changes no result, and
neither does gathering weights during the forward pass.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.orders import compare_orders
from tests.distributed.ranks import run_on_ranks


@pytest.mark.parametrize(
    ("ranks", "accumulation", "strategies"),
    [(2, 2, ("flat", "sharded")), (4, 1, ("hierarchical", "sharded", "sharded_world"))],
)
def test_every_order_of_the_step_gives_the_same_weights(
    tmp_path: Path, ranks: int, accumulation: int, strategies: Sequence[str]
) -> None:
    """Compare on one host and on two, with micro-batches padded alternately to several shape buckets."""
    run_on_ranks(tmp_path, ranks, compare_orders, accumulation, *strategies)
