"""The collectives in PyTorch versions before 2.13, which renamed them."""

import importlib

import pytest
import torch.distributed as dist

from bert.parallel import single

pytestmark = pytest.mark.oldest_torch


@pytest.mark.parametrize(
    ("new", "old"),
    [("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")],
)
def test_an_older_pytorch_has_them_too(new: str, old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(dist, new, raising=False)
        assert getattr(importlib.reload(single), new) is getattr(dist, old)
    importlib.reload(single)
