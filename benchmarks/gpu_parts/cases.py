"""Arguments for every op as in training, and the least work that a call must do.

Parameters are fp32 views of a flat buffer, even if autocast runs the matrix products in 16 bits. All other arguments have
the types that the model passes. Shape legend in ``kernels/__init__.py``.

The FP8 ops have no gradients. Their cases have exact float64 results. These ops only ever increase ``amax``, so repeated
calls with the same input give the same result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_parts.report import NotUsableError
from bert.configuration.sections import ModelConfig
from bert.layers import EncoderLayer, LayerNorm
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters
from kernels import OPS
from kernels.reference.fp8 import E4M3, E5M2, padded
from kernels.tuning.examples import Size, example_inputs


@dataclass(frozen=True)
class LeastWork:
    """Least work of a call. Each pair is (forward pass alone, forward and backward pass)."""

    flop: tuple[float, float] = (0.0, 0.0)
    """FLOP of the matrix products."""
    moved: tuple[float, float] = (0.0, 0.0)
    """Bytes that must be read and written."""


@dataclass(frozen=True)
class Case:
    """Arguments of one call. Floating-point tensors require gradients; the model's own tensors are ``nn.Parameter``."""

    op: str
    arguments: tuple[object, ...]
    autocast: torch.dtype | None
    """Type of the matrix products under autocast, or None for no autocast."""
    work: LeastWork

    def fresh(self) -> "Case":
        """Return this case with new leaf tensors, because the old leaves hold the gradients of earlier calls."""
        return replace(self, arguments=tuple(map(_leaf, self.arguments)))

    def exact(self) -> "Case":
        return replace(self, arguments=tuple(_leaf(value, torch.float64) for value in self.arguments), autocast=None)

    @property
    def leaves(self) -> list[Tensor]:
        return [value for value in self.arguments if isinstance(value, Tensor) and value.requires_grad]

    def outputs(self, function: Callable[..., object]) -> list[Tensor]:
        """Call a function with the arguments, and return its results except None."""
        device = self.leaves[0].device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            # As in training, autocast determines the types that the op receives.
            returned = function(*self.arguments)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return [cast("Tensor", output) for output in outputs if output is not None]

    def upstream(self, function: Callable[..., object]) -> Tensor:
        """Draw a random gradient for the first output. A fixed seed gives all implementations the same gradient."""
        with torch.no_grad():
            output = self.outputs(function)[0]
        generator = torch.Generator(output.device).manual_seed(1)
        return torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)

    def forward_and_gradients(self, function: Callable[..., object], upstream: Tensor) -> list[Tensor]:
        """Return a function's results, followed by the gradients of its first result with respect to the leaves."""
        outputs = self.outputs(function)
        gradients = torch.autograd.grad(outputs[0], self.leaves, upstream.to(outputs[0].dtype))
        return [*(output.detach() for output in outputs), *gradients]


def _leaf(value: object, dtype: torch.dtype | None = None) -> object:
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    made = value.detach().to(dtype or value.dtype)
    return nn.Parameter(made) if isinstance(value, nn.Parameter) else made.requires_grad_()


@torch.no_grad()
def drawn_model(config: ModelConfig, device: torch.device) -> BertForPreTraining:
    """Build a one-layer model with flat parameters, as in training, and randomize every parameter."""
    with device:
        model = BertForPreTraining(replace(config, num_hidden_layers=1))
    FlatParameters.of(model)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        # This standard deviation keeps activations near 1, so that errors are measured on values of ordinary size.
        parameter.normal_(0, config.hidden_size**-0.5 if parameter.ndim > 1 else 1, generator=generator)
    for norm in (module for module in model.modules() if isinstance(module, LayerNorm)):
        # The weights of a norm are around 1 in a trained model.
        norm.weight.add_(1)
    return model


