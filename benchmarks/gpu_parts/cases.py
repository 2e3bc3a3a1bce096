"""Inputs of every op as training has them, and the least work that it can be.

Parameters are fp32 and views of a flat buffer, also where the matrix products are in 16 bits under autocast; everything else
has the type that the model hands on there. Shape legend in ``kernels/__init__.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_parts.report import NotUsableError
from bert.configuration.config import ModelConfig
from bert.model import BertForPreTraining, EncoderLayer, LayerNorm
from bert.optimizer import FlatParameters
from kernels import OPS, Dropout

_P = 0.1
_EPS = 1e-12


@dataclass(frozen=True)
class Case:
    """Arguments of one call, of which the floating-point tensors are differentiable; the model's are ``nn.Parameter``."""

    op: str
    arguments: tuple[object, ...]
    autocast: torch.dtype | None
    """The type of matrix products, where it is not that of the arguments."""
    flop: tuple[float, float] = (0.0, 0.0)
    """Of the matrix products: forward, and both ways."""
    moved: tuple[float, float] = (0.0, 0.0)
    """Bytes that must be read and written: forward, and both ways."""

    def fresh(self) -> "Case":
        """The same values as new leaves of the graph."""
        return replace(self, arguments=tuple(map(_leaf, self.arguments)))

    def exact(self) -> "Case":
        """The same values in float64, without autocast."""
        return replace(self, arguments=tuple(_leaf(value, torch.float64) for value in self.arguments), autocast=None)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that gradients are asked of."""
        return [value for value in self.arguments if isinstance(value, Tensor) and value.requires_grad]

    def outputs(self, function: Callable[..., object]) -> list[Tensor]:
        """Return what a function gives for the arguments."""
        device = self.leaves[0].device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            returned = function(*self.arguments)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return [cast("Tensor", output) for output in outputs if output is not None]

    def upstream(self, function: Callable[..., object]) -> Tensor:
        """A gradient of the first output, always the same."""
        with torch.no_grad():
            output = self.outputs(function)[0]
        generator = torch.Generator(output.device).manual_seed(1)
        return torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)

    def forward_and_gradients(self, function: Callable[..., object], upstream: Tensor) -> list[Tensor]:
        """Return what a function gives for the arguments, and the gradients for an upstream one."""
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
    """A model of one layer in flat buffers, as training has it, with every parameter at random."""
    with device:
        model = BertForPreTraining(replace(config, num_hidden_layers=1))
    FlatParameters.of(model)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, config.hidden_size**-0.5 if parameter.ndim > 1 else 1, generator=generator)
    for norm in (module for module in model.modules() if isinstance(module, LayerNorm)):
        norm.weight.add_(1)
    return model


def cases(
    model: BertForPreTraining, lengths: Sequence[int], masked: int, dtype: torch.dtype, *, counting: bool = False
) -> list[Case]:
    """Each op as the model calls it for sequences of these lengths, with ``masked`` masked tokens, in training.

    ``dtype`` is that of matrix products and of the residual stream. A length may be 0. Labels of the last two masked tokens
    are -1: slots that are not in use. ``counting``: right answers are counted too, as in evaluation.
    """
    device = model.decoder_bias.device
    generator = torch.Generator(device).manual_seed(0)
    autocast = dtype if dtype.itemsize < 4 else None

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

    def ids(limit: int, count: int) -> Tensor:
        return torch.randint(0, limit, (count,), generator=generator, device=device)

    def dropout(stream: int) -> Dropout:
        return Dropout(_P, torch.tensor([1234567, 5], device=device), stream)

    config, layer, tables = model.config, model.layers[0], model.embeddings
    assert isinstance(layer, EncoderLayer)
    tokens, hidden, wide, vocabulary = sum(lengths), config.hidden_size, config.intermediate_size, config.vocab_size
    heads = config.num_attention_heads
    row, row_of_tables = tokens * hidden * dtype.itemsize, tokens * hidden * tables.word.element_size()
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    packed = normal(tokens, 3, heads, hidden // heads)
    scores = 2 * hidden * float(sum(length**2 for length in lengths))
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    labels = ids(vocabulary, masked)
    labels[-2:] = -1
    norm = model.transform_norm
    with torch.autocast(device.type, dtype, enabled=autocast is not None):
        after_norm = F.layer_norm(normal(1, hidden), norm.weight.shape, norm.weight, norm.bias).dtype
    dropped_norm = layer.attention_norm
    return [
        Case(
            "varlen_attention",
            (*(part.detach().requires_grad_() for part in packed.unbind(1)), bounds, bounds, max(lengths), dropout(1)),
            autocast,
            flop=(2 * scores, 6 * scores),
            moved=(4 * row, 12 * row),
        ),
        Case(
            "varlen_self_attention",
            (packed, bounds, max(lengths), dropout(1)),
            autocast,
            flop=(2 * scores, 6 * scores),
            moved=(4 * row, 12 * row),
        ),
        Case(
            "dropout_add_layer_norm",
            (
                normal(tokens, hidden),
                layer.attention_output.bias,
                normal(tokens, hidden),
                dropped_norm.weight,
                dropped_norm.bias,
                _EPS,
                dropout(2),
            ),
            autocast,
            moved=(3 * row, 7 * row),
        ),
        Case(
            "embedding_layer_norm",
            (
                ids(vocabulary, tokens),
                positions,
                ids(2, tokens),
                tables.word,
                tables.position,
                tables.segment,
                tables.norm.weight,
                tables.norm.bias,
                _EPS,
                dropout(0),
            ),
            autocast,
            moved=(2 * row_of_tables, 6 * row_of_tables),
        ),
        Case(
            "dense_gelu",
            (normal(tokens, hidden), layer.intermediate.weight, layer.intermediate.bias),
            autocast,
            flop=(2.0 * tokens * hidden * wide, 6.0 * tokens * hidden * wide),
        ),
        Case(
            "masked_lm_loss",
            (normal(masked, hidden, dtype=after_norm), tables.word, model.decoder_bias, labels, -1, counting),
            autocast,
            flop=(2.0 * masked * hidden * vocabulary, 6.0 * masked * hidden * vocabulary),
        ),
    ]


def call(op: str, name: str, *arguments: object, **settings: object) -> Any:
    """Call one implementation of an op; ``NotUsableError`` where it cannot take these arguments."""
    chosen = OPS[op].implementations[name]
    if reasons := chosen.unsupported_reasons(op, *arguments, **settings):
        raise NotUsableError("; ".join(reasons))
    return chosen.function(op)(*arguments, **settings)
