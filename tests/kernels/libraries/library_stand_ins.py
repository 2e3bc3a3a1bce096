"""Stand-ins for libraries that are not installed: their functions' parameters, and what the definition computes."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def library(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Makes a module of this name importable, and the packages that it is in."""
    parts = name.split(".")
    for stop in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:stop]), ModuleType(parts[stop - 1]))
    vars(sys.modules[name]).update(functions)


class SoftmaxCrossEntropyLoss(torch.autograd.Function):
    """apex's."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        assert half_to_float == (logits.dtype != torch.float32)
        assert labels.min() >= 0, "a logit outside of the row is read"
        assert smoothing == 0
        ctx.save_for_backward(logits, labels)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        return losses.masked_fill_(labels == padding_idx, 0)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels = ctx.saved_tensors
        errors = logits.float().softmax(-1) - F.one_hot(labels, logits.shape[1])
        return (grad_loss[:, None] * errors).to(logits.dtype), None, None, None, None