def cases(
    model: BertForPreTraining, lengths: Sequence[int], masked: int, dtype: torch.dtype, *, counting: bool = False
) -> list[Case]:
    """Return a case for each op as the model calls it in training, with ``masked`` masked tokens.

    ``dtype`` is the type of matrix products and of the residual stream. A length may be 0. The labels of the last two masked
    tokens are -1, which marks unused slots. With ``counting``, correct predictions are also counted, as in evaluation.
    """
    autocast = dtype if dtype.itemsize < 4 else None
    config, layer, tables, norm = model.config, model.layers[0], model.embeddings, model.transform_norm
    assert isinstance(layer, EncoderLayer)
    device, hidden, wide = model.decoder_bias.device, config.hidden_size, config.intermediate_size
    size = Size(
        tuple(lengths), max(lengths), masked, hidden, config.num_attention_heads, wide, vocabulary=config.vocab_size
    )
    # The output type of a norm under autocast differs between devices and types, so it is determined by a call.
    with torch.autocast(device.type, dtype, enabled=autocast is not None):
        after_norm = F.layer_norm(
            torch.zeros(1, hidden, dtype=dtype, device=device), (hidden,), norm.weight, norm.bias
        ).dtype
    # A multiply-add counts as two operations. The backward pass has two products for each product of the forward pass.
    feed_forward, decoder = 2.0 * sum(lengths) * hidden * wide, 2.0 * masked * hidden * config.vocab_size
    scores = 4.0 * hidden * sum(length**2 for length in lengths)
    # The embedding tables are fp32 parameters, independent of the type of the matrix products.
    row, row_of_tables = (sum(lengths) * hidden * width for width in (dtype.itemsize, tables.word.element_size()))
    wide_row = sum(lengths) * wide * dtype.itemsize
    # The forward pass moves query, key, value and output.
    attention = LeastWork((scores, 3 * scores), (4 * row, 12 * row))
    dropped_norm = layer.attention_norm
    embeddings = tables.word, tables.position, tables.segment, tables.norm.weight, tables.norm.bias

    def case(op: str, work: LeastWork, weights: Mapping[int, object]) -> Case:
        """Return a case with the model's own weights or fixed values for the arguments at the given positions."""
        arguments, _ = example_inputs(op, device, dtype, size)
        # `example_inputs` returns the arguments in the order of the op's parameters.
        placed = (weights.get(place, value) for place, value in enumerate(arguments))
        return Case(op, tuple(map(_leaf, placed)), autocast, work)

    loss = case(
        "masked_lm_loss", LeastWork((decoder, 3 * decoder)), {1: tables.word, 2: model.decoder_bias, 5: counting}
    )
    states, *others = loss.arguments
    labels = others[2]
    assert isinstance(states, Tensor)
    assert isinstance(labels, Tensor)
    labels[-2:] = -1
    return [
        case("varlen_attention", attention, {}),
        case("varlen_self_attention", attention, {}),
        case(
            "dropout_add_layer_norm",
            LeastWork(moved=(3 * row, 7 * row)),
            {1: layer.attention_output.bias, 3: dropped_norm.weight, 4: dropped_norm.bias},
        ),
        case(
            "embedding_layer_norm",
            LeastWork(moved=(2 * row_of_tables, 6 * row_of_tables)),
            dict(enumerate(embeddings, 3)),
        ),
        case(
            "dense_gelu",
            LeastWork((feed_forward, 3 * feed_forward)),
            {1: layer.intermediate.weight, 2: layer.intermediate.bias},
        ),
        case("bias_gelu", LeastWork(moved=(2 * wide_row, 5 * wide_row)), {1: layer.intermediate.bias}),
        # The masked-LM head's input is the output of a norm, whose type may differ from the residual stream's.
        replace(loss, arguments=(_leaf(states, after_norm), *others)),
    ]


def call(op: str, name: str, *arguments: object, **settings: object) -> Any:
    """Call one implementation of an op. Raises ``NotUsableError`` if it cannot take these arguments."""
    chosen = OPS[op].implementations[name]
    if reasons := chosen.unsupported_reasons(op, *arguments, **settings):
        raise NotUsableError("; ".join(reasons))
    return chosen.function(op)(*arguments, **settings)


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
