"""Inputs of every op, and the least work that it can be.

Shape legend in ``kernels/__init__.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from bert.config import ModelConfig
from kernels import Dropout

_P = 0.1
_EPS = 1e-12


@dataclass(frozen=True)
class Case:
    """Arguments of one call, of which the floating-point tensors are differentiable."""

    op: str
    arguments: tuple[object, ...]
    flop: tuple[float, float] = (0.0, 0.0)
    """Of the matrix products: forward, and both ways."""
    moved: tuple[float, float] = (0.0, 0.0)
    """Bytes that must be read and written: forward, and both ways."""

    def typed(self, dtype: torch.dtype) -> "Case":
        """The same values in another type, as new leaves of the graph."""

        def changed(value: object) -> object:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.detach().to(dtype).requires_grad_()
            return value

        return replace(self, arguments=tuple(changed(value) for value in self.arguments))

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that gradients are asked of."""
        return [value for value in self.arguments if isinstance(value, Tensor) and value.requires_grad]

    def upstream(self, function: Callable[..., object]) -> Tensor:
        """A gradient of the first output, always the same."""
        with torch.no_grad():
            output = _outputs(function(*self.arguments))[0]
        generator = torch.Generator(output.device).manual_seed(1)
        return torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)

    def forward_and_gradients(self, function: Callable[..., object], upstream: Tensor) -> list[Tensor]:
        """What a function gives for the arguments, and the gradients for an upstream one."""
        outputs = _outputs(function(*self.arguments))
        return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs[0], self.leaves, upstream)]


def _outputs(returned: object) -> list[Tensor]:
    outputs = returned if isinstance(returned, tuple) else (returned,)
    return [cast("Tensor", output) for output in outputs if output is not None]


def cases(
    model: ModelConfig, lengths: Sequence[int], masked: int, dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Each op as the model calls it for sequences of these lengths, with ``masked`` masked tokens, in training.

    A length may be 0. Labels of the last two masked tokens are -1: slots that are not in use.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale + mean).to(dtype).requires_grad_()

    def ids(limit: int, count: int) -> Tensor:
        return torch.randint(0, limit, (count,), generator=generator, device=device)

    def dropout(stream: int) -> Dropout:
        return Dropout(_P, torch.tensor([1234567, 5], device=device), stream)

    tokens, hidden, wide, vocabulary = sum(lengths), model.hidden_size, model.intermediate_size, model.vocab_size
    heads = model.num_attention_heads
    size = dtype.itemsize
    row = tokens * hidden * size
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    packed = normal(tokens, 3, heads, hidden // heads)
    scores = 2 * hidden * float(sum(length**2 for length in lengths))
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    labels = ids(vocabulary, masked)
    labels[-2:] = -1
    tables = [normal(rows, hidden) for rows in (vocabulary, max(lengths), 2)]
    norm = [normal(hidden, mean=1), normal(hidden)]
    small = {"scale": hidden**-0.5}
    return [
        Case(
            "varlen_attention",
            (*packed.detach().unbind(1), bounds, bounds, max(lengths), dropout(1)),
            flop=(2 * scores, 6 * scores),
            moved=(4 * row, 12 * row),
        ).typed(dtype),
        Case(
            "varlen_self_attention",
            (packed.detach(), bounds, max(lengths), dropout(1)),
            flop=(2 * scores, 6 * scores),
            moved=(4 * row, 12 * row),
        ).typed(dtype),
        Case(
            "dropout_add_layer_norm",
            (normal(tokens, hidden), normal(hidden), normal(tokens, hidden), *norm, _EPS, dropout(2)),
            moved=(3 * row, 7 * row),
        ),
        Case(
            "embedding_layer_norm",
            (ids(vocabulary, tokens), positions, ids(2, tokens), *tables, *norm, _EPS, dropout(0)),
            moved=(2 * row, 6 * row),
        ),
        Case(
            "dense_gelu",
            (normal(tokens, hidden), normal(wide, hidden, **small), normal(wide)),
            flop=(2.0 * tokens * hidden * wide, 6.0 * tokens * hidden * wide),
        ),
        Case(
            "masked_lm_loss",
            (normal(masked, hidden), normal(vocabulary, hidden, **small), normal(vocabulary), labels, -1, False),
            flop=(2.0 * masked * hidden * vocabulary, 6.0 * masked * hidden * vocabulary),
        ),
    ]
