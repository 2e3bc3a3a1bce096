"""Inputs of a model's size for every op, to ask an implementation about and to measure it with.

Shape legend in ``kernels/__init__.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.reference.fp8 import E4M3, E5M2
from kernels.reference.lamb import LambHyperparameters, LambSegments, LambState
from kernels.reference.random import Dropout


@dataclass(frozen=True)
class Size:
    """Sizes of the model and batch whose inputs these are; the default is BERT-Large with 96 sequences of Wikipedia."""

    lengths: tuple[int, ...] = (256,) * 96
    """Tokens of each sequence; a length may be 0."""
    max_seqlen: int = 512
    masked: int = 3648
    hidden: int = 1024
    heads: int = 16
    intermediate: int = 4096
    vocabulary: int = 30522


SMALL = Size(lengths=(12,) * 4, max_seqlen=16, masked=6, hidden=128, heads=2, intermediate=256, vocabulary=512)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def example_inputs(op: str, device: torch.device, dtype: torch.dtype, size: Size = SMALL, seed: int = 0) -> Arguments:
    """Arguments of the op ``op``, by position and by name: random tensors that ask for gradients, dropout at BERT's rate.

    LAMB and its norm get fp32 vectors whatever the dtype: as many parameters as a layer's feed-forward half has. Ops in FP8
    have no gradients.
    """
    make = _Maker(device, dtype, size, seed)
    return _VECTOR_MAKERS[op](make) if op in _VECTOR_MAKERS else (_MAKERS[op](make), {})


class _Maker:
    def __init__(self, device: torch.device, dtype: torch.dtype, size: Size, seed: int) -> None:
        self.device = device
        self.dtype = dtype
        self.size = size
        self._generator = torch.Generator().manual_seed(seed)

    def values(self, *shape: int) -> Tensor:
        """Random numbers that ask for a gradient."""
        # Drawn on the CPU: the same numbers for every device.
        made = torch.randn(shape, generator=self._generator).to(self.device, self.dtype)
        return made.requires_grad_()

    def ids(self, most: int, count: int) -> Tensor:
        """Random integers below ``most``, int64."""
        return torch.randint(most, (count,), generator=self._generator).to(self.device)

    def dropout(self) -> Dropout:
        return Dropout(0.1, torch.tensor([1, 2], device=self.device), 3)

    @property
    def tokens(self) -> int:
        return sum(self.size.lengths)

    def cu_seqlens(self) -> Tensor:
        """Bounds of the sequences; int32 [S + 1]."""
        return torch.tensor([0, *self.size.lengths], device=self.device).cumsum(0, dtype=torch.int32)

    def positions(self) -> Tensor:
        """Place of each token in its sequence, int64."""
        return torch.cat([torch.arange(length, device=self.device) for length in self.size.lengths])


def _varlen_attention(make: _Maker) -> tuple[Any, ...]:
    size = make.size
    # Views of one tensor, as the model's are: some implementations copy what is not contiguous.
    query, key, value = make.values(make.tokens, 3, size.heads, size.hidden // size.heads).unbind(1)
    return query, key, value, make.cu_seqlens(), make.cu_seqlens(), size.max_seqlen, make.dropout()


def _varlen_self_attention(make: _Maker) -> tuple[Any, ...]:
    size = make.size
    qkv = make.values(make.tokens, 3, size.heads, size.hidden // size.heads)
    return qkv, make.cu_seqlens(), size.max_seqlen, make.dropout()


def _dropout_add_layer_norm(make: _Maker) -> tuple[Any, ...]:
    rows, row = (make.tokens, make.size.hidden), (make.size.hidden,)
    shapes = (rows, row, rows, row, row)
    return (*(make.values(*shape) for shape in shapes), 1e-12, make.dropout())


def _dense_gelu(make: _Maker) -> tuple[Any, ...]:
    size = make.size
    return (
        make.values(make.tokens, size.hidden),
        make.values(size.intermediate, size.hidden),
        make.values(size.intermediate),
    )


def _bias_gelu(make: _Maker) -> tuple[Any, ...]:
    return make.values(make.tokens, make.size.intermediate), make.values(make.size.intermediate)


def _accumulate_weight_gradient(make: _Maker) -> tuple[Any, ...]:
    """Make operands of the gradient of the feed-forward half's first weight."""
    size = make.size
    operands = _detached(make, (make.tokens, size.intermediate), (make.tokens, size.hidden))
    return torch.zeros(size.intermediate, size.hidden, device=make.device), *operands


