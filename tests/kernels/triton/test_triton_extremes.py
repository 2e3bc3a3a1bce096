# pyright: reportCallIssue=false
"""Extreme values: very negative scores, logits whose exponentials overflow, and factors that bf16 cannot hold."""

from typing import Any

import pytest
import torch

from benchmarks.gpu_parts.accuracy import outcome
from kernels import masked_lm_loss, varlen_attention
from kernels.triton import dense, loss
from kernels.triton.attention import varlen
from kernels.tuning.examples import Size, example_inputs
from tests.kernels.accuracy import CPU


def loss_inputs(masked: int, vocabulary: int) -> tuple[Any, ...]:
    """Return hidden states, decoder, bias and labels. Every third label is ignored."""
    sizes = Size(masked=masked, hidden=8, vocabulary=vocabulary)
    hidden, decoder, bias, labels, *_ = example_inputs("masked_lm_loss", CPU, torch.float32, sizes)[0]
    labels[2::3] = -1
    return hidden, decoder, bias, labels


def test_gelu_is_accurate_in_its_tails_and_near_zero() -> None:
    product = torch.tensor([[-1e4, -50.0, -1e-30, 0.0, 1e-30, 50.0, 1e4]], requires_grad=True)
    output = dense.bias_gelu(product, torch.zeros(7))
    (gradient,) = torch.autograd.grad(output.sum(), product)
    torch.testing.assert_close(output[0], torch.tensor([0.0, 0.0, -5e-31, 0.0, 5e-31, 50.0, 1e4]))
    torch.testing.assert_close(gradient[0], torch.tensor([0.0, 0.0, 0.5, 0.5, 0.5, 1.0, 1.0]))


@pytest.mark.parametrize("scale", [1e-20, 10.0, 1e4])
def test_attention_with_extreme_scores_is_finite(scale: float) -> None:
    """Scores are far below 0. If a masked position had the score 0, exp(score - maximum) would overflow."""
    sizes = Size((3, 35), 35, hidden=64, heads=2)
    query, key, value, *others, _ = example_inputs("varlen_attention", CPU, torch.float32, sizes)[0]
    arguments = [query.abs() * scale, -key.abs() * scale, value, *others], {}
    oracle = outcome(varlen_attention.definition, arguments, torch.float64).tensors
    for got, exact in zip(outcome(varlen.varlen_attention, arguments).tensors, oracle, strict=True):
        assert got.isfinite().all()
        if scale < 1e4:  # at larger scales, rounding decides which key has the largest score
            assert (got - exact).abs().max() <= 1e-2 * exact.abs().max() + 1e-6


def test_ignored_rows_affect_neither_loss_nor_gradients() -> None:
    hidden, decoder, bias, labels = loss_inputs(12, 1500)
    real = labels != -1
    garbage = torch.where(real[:, None], hidden, 1e4).detach().requires_grad_()
    _, counted = loss.masked_lm_loss(hidden[real], decoder, bias, labels[real])
    assert loss.masked_lm_loss(garbage, decoder, bias, labels)[1] == counted
    kept = hidden[real].detach().requires_grad_()
    alone = outcome(loss.masked_lm_loss, ([kept, decoder, bias, labels[real]], {})).tensors
    padded = outcome(loss.masked_lm_loss, ([garbage, decoder, bias, labels], {})).tensors
    assert not padded[2][~real].any()
    padded[2] = padded[2][real]
    for expected, got in zip(alone, padded, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("height", [1e4, -1e4])
def test_large_logits_and_impossible_classes_give_finite_gradients(height: float) -> None:
    """Exponentials of large logits neither overflow nor vanish, and a class with bias -inf gets no probability."""
    hidden, decoder, bias, labels = loss_inputs(4, 2000)
    bias = bias.detach() + height
    bias[:1100] = float("-inf")
    labels = torch.where(labels == -1, labels, 1100 + labels % 900)
    arguments = [hidden, decoder, bias.requires_grad_(), labels], {}
    functions = loss.masked_lm_loss, masked_lm_loss.definition
    found, expected = (outcome(function, arguments).tensors for function in functions)
    torch.testing.assert_close(found[0], expected[0])
    assert found[2].isfinite().all()
    assert not any(gradient[:1100].any() for gradient in found[3:])


def test_two_backward_passes_give_the_same_gradient_with_frozen_weights() -> None:
    """The first backward pass must not change the saved gradient, because the second one reads it."""
    hidden, decoder, bias, labels = loss_inputs(5, 70)
    found, _ = loss.masked_lm_loss(hidden, decoder.detach(), bias.detach(), labels)
    (once,) = torch.autograd.grad(found, hidden, retain_graph=True)
    (again,) = torch.autograd.grad(2 * found, hidden)
    torch.testing.assert_close(again, 2 * once)


def test_the_upstream_gradient_is_not_rounded_to_the_operands_type() -> None:
    """The upstream gradient is 1 + 2^-9, which bf16 would round to 1."""
    hidden, decoder = torch.zeros(32, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    bias = torch.zeros(2, requires_grad=True)
    found, _ = loss.masked_lm_loss(hidden, decoder, bias, torch.ones(32, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(found * (1 + 2**-9), bias)
    assert gradient.tolist() == [16 + 2**-5, -16 - 2**-5]
