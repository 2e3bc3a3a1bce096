"""Triton's dense + bias + GELU under the interpreter, against float64."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference import ops as reference
from kernels.triton import dense as triton_dense
from kernels.tuning.examples import Size, example_inputs
from tests.kernels.accuracy import CPU, assert_within_twice

SHAPES = {
    "one program of the backward, to the row": (64, 8, 32),
    "a row over": (65, 8, 32),
    "odd everywhere": (131, 7, 13),
    "a column over a tile": (3, 8, 513),
}


def inputs(tokens: int, size: int, wide: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight and bias, such that the GELU sees both tails."""
    return list(example_inputs("dense_gelu", CPU, dtype, Size((tokens,), hidden=size, intermediate=wide))[0])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*product(SHAPES, (torch.float32, torch.bfloat16)), ("odd everywhere", torch.float16)],
    ids=str,
)
def test_error_is_at_most_twice_plain_pytorch(shape: str, dtype: torch.dtype):
    """Free is a unit in the last place: the interpreter's casts to bf16 cut off."""
    free = torch.finfo(dtype).eps
    assert_within_twice(triton_dense.dense_gelu, reference.dense_gelu, inputs(*SHAPES[shape], dtype), free)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_after_the_product_alone(dtype: torch.dtype):
    arguments = example_inputs("bias_gelu", CPU, dtype, Size((131,), intermediate=130))[0]
    assert_within_twice(triton_dense.bias_gelu, reference.bias_gelu, arguments, torch.finfo(dtype).eps)


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


def test_autocast_and_a_master_bias_in_fp32():
    x, weight, bias = inputs(9, 8, 17)
    with torch.autocast("cpu", torch.bfloat16):
        output = triton_dense.dense_gelu(x, weight, bias)
    gradients = torch.autograd.grad(output.float().sum(), (x, weight, bias))
    assert output.dtype == torch.bfloat16
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 3
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    assert (output.double() - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(bias_dtype: torch.dtype):
    product = torch.randn(5, 12, dtype=torch.bfloat16)
    bias = torch.randn(12, dtype=bias_dtype)
    torch.library.opcheck(triton_dense.bias_gelu, (product.requires_grad_(), bias.requires_grad_()))
    backward, tests = torch.ops.mlperf_bert.bias_gelu_backward, ("test_schema", "test_faketensor")
    torch.library.opcheck(backward, (product.detach(), product.detach(), bias.detach()), test_utils=tests)


def test_strided_inputs():
    """An upstream gradient that is expanded, and a product that is a view."""
    product = torch.randn(20, 6).t().requires_grad_()
    bias = torch.randn(20, requires_grad=True)
    ours = torch.autograd.grad(triton_dense.bias_gelu(product, bias).sum(), (product, bias))
    plain = torch.autograd.grad(F.gelu(product + bias, approximate="tanh").sum(), (product, bias))
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected)
