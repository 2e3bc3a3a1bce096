"""The adapter to NVIDIA's apex, tested with stand-ins, because apex is not installed here."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.libraries import apex
from kernels.reference import ops as reference
from kernels.tuning.examples import example_inputs
from tests.kernels.accuracy import CPU, outcome


class SoftmaxCrossEntropyLoss(torch.autograd.Function):
    """Stand-in for apex's class. Like apex, it reads the logit of every label."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing=0.0, padding_idx=0, half_to_float=False) -> Tensor:
        assert smoothing == 0
        assert half_to_float == (logits.dtype != torch.float32)
        assert labels.min() >= 0
        ctx.save_for_backward(logits, labels)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        return losses.masked_fill_(labels == padding_idx, 0)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels = ctx.saved_tensors
        errors = logits.float().softmax(-1) - F.one_hot(labels, logits.shape[1])
        return (grad_loss[:, None] * errors).to(logits.dtype), None, None, None, None


def fused_layer_norm_affine(input: Tensor, weight: Tensor, bias: Tensor, normalized_shape, eps=1e-6) -> Tensor:
    assert input.dtype == weight.dtype == bias.dtype
    assert not torch.is_autocast_enabled("cpu")
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


@pytest.fixture
def nvidia_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("apex", "apex.normalization", "apex.contrib", "apex.contrib.xentropy"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in (
        ("apex.normalization.fused_layer_norm", fused_layer_norm_affine),
        ("apex.contrib.xentropy.softmax_xentropy", SoftmaxCrossEntropyLoss),
    ):
        module = ModuleType(name)
        vars(module)[function.__name__] = function
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("nvidia_apex")
@pytest.mark.parametrize("op", ["dropout_add_layer_norm", "embedding_layer_norm"])
def test_layer_norms_are_those_of_the_definition(op: str) -> None:
    inputs, named = example_inputs(op, CPU, torch.float32)
    found, expected = (
        outcome(getattr(module, op), ([*inputs[:-1], None], named)).tensors for module in (apex, reference)
    )
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.usefixtures("nvidia_apex")
@pytest.mark.parametrize("labels", [[3, -1, 0, 10, -1], [-1] * 5])
@pytest.mark.parametrize("counting", [True, False])
def test_cross_entropy_is_that_of_the_definition(labels: list[int], counting: bool) -> None:
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((5, 8), (11, 8), (11,))]
    arguments = [*tensors, torch.tensor(labels), -1, counting]
    found, expected = (outcome(module.masked_lm_loss, (arguments, {})).tensors for module in (apex, reference))
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got, exact)


def test_what_it_cannot_do_is_named() -> None:
    rows, ids = torch.zeros(5, 8), torch.zeros(5, dtype=torch.int64)
    assert "cpu" in apex.norm_unsupported_reasons(rows)[0]
    assert "torch.float64" in apex.norm_unsupported_reasons(ids, ids, ids, rows.double())[1]
    large = torch.zeros(1, 1).expand(2**17, 8), torch.zeros(1, 1).expand(2**15, 8)
    assert "2^32" in apex.loss_unsupported_reasons(*large)[-1]
