"""Triton's dense + bias + GELU under the interpreter, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from kernels.reference import ops as reference
from kernels.triton import dense as triton_dense

SHAPES = {
    "one token": (1, 8, 16),
    "one program of the backward, to the row": (64, 8, 32),
    "a row over": (65, 8, 32),
    "odd everywhere": (131, 7, 13),
    "a column over a tile": (3, 8, 513),
    "several tiles both ways": (130, 16, 1100),
}


def inputs(tokens: int, size: int, wide: int, dtype: torch.dtype, bias_dtype: torch.dtype) -> list[Tensor]:
    """x, weight and bias, such that the GELU sees both tails."""
    generator = torch.Generator().manual_seed(tokens * wide)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((tokens, size), (wide, size), (wide,))
    )
    return [x.to(dtype), weight.to(dtype), (bias * 2).to(bias_dtype)]


def output_and_gradients(dense, leaves: list[Tensor]) -> list[Tensor]:
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    output = dense(*leaves)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_error_is_at_most_twice_plain_pytorch(shape: tuple[int, int, int], dtype: torch.dtype):
    leaves = inputs(*shape, dtype, dtype)
    oracle = output_and_gradients(reference.dense_gelu, [leaf.double() for leaf in leaves])
    plain = output_and_gradients(reference.dense_gelu, leaves)
    ours = output_and_gradients(triton_dense.dense_gelu, leaves)
    floor = torch.finfo(dtype).eps  # a unit in the last place: the interpreter's casts to bf16 cut off
    for name, exact, expected, got in zip(("output", "x", "weight", "bias"), oracle, plain, ours, strict=True):
        assert got.shape == exact.shape
        assert got.dtype == dtype
        assert error(got, exact) <= 2 * error(expected, exact) + floor, name


def test_bias_gradient_is_summed_in_fp32():
    """200 equal terms that bf16 holds exactly, as it does not hold their sums."""
    product, bias = torch.zeros(200, 1, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1, requires_grad=True)
    upstream = torch.full((200, 1), 1.0078125, dtype=torch.bfloat16)
    (gradient,) = torch.autograd.grad(triton_dense.bias_gelu(product, bias), bias, upstream)
    assert gradient.item() == 100.78125


def test_far_tails_and_zero():
    product = torch.tensor([[-1e4, -50.0, -1e-30, 0.0, 1e-30, 50.0, 1e4]], requires_grad=True)
    output = triton_dense.bias_gelu(product, torch.zeros(7))
    (gradient,) = torch.autograd.grad(output.sum(), product)
    torch.testing.assert_close(output[0], torch.tensor([0.0, 0.0, -5e-31, 0.0, 5e-31, 50.0, 1e4]))
    torch.testing.assert_close(gradient[0], torch.tensor([0.0, 0.0, 0.5, 0.5, 0.5, 1.0, 1.0]))


def test_rows_without_upstream_add_nothing_to_gradients():
    """Slots past the real tokens hold anything finite; nothing of it may reach a parameter."""
    x, weight, bias = inputs(70, 8, 33, torch.float32, torch.float32)
    garbage = torch.cat([x, torch.full((30, 8), 1e4)])
    real, padded = (_parameter_gradients(rows, weight, bias, upstream_rows=70) for rows in (x, garbage))
    for expected, got in zip(real, padded, strict=True):
        torch.testing.assert_close(got, expected)


def _parameter_gradients(x: Tensor, weight: Tensor, bias: Tensor, upstream_rows: int) -> tuple[Tensor, ...]:
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    output = triton_dense.dense_gelu(x, weight, bias)
    upstream = torch.zeros_like(output)
    upstream[:upstream_rows] = torch.linspace(-1, 1, upstream_rows)[:, None]
    return torch.autograd.grad(output, (weight, bias), upstream)


def test_autocast_and_a_master_bias_in_fp32():
    x, weight, bias = (leaf.requires_grad_() for leaf in inputs(9, 8, 17, torch.float32, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        output = triton_dense.dense_gelu(x, weight, bias)
    gradients = torch.autograd.grad(output.float().sum(), (x, weight, bias))
    assert output.dtype == torch.bfloat16
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 3
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    assert error(output.detach(), exact.detach()) < 0.02


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(bias_dtype: torch.dtype):
    product = torch.randn(5, 12, dtype=torch.bfloat16)
    bias = torch.randn(12, dtype=bias_dtype)
    torch.library.opcheck(triton_dense.bias_gelu, (product.requires_grad_(), bias.requires_grad_()))
    torch.library.opcheck(torch.ops.mlperf_bert.bias_gelu_backward, (product.detach(), product.detach(), bias.detach()))


def test_strided_inputs():
    """An upstream gradient that is expanded, and a product that is a view."""
    product = torch.randn(20, 6).t().requires_grad_()
    bias = torch.randn(20, requires_grad=True)
    ours = torch.autograd.grad(triton_dense.bias_gelu(product, bias).sum(), (product, bias))
    plain = torch.autograd.grad(F.gelu(product + bias, approximate="tanh").sum(), (product, bias))
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected)


def test_no_tokens():
    x, weight, bias = inputs(0, 8, 16, torch.float32, torch.float32)
    output, *gradients = output_and_gradients(triton_dense.dense_gelu, [x, weight, bias])
    assert output.shape == (0, 16)
    assert all(not gradient.any() for gradient in gradients)


def test_reasons(monkeypatch: pytest.MonkeyPatch):
    leaves = inputs(2, 8, 16, torch.float32, torch.float32)
    assert triton_dense.unsupported_reasons(*leaves) == []
    assert "float64" in triton_dense.unsupported_reasons(*(leaf.double() for leaf in leaves))[0]
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    assert "CUDA" in triton_dense.unsupported_reasons(*leaves)[0]
