"""Statistics of steps, which the host fetches while waiting only once for the device."""

import pytest
import torch

from bert.parallel.mesh import Mesh
from bert.reporting import statistics
from bert.reporting.statistics import Statistics
from tests.bert.operators import Operators

pytestmark = pytest.mark.oldest_torch


def test_what_the_host_adds_is_not_copied_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying a number to a GPU would make the host wait until the GPU has finished all queued work."""
    summed = Operators()

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        summed.names.append("all_reduce")
        return tensor

    gathered = Statistics(Mesh(1, 3, 0, torch.device("cpu")))
    monkeypatch.setattr(statistics, "all_reduce_", all_reduce)
    with summed:
        _, stopping = gathered.fetch(stop=True, own_seconds=0.25)
    assert stopping
    assert gathered.own_seconds == [0.0, 0.25, 0.0]
    before = summed.names[: summed.names.index("all_reduce")]
    assert before
    assert not {"copy_", "_to_copy", "scalar_tensor", "lift_fresh"} & set(before)