def _embedding_layer_norm(make: _Maker) -> tuple[Any, ...]:
    rows = (make.size.vocabulary, make.size.max_seqlen, 2)
    ids = make.ids(make.size.vocabulary, make.tokens), make.positions(), make.ids(2, make.tokens)
    tables = (make.values(most, make.size.hidden) for most in rows)
    gains = (make.values(make.size.hidden) for _ in range(2))
    return (*ids, *tables, *gains, 1e-12, make.dropout())


def _masked_lm_loss(make: _Maker) -> tuple[Any, ...]:
    """Make inputs as in training, which does not count."""
    size = make.size
    decoder = make.values(size.vocabulary, size.hidden)
    labels = make.ids(size.vocabulary, size.masked)
    return make.values(size.masked, size.hidden), decoder, make.values(size.vocabulary), labels, -1, False


def _cast_fp8(make: _Maker) -> tuple[Any, ...]:
    """An activation."""
    return *_detached(make, (make.tokens, make.size.hidden)), *_scale_and_amax(make), E4M3


def _cast_transpose_into_fp8(make: _Maker) -> tuple[Any, ...]:
    """A weight, in fp32 whatever the dtype."""
    wide, narrow = make.size.intermediate, make.size.hidden
    casts = (torch.zeros(shape, dtype=E4M3, device=make.device) for shape in ((wide, narrow), (narrow, wide)))
    return *(weight.float() for weight in _detached(make, (wide, narrow))), *_scale_and_amax(make), *casts


def _cast_transpose_sum_fp8(make: _Maker) -> tuple[Any, ...]:
    """The gradient of query, key and value."""
    return *_detached(make, (make.tokens, 3 * make.size.hidden)), *_scale_and_amax(make), E5M2


def _bias_gelu_cast_fp8(make: _Maker) -> tuple[Any, ...]:
    wide = (make.tokens, make.size.intermediate)
    return *_detached(make, wide, wide[1:]), *_scale_and_amax(make)


def _bias_gelu_backward_cast_fp8(make: _Maker) -> tuple[Any, ...]:
    wide = (make.tokens, make.size.intermediate)
    return *_detached(make, wide, wide, wide[1:]), *_scale_and_amax(make)


def _attention_cast_fp8(make: _Maker) -> tuple[Any, ...]:
    qkv, *others = _varlen_self_attention(make)
    return qkv.detach(), *others, *_scale_and_amax(make)


def _attention_backward_cast_fp8(make: _Maker) -> tuple[Any, ...]:
    """Make inputs without dropout: what it kept would be the forward pass's."""
    size = make.size
    qkv, cu_seqlens, max_seqlen, _ = _varlen_self_attention(make)
    gradient, context = (values.detach() for values in (make.values(*qkv[:, 0].shape) for _ in range(2)))
    lse = torch.full((size.heads, make.tokens), 10.0, device=make.device)
    forward = context, lse, torch.empty(0, dtype=torch.int16, device=make.device)
    return gradient, qkv.detach(), cu_seqlens, *forward, max_seqlen, None, *_scale_and_amax(make)


def _add_norm_cast_fp8(make: _Maker) -> tuple[Any, ...]:
    rows, row = (make.tokens, make.size.hidden), (make.size.hidden,)
    return *_detached(make, rows, row, rows, row, row), 1e-12, make.dropout(), *_scale_and_amax(make)


def _add_norm_backward_cast_fp8(make: _Maker) -> tuple[Any, ...]:
    rows, row = (make.tokens, make.size.hidden), (make.size.hidden,)
    # Mean 0, deviation 1, as those of the normal numbers nearly are.
    statistics = torch.tensor([[0.0], [1.0]], device=make.device).repeat(1, make.tokens)
    tensors = _detached(make, rows, rows, rows, row, rows, row)
    return *tensors, statistics, make.dropout(), *_scale_and_amax(make)


