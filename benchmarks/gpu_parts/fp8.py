"""Cases for the FP8 ops, with exact float64 results for their errors and the least work for their times.

Shape legend in ``kernels/__init__.py``. These ops have no gradients. They only ever increase ``amax``, so repeated
calls with the same input give the same result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.layers import EncoderLayer
from bert.model import BertForPreTraining
from kernels.reference.fp8 import E4M3, E5M2, padded
from kernels.tuning.examples import Size, example_inputs


@dataclass(frozen=True)
class Fp8Case:
    """Arguments of one call, its exact result, and its least work."""

    op: str
    arguments: tuple[object, ...]
    exact: Callable[[], list[Tensor]]
    """Function that computes the result in float64, without transposed copies. FP8 results include their scale."""
    flop: float = 0.0
    moved: float = 0.0
    variant: str = ""
    """Label that distinguishes cases of the same op."""

    @property
    def title(self) -> str:
        return f"{self.op}{self.variant}"

    def results(self, function: Callable[..., object]) -> list[Tensor]:
        """Return the results of a function without transposed copies. Raises ``ValueError`` if a copy is wrong."""
        # In-place ops return None and write their results to the last two arguments.
        returned = function(*self.arguments)
        written = self.arguments[-2:] if returned is None else (returned,)
        outputs = [cast("Tensor", each) for each in (returned if isinstance(returned, tuple) else written)]
        if len(outputs) > 1:
            rows = outputs[0]
            # The remaining columns are padding, which adds zeros to the products.
            transposed = outputs.pop(1)[:, : len(rows)]
            if not torch.equal(transposed.t().float(), rows.float()):
                raise ValueError("the transposed copy is another tensor")
        return [output.float() for output in outputs]


def fp8_cases(model: BertForPreTraining, tokens: int) -> list[Fp8Case]:
    """Return cases for the FP8 ops as an encoder layer calls them: bf16 activations, fp32 parameters, small gradients."""
    config, layer = model.config, model.layers[0]
    assert isinstance(layer, EncoderLayer)
    device, hidden, wide = model.decoder_bias.device, config.hidden_size, config.intermediate_size
    weight, bias = layer.intermediate.weight.detach(), layer.intermediate.bias  # as ``bert.products.fp8`` passes them
    size = Size((tokens,), hidden=hidden, intermediate=wide)

    def case(
        op: str, exact: Callable[..., list[Tensor]], placed: Mapping[int, object], variant: str = "", **work: float
    ) -> Fp8Case:
        """Return a case with fixed values, such as scales, for the arguments at the given positions."""
        drawn, _ = example_inputs(op, device, torch.bfloat16, size)
        arguments = tuple(placed.get(place, value) for place, value in enumerate(drawn))
        return Fp8Case(op, arguments, partial(exact, *arguments), variant=variant, **work)

    def scalar(value: float) -> Tensor:
        return torch.full((), value, device=device)

    def gradient(*shape: int) -> Tensor:
        # Gradients have this size if the loss is divided by the global batch size.
        return (1e-6 * torch.randn(shape, generator=generator, device=device)).bfloat16()

    def in_fp8(rows: int, dtype: torch.dtype) -> Tensor:
        # The number of tokens is padded, because a weight's gradient is a product that contracts over the tokens.
        return torch.randn(rows, padded(tokens), generator=generator, device=device).to(dtype)

    generator = torch.Generator(device).manual_seed(0)
    # This scale brings the small gradients into the range of E5M2.
    upward = scalar(2.0**30)
    halves = {2: scalar(0.5), 3: scalar(0.25)}
    of_a_weight = {**halves, 0: in_fp8(wide, E5M2), 1: in_fp8(hidden, E4M3), 4: torch.float32}
    cells, wide_cells, flop = tokens * hidden, tokens * wide, 2.0 * tokens * hidden * wide
    backward = {0: gradient(tokens, wide), 2: bias, 3: upward}
    return [
        # Bytes moved: 2 or 4 read for each element, and 1 written for each FP8 copy.
        case("cast_fp8", _cast, {1: scalar(64.0)}, moved=3 * cells),
        case("cast_transpose_fp8", _cast, {1: scalar(64.0)}, moved=4 * cells),
        case("cast_transpose_into_fp8", _cast, {0: weight, 1: scalar(256.0)}, moved=6 * wide * hidden),
        case("cast_transpose_sum_fp8", _cast_sum, {0: gradient(tokens, 3 * hidden), 1: upward}, moved=12 * cells),
        case("bias_gelu_cast_fp8", _gelu, {1: bias, 2: scalar(32.0)}, moved=4 * wide_cells),
        case("bias_gelu_backward_cast_fp8", _gelu_backward, backward, moved=6 * wide_cells),
        case("scaled_matmul", _product, halves, flop=flop),
        case("scaled_matmul", _product, of_a_weight, " of a weight's gradient", flop=flop),
    ]


def _cast(x: Tensor, scale: Tensor, *_: object) -> list[Tensor]:
    return [x.double() * scale]


def _cast_sum(x: Tensor, scale: Tensor, *_: object) -> list[Tensor]:
    return [x.double() * scale, x.double().sum(0)]


def _gelu(product: Tensor, bias: Tensor, scale: Tensor, _: Tensor) -> list[Tensor]:
    return [F.gelu(product.double() + bias.detach().double(), approximate="tanh") * scale]


def _gelu_backward(upstream: Tensor, product: Tensor, bias: Tensor, scale: Tensor, _: Tensor) -> list[Tensor]:
    y = (product.double() + bias.detach().double()).requires_grad_()
    (slope,) = torch.autograd.grad(F.gelu(y, approximate="tanh"), y, upstream.double())
    return _cast_sum(slope, scale)


def _product(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, *_: object) -> list[Tensor]:
    return [(a.double() * inverse_a) @ (b.double() * inverse_b).t()]
