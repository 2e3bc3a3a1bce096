"""Inputs of every op as in training, and the least work that a call of it takes.

Parameters are fp32 and views of a flat buffer, also where the matrix products are in 16 bits under autocast; everything else
has the type that the model hands on there. Shape legend in ``kernels/__init__.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_parts.measuring.report import NotUsableError
from bert.configuration.sections import ModelConfig
from bert.layers import EncoderLayer, LayerNorm
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters
from kernels import OPS
from kernels.tuning.examples import Size, example_inputs


@dataclass(frozen=True)
class LeastWork:
    """Least work of a call: forward alone, and forward and backward."""

    flop: tuple[float, float] = (0.0, 0.0)
    """FLOP of the matrix products."""
    moved: tuple[float, float] = (0.0, 0.0)
    """Bytes that must be read and written."""


@dataclass(frozen=True)
class Case:
    """Arguments of one call. Floating-point tensors require gradients; those of the model are ``nn.Parameter``."""

    op: str
    arguments: tuple[object, ...]
    autocast: torch.dtype | None
    """Type of the matrix products, if the arguments have another type."""
    work: LeastWork

    def fresh(self) -> "Case":
        """Return the same case with new leaves."""
        # New leaves, since gradients of an earlier call hang on the old ones.
        return replace(self, arguments=tuple(map(_leaf, self.arguments)))

    def exact(self) -> "Case":
        """Return the same case in float64, without autocast."""
        return replace(self, arguments=tuple(_leaf(value, torch.float64) for value in self.arguments), autocast=None)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that require gradients."""
        return [value for value in self.arguments if isinstance(value, Tensor) and value.requires_grad]

    def outputs(self, function: Callable[..., object]) -> list[Tensor]:
        """Return the results of a function for the arguments."""
        device = self.leaves[0].device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            # Under the autocast of training, which decides the types that the op meets.
            returned = function(*self.arguments)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return [cast("Tensor", output) for output in outputs if output is not None]

    def upstream(self, function: Callable[..., object]) -> Tensor:
        """Draw a gradient of the first output, with a fixed seed."""
        with torch.no_grad():
            output = self.outputs(function)[0]
        # The same seed each time: all implementations of a case are compared by one gradient.
        generator = torch.Generator(output.device).manual_seed(1)
        return torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)

    def forward_and_gradients(self, function: Callable[..., object], upstream: Tensor) -> list[Tensor]:
        """Return the results of a function for the arguments, and the gradients of the leaves."""
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
    """Build a model of one layer with flat parameters, as in training, and draw every parameter."""
    with device:
        model = BertForPreTraining(replace(config, num_hidden_layers=1))
    FlatParameters.of(model)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        # Deviations that keep activations near 1, so that errors are those of ordinary numbers.
        parameter.normal_(0, config.hidden_size**-0.5 if parameter.ndim > 1 else 1, generator=generator)
    for norm in (module for module in model.modules() if isinstance(module, LayerNorm)):
        # Around 1, as a norm's weights are in a trained model.
        norm.weight.add_(1)
    return model


def cases(
    model: BertForPreTraining, lengths: Sequence[int], masked: int, dtype: torch.dtype, *, counting: bool = False
) -> list[Case]:
    """Return a case for each op as the model calls it in training, with ``masked`` masked tokens.

    ``dtype`` is that of matrix products and of the residual stream. A length may be 0. Labels of the last two masked tokens
    are -1: slots that are not in use. ``counting``: right answers are counted too, as in evaluation.
    """
    autocast = dtype if dtype.itemsize < 4 else None
    config, layer, tables, norm = model.config, model.layers[0], model.embeddings, model.transform_norm
    assert isinstance(layer, EncoderLayer)
    device, hidden, wide = model.decoder_bias.device, config.hidden_size, config.intermediate_size
    size = Size(
        tuple(lengths), max(lengths), masked, hidden, config.num_attention_heads, wide, vocabulary=config.vocab_size
    )
    # Autocast decides what a norm gives, which differs between devices and types: asked, not assumed.
    with torch.autocast(device.type, dtype, enabled=autocast is not None):
        after_norm = F.layer_norm(
            torch.zeros(1, hidden, dtype=dtype, device=device), (hidden,), norm.weight, norm.bias
        ).dtype
    # The backward pass has two products for each product of the forward pass.
    # Two operations for each multiply-add.
    feed_forward, decoder = 2.0 * sum(lengths) * hidden * wide, 2.0 * masked * hidden * config.vocab_size
    scores = 4.0 * hidden * sum(length**2 for length in lengths)
    # Tables are fp32 parameters, whatever the products' type.
    row, row_of_tables = (sum(lengths) * hidden * width for width in (dtype.itemsize, tables.word.element_size()))
    wide_row = sum(lengths) * wide * dtype.itemsize
    # Moved forward: query, key, value and output.
    attention = LeastWork((scores, 3 * scores), (4 * row, 12 * row))
    dropped_norm = layer.attention_norm
    embeddings = tables.word, tables.position, tables.segment, tables.norm.weight, tables.norm.bias

    def case(op: str, work: LeastWork, weights: Mapping[int, object]) -> Case:
        """Return a case whose arguments at the given places are the model's own weights or fixed values."""
        arguments, _ = example_inputs(op, device, dtype, size)
        # By place, as `example_inputs` has its arguments by position.
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
        # The heads' input is a norm's output, which may be of another type than the residual stream.
        replace(loss, arguments=(_leaf(states, after_norm), *others)),
    ]


def call(op: str, name: str, *arguments: object, **settings: object) -> Any:
    """Call one implementation of an op. Raises ``NotUsableError`` if it cannot take these arguments."""
    chosen = OPS[op].implementations[name]
    if reasons := chosen.unsupported_reasons(op, *arguments, **settings):
        raise NotUsableError("; ".join(reasons))
    return chosen.function(op)(*arguments, **settings)