def _scaled_matmul(make: _Maker) -> tuple[Any, ...]:
    """The feed-forward half's first product."""
    size = make.size
    operands = _detached(make, (make.tokens, size.hidden), (size.intermediate, size.hidden))
    inverses = (torch.ones((), device=make.device) for _ in operands)
    # No bias, and sums of the tensor cores alone, as going forward.
    return *(operand.to(E4M3) for operand in operands), *inverses, make.dtype, None, True


def _detached(make: _Maker, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [make.values(*shape).detach() for shape in shapes]


def _scale_and_amax(make: _Maker) -> tuple[Tensor, Tensor]:
    return torch.ones((), device=make.device), torch.zeros((), device=make.device)


def _lamb_step(make: _Maker) -> Arguments:
    args, kwargs = _lamb_directions(make)
    del kwargs["norm"]
    rate, copies = torch.full((), 1e-3, device=make.device), args[0].bfloat16()
    return args, kwargs | {"learning_rate": rate, "copies_P": copies}


def _lamb_directions(make: _Maker) -> Arguments:
    size = make.size
    # A matrix and two vectors, since trust ratios are of the first alone.
    segments = LambSegments((size.hidden * size.intermediate, size.intermediate, size.hidden), (True, False, False))
    weights, gradients = (make.values(sum(segments.sizes)).detach().float() for _ in range(2))
    hyperparameters = LambHyperparameters(0.9, 0.999, 1e-6, 0.01, 1.0)
    step = torch.ones((), dtype=torch.int64, device=make.device)
    # The norm of as many normal numbers.
    norm = torch.full((), len(gradients) ** 0.5, device=make.device)
    return (weights, gradients, LambState.zeros_like(weights), segments, hyperparameters), {"step": step, "norm": norm}


def _lamb_apply(make: _Maker) -> Arguments:
    (weights, _, state, segments, _), kwargs = _lamb_directions(make)
    squares = torch.ones(2, sum(segments.adapted), dtype=torch.float64, device=make.device)
    rate = torch.full((), 1e-3, device=make.device)
    return (weights, state, segments, squares), {"norm": kwargs["norm"], "learning_rate": rate}


def _sum_of_squares(make: _Maker) -> Arguments:
    (weights, *_), _ = _lamb_directions(make)
    return (weights,), {}


_VECTOR_MAKERS: dict[str, Callable[[_Maker], Arguments]] = {
    "lamb_step": _lamb_step,
    "lamb_directions": _lamb_directions,
    "lamb_apply": _lamb_apply,
    "sum_of_squares": _sum_of_squares,
}
_MAKERS: dict[str, Callable[[_Maker], tuple[Any, ...]]] = {
    "varlen_attention": _varlen_attention,
    "varlen_self_attention": _varlen_self_attention,
    "dropout_add_layer_norm": _dropout_add_layer_norm,
    "dense_gelu": _dense_gelu,
    "bias_gelu": _bias_gelu,
    "accumulate_weight_gradient": _accumulate_weight_gradient,
    "embedding_layer_norm": _embedding_layer_norm,
    "masked_lm_loss": _masked_lm_loss,
    "cast_fp8": _cast_fp8,
    "cast_transpose_fp8": _cast_fp8,
    "cast_transpose_into_fp8": _cast_transpose_into_fp8,
    "cast_transpose_sum_fp8": _cast_transpose_sum_fp8,
    "bias_gelu_cast_fp8": _bias_gelu_cast_fp8,
    "bias_gelu_backward_cast_fp8": _bias_gelu_backward_cast_fp8,
    "attention_cast_fp8": _attention_cast_fp8,
    "attention_backward_cast_fp8": _attention_backward_cast_fp8,
    "add_norm_cast_fp8": _add_norm_cast_fp8,
    "add_norm_backward_cast_fp8": _add_norm_backward_cast_fp8,
    "scaled_matmul": _scaled_matmul,
}
