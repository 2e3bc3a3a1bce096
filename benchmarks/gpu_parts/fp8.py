"""The FP8 ops: their errors against float64 without rounding, and their times against the floor.

Shape legend in ``kernels/__init__.py``. These ops have no gradients, and raise ``amax`` in place, as a call again may do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.model import BertForPreTraining, EncoderLayer
from kernels.reference.fp8 import E4M3, E5M2, padded


@dataclass(frozen=True)
class Fp8Case:
    """Arguments of one call, what it would give without rounding, and the least work that it can be."""

    op: str
    arguments: tuple[object, ...]
    exact: Callable[[], list[Tensor]]
    """In float64, times the scale where the result is in FP8; without the transposed copies."""
    flop: float = 0.0
    moved: float = 0.0
    variant: str = ""
    """What it is taken of, where the op is there twice."""

    @property
    def title(self) -> str:
        """The op and what it is taken of."""
        return f"{self.op}{self.variant}"

    def results(self, function: Callable[..., object]) -> list[Tensor]:
        """Return what a function gives, beside the transposed copies, which must equal the others."""
        returned = function(*self.arguments)
        outputs = list(returned) if isinstance(returned, tuple) else [cast("Tensor", returned)]
        if len(outputs) > 1:
            rows = outputs[0]
            transposed = outputs.pop(1)[:, : len(rows)]
            if not torch.equal(transposed.t().float(), rows.float()):
                raise ValueError("the transposed copy is another tensor")
        return [output.float() for output in outputs]


def fp8_cases(model: BertForPreTraining, tokens: int) -> list[Fp8Case]:
    """Each op as an encoder layer calls it in training: bf16 beside the fp32 parameters, gradients as small as they are."""
    config, layer = model.config, model.layers[0]
    assert isinstance(layer, EncoderLayer)
    device = model.decoder_bias.device
    generator = torch.Generator(device).manual_seed(0)
    hidden, wide = config.hidden_size, config.intermediate_size
    weight, bias = layer.intermediate.weight.detach(), layer.intermediate.bias  # as ``bert.fp8`` hands them on

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * deviation).bfloat16()

    def scalar(value: float) -> Tensor:
        return torch.full((), value, device=device)

    small, gradient_scale, weight_scale = 1e-6, 2.0**30, 256.0
    x, gradient = normal(tokens, hidden), normal(tokens, 3 * hidden, deviation=small)
    product, upstream = normal(tokens, wide), normal(tokens, wide, deviation=small)

    def scaled(value: Tensor, scale: float) -> Tensor:
        return value.double() * scale

    def slope() -> Tensor:
        y = (product.double() + bias.detach().double()).requires_grad_()
        return torch.autograd.grad(F.gelu(y, approximate="tanh"), y, upstream.double())[0]

    left, right = x.to(E4M3), normal(wide, hidden).to(E4M3)
    left_gradient, right_input = normal(wide, padded(tokens)).to(E5M2), normal(hidden, padded(tokens)).to(E4M3)
    cells, wide_cells, weight_cells = tokens * hidden, tokens * wide, wide * hidden
    return [
        Fp8Case("cast_fp8", (x, scalar(64.0), scalar(0.0), E4M3), lambda: [scaled(x, 64.0)], moved=3 * cells),
        Fp8Case("cast_transpose_fp8", (x, scalar(64.0), scalar(0.0), E4M3), lambda: [scaled(x, 64.0)], moved=4 * cells),
        Fp8Case(
            "cast_transpose_fp8",
            (weight, scalar(weight_scale), scalar(0.0), E4M3),
            lambda: [scaled(weight, weight_scale)],
            moved=6 * weight_cells,
            variant=" of a weight",
        ),
        Fp8Case(
            "cast_transpose_sum_fp8",
            (gradient, scalar(gradient_scale), scalar(0.0), E5M2),
            lambda: [scaled(gradient, gradient_scale), gradient.double().sum(0)],
            moved=12 * cells,
        ),
        Fp8Case(
            "bias_gelu_cast_fp8",
            (product, bias, scalar(32.0), scalar(0.0)),
            lambda: [F.gelu(product.double() + bias.detach().double(), approximate="tanh") * 32],
            moved=4 * wide_cells,
        ),
        Fp8Case(
            "bias_gelu_backward_cast_fp8",
            (upstream, product, bias, scalar(gradient_scale), scalar(0.0)),
            lambda: [scaled(slope(), gradient_scale), slope().sum(0)],
            moved=6 * wide_cells,
        ),
        Fp8Case(
            "scaled_matmul",
            (left, right, scalar(0.5), scalar(0.25), torch.bfloat16, None, True),
            lambda: [left.double() @ right.double().t() / 8],
            flop=2.0 * tokens * hidden * wide,
        ),
        Fp8Case(
            "scaled_matmul",
            (left_gradient, right_input, scalar(0.5), scalar(0.25), torch.float32),
            lambda: [left_gradient.double() @ right_input.double().t() / 8],
            flop=2.0 * tokens * hidden * wide,
            variant=" of a weight's gradient",
        ),
    ]
