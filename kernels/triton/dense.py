# ruff: noqa: ARG001
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Dense + bias + GELU: matrix products by cuBLAS, and one Triton pass per direction for the element-wise part.

Shape legend in ``kernels/__init__.py``. R is the number of rows of partial sums. Each backward program writes one row.

The backward pass reads the saved product (without the bias), because computing it again would take four times as long at
BERT-Large's sizes. The same pass writes the product's gradient and sums it over the tokens.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.configuration import Configuration
from kernels.triton.inputs import tensor_reasons  # noqa: F401  for the table in kernels/ops.py

# Tiles are wide, so that 128 threads read 16 bytes each along a row. A program of the backward pass processes 64
# tokens, four at a time. For 24,576 tokens and 4,096 columns, this makes 3,072 programs. Their partial sums are 2 % of
# the memory traffic and stay in the L2 cache.
_COLUMNS = 512
_ROWS = 4
_ROWS_A_PROGRAM = 64
_WARPS = 4
_STAGES = 2

_VARYING = ["rows"]  # do not specialize, or Triton compiles again for some numbers of tokens


def dense_gelu(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor) -> Tensor:
    """Return ``gelu(x @ weight.T + bias)`` in BERT's tanh form, [T, F] in the product's dtype.

    The product follows autocast. ``bias_F`` may be bf16, fp16 or fp32, and its gradient has the same type.
    """
    return bias_gelu(F.linear(x_TD, weight_FD), bias_F)


@triton.jit
def gelu_gates(y):
    """Return sigmoid(2 u) and sigmoid(-2 u) with u = sqrt(2 / pi) (y + 0.044715 y^3).

    GELU's tanh form, ``y (1 + tanh u) / 2``, is ``y`` times the first result. Both results have full relative
    precision: computing ``1 - sigmoid`` would lose digits to cancellation, and no exponential overflows here.
    """
    exponent = 1.5957691216057308 * y * (1.0 + 0.044715 * y * y)  # 2 u; the first factor is 2 sqrt(2 / pi)
    small = tl.exp(-tl.abs(exponent))
    large_gate = 1.0 / (1.0 + small)
    small_gate = small * large_gate
    return tl.where(exponent > 0, large_gate, small_gate), tl.where(exponent > 0, small_gate, large_gate)


@triton.jit
def gelu_derivative(y):
    gate, rest = gelu_gates(y)
    slope = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * y * y)
    # Product rule for y * sigmoid(2 u). The derivative of sigmoid(v) is sigmoid(v) * sigmoid(-v).
    return gate * (1.0 + y * rest * slope)


@triton.jit(do_not_specialize=_VARYING)
def _forward_kernel(product, bias, output, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write one [ROWS, COLUMNS] tile of ``gelu(product + bias)``."""
    first = tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows - first)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    product += first.to(tl.int64) * columns
    output += first.to(tl.int64) * columns
    y = tl.load(product + place, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    gate, _ = gelu_gates(y)
    tl.store(output + place, y * gate, mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _backward_kernel(
    output_gradient, product, bias, product_gradient, bias_partials, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROWS_A_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Write [ROWS_A_PROGRAM, COLUMNS] elements of the product's gradient, and their sums over the rows in fp32."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < columns
    b = tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = tl.program_id(0) * ROWS_A_PROGRAM
    output_gradient += first.to(tl.int64) * columns
    product += first.to(tl.int64) * columns
    product_gradient += first.to(tl.int64) * columns
    for start in range(0, ROWS_A_PROGRAM, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows - first)[:, None] & in_columns[None, :]
        place = row[:, None] * columns + column[None, :]
        upstream = tl.load(output_gradient + place, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(product + place, mask=inside, other=0.0).to(tl.float32) + b
        gradient = upstream * gelu_derivative(y)
        total += gradient  # sum in fp32, before the gradient is rounded to the output's type
        tl.store(product_gradient + place, gradient, mask=inside)
    tl.store(bias_partials + tl.program_id(0) * columns + column, tl.sum(total, axis=0), mask=in_columns)


@torch.library.custom_op("mlperf_bert::bias_gelu", mutates_args=())
def bias_gelu(product_TF: Tensor, bias_F: Tensor) -> Tensor:
    """Return ``gelu(product + bias)`` in the tanh form, [T, F] in the product's dtype. Autograd saves only both inputs."""
    product_TF = product_TF.contiguous()
    output_TF = torch.empty_like(product_TF)
    rows, columns = product_TF.shape
    grid = (-(-rows // _ROWS), -(-columns // _COLUMNS))
    _forward_kernel[grid](
        product_TF, bias_F, output_TF, rows, columns, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS, num_stages=_STAGES
    )
    return output_TF


@torch.library.custom_op("mlperf_bert::bias_gelu_backward", mutates_args=())
def _bias_gelu_backward(output_gradient_TF: Tensor, product_TF: Tensor, bias_F: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the product [T, F] and of the bias [F], each in its own dtype."""
    output_gradient_TF, product_TF = output_gradient_TF.contiguous(), product_TF.contiguous()
    product_gradient_TF = torch.empty_like(product_TF)
    rows, columns = product_TF.shape
    grid = (-(-rows // _ROWS_A_PROGRAM), -(-columns // _COLUMNS))
    bias_partials_RF = product_TF.new_empty((grid[0], columns), dtype=torch.float32)
    _backward_kernel[grid](
        output_gradient_TF, product_TF, bias_F, product_gradient_TF, bias_partials_RF, rows, columns,
        ROWS=_ROWS, COLUMNS=_COLUMNS, ROWS_A_PROGRAM=_ROWS_A_PROGRAM, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return product_gradient_TF, bias_partials_RF.sum(0).to(bias_F.dtype)


bias_gelu.register_fake(lambda product_TF, _bias_F: product_TF.new_empty(product_TF.shape))
_bias_gelu_backward.register_fake(lambda _, *inputs: tuple(x.new_empty(x.shape) for x in inputs))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, output_gradient_TF: Tensor) -> tuple[Tensor, Tensor]:
    return _bias_gelu_backward(output_gradient_TF, *ctx.saved_tensors)


bias_gelu.register_autograd(_backward, setup_context=_setup_context)


def configurations() -> list[Configuration]:
    """Return the configurations for BERT-Large: in bf16, with a bias in bf16 or, under autocast, in fp32."""
    types = dict.fromkeys(("product", "output", "output_gradient", "product_gradient"), "*bf16")
    types |= {"bias_partials": "*fp32", "rows": "i32", "columns": "i32"}
    tile = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "ROWS_A_PROGRAM": _ROWS_A_PROGRAM}
    return [
        Configuration.of(f"{name}, bias {bias}", kernel, types | {"bias": f"*{bias}"}, tile, _WARPS, _STAGES)
        for bias in ("bf16", "fp32")
        for name, kernel in (("bias_gelu", _forward_kernel), ("bias_gelu_backward", _backward_kernel))
    ]
