"""Example inputs for every op, used to measure implementations and to check whether they can be used.

Shape legend in ``kernels/__init__.py``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.reference.fp8 import E4M3, E5M2
from kernels.reference.lamb import LambHyperparameters, LambSegments, LambState
from kernels.reference.random import Dropout


@dataclass(frozen=True)
class Size:
    """Sizes of a model and a batch. The default is BERT-Large with 96 sequences of typical length for Wikipedia."""

    lengths: tuple[int, ...] = (256,) * 96
    """Number of tokens in each sequence, which may be 0."""
    max_seqlen: int = 512
    masked: int = 3648
    hidden: int = 1024
    heads: int = 16
    intermediate: int = 4096
    vocabulary: int = 30522


SMALL = Size(lengths=(12,) * 4, max_seqlen=16, masked=6, hidden=128, heads=2, intermediate=256, vocabulary=512)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def example_inputs(op: str, device: torch.device, dtype: torch.dtype, size: Size = SMALL, seed: int = 0) -> Arguments:
    """Return positional and keyword arguments for an op: random tensors, and dropout with BERT's probability.

    Floating-point tensors require gradients, except for ops that have no gradients, such as the FP8 ops. The LAMB ops and
    ``sum_of_squares`` always get fp32 vectors, whose size is the number of parameters in the feed-forward half of a layer.
    """
    make = _Maker(device, dtype, size, seed)
    if op.startswith("lamb") or op == "sum_of_squares":
        return _vector_op(op, make)
    return _arguments(op, make), {}


class _Maker:
    """Generator of random tensors. They are drawn on the CPU so that every device gets the same numbers."""

    def __init__(self, device: torch.device, dtype: torch.dtype, size: Size, seed: int) -> None:
        self.device, self.dtype, self.size = device, dtype, size
        self.tokens = sum(size.lengths)
        self.dropout = Dropout(0.1, torch.tensor([1, 2], device=device), 3)
        self._generator = torch.Generator().manual_seed(seed)

    def values(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype).requires_grad_()

    def all_values(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        return [self.values(*shape) for shape in shapes]

    def detached(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        return [self.values(*shape).detach() for shape in shapes]

    def ids(self, limit: int, count: int) -> Tensor:
        return torch.randint(limit, (count,), generator=self._generator).to(self.device)

    def number(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((), value, dtype=dtype, device=self.device)

    def self_attention(self) -> tuple[Tensor, Tensor, int]:
        """Return the fused input [T, 3, H, E], the sequences' bounds int32 [S + 1] and the longest possible length."""
        size = self.size
        qkv_T3HE = self.values(self.tokens, 3, size.heads, size.hidden // size.heads)
        bounds = torch.tensor([0, *size.lengths], device=self.device).cumsum(0, dtype=torch.int32)
        return qkv_T3HE, bounds, size.max_seqlen


def _arguments(op: str, make: _Maker) -> tuple[Any, ...]:
    size, tokens = make.size, make.tokens
    row, rows = (size.hidden,), (tokens, size.hidden)
    wide_row, wide_rows = (size.intermediate,), (tokens, size.intermediate)
    weight, transposed = (size.intermediate, size.hidden), (size.hidden, size.intermediate)
    scaling = make.number(1), make.number(0)
    match op:
        case "varlen_attention":
            qkv_T3HE, bounds, longest = make.self_attention()
            # Use views of one tensor, as the model does, because some implementations copy tensors that are not contiguous.
            return *qkv_T3HE.unbind(1), bounds, bounds, longest, make.dropout
        case "varlen_self_attention":
            return *make.self_attention(), make.dropout
        case "dropout_add_layer_norm":
            return *make.all_values(rows, row, rows, row, row), 1e-12, make.dropout
        case "dense_gelu":
            return tuple(make.all_values(rows, weight, wide_row))
        case "bias_gelu":
            return tuple(make.all_values(wide_rows, wide_row))
        case "embedding_layer_norm":
            places = torch.cat([torch.arange(length, device=make.device) for length in size.lengths])
            ids = make.ids(size.vocabulary, tokens), places, make.ids(2, tokens)
            tables = [(entries, size.hidden) for entries in (size.vocabulary, size.max_seqlen, 2)]
            return *ids, *make.all_values(*tables, row, row), 1e-12, make.dropout
        case "masked_lm_loss":  # training does not count correct predictions
            decoder = make.values(size.vocabulary, size.hidden)
            labels = make.ids(size.vocabulary, size.masked)
            return make.values(size.masked, size.hidden), decoder, make.values(size.vocabulary), labels, False
        case "cast_fp8" | "cast_transpose_fp8":
            return *make.detached(rows), *scaling, E4M3
        case "cast_transpose_into_fp8":  # the input is a weight, in fp32
            casts = (torch.zeros(shape, dtype=E4M3, device=make.device) for shape in (weight, transposed))
            return make.detached(weight)[0].float(), *scaling, *casts
        case "cast_transpose_sum_fp8":  # the input is the gradient of query, key and value
            return *make.detached((tokens, 3 * size.hidden)), *scaling, E5M2
        case "bias_gelu_cast_fp8":
            return *make.detached(wide_rows, wide_row), *scaling
        case "bias_gelu_backward_cast_fp8":
            return *make.detached(wide_rows, wide_rows, wide_row), *scaling
        case "attention_cast_fp8":
            qkv_T3HE, *others = make.self_attention()
            return qkv_T3HE.detach(), *others, make.dropout, *scaling
        case "attention_backward_cast_fp8":  # without dropout, whose mask would come from a forward pass
            qkv_T3HE, bounds, longest = make.self_attention()
            gradient, context = make.detached(*[tuple(qkv_T3HE[:, 0].shape)] * 2)
            lse_HT = torch.full((size.heads, tokens), 10.0, device=make.device)
            forward = context, lse_HT, torch.empty(0, dtype=torch.int16, device=make.device)
            return gradient, qkv_T3HE.detach(), bounds, *forward, longest, None, *scaling
        case "add_norm_cast_fp8":
            return *make.detached(rows, row, rows, row, row), 1e-12, make.dropout, *scaling
        case "add_norm_backward_cast_fp8":
            # Use a mean of 0 and a deviation of 1, which are nearly the statistics of the random inputs.
            statistics_2T = torch.tensor([[0.0], [1.0]], device=make.device).repeat(1, tokens)
            return *make.detached(rows, rows, rows, row, rows, row), statistics_2T, make.dropout, *scaling
        case "accumulate_weight_gradient":
            return torch.zeros(weight, device=make.device), *make.detached(wide_rows, rows)
        case "scaled_matmul":  # the forward pass uses fast accumulation, without a bias
            operands = (operand.to(E4M3) for operand in make.detached(rows, weight))
            return *operands, make.number(1), make.number(1), make.dtype, None, True
    raise KeyError(op)


def _vector_op(op: str, make: _Maker) -> Arguments:
    size = make.size
    # The segments are one matrix, which has a trust ratio, and two vectors, which have none.
    segments = LambSegments((size.hidden * size.intermediate, size.intermediate, size.hidden), (True, False, False))
    parameters = (sum(segments.sizes),)
    weights, gradients = (x.float() for x in make.detached(parameters, parameters))
    state, hyperparameters = LambState.zeros_like(weights), LambHyperparameters(0.9, 0.999, 1e-6, 0.01, 1.0)
    norm, rate = {"norm": make.number(len(gradients) ** 0.5)}, {"learning_rate": make.number(1e-3)}
    step = {"step": make.number(1, torch.int64)}
    if op == "sum_of_squares":
        return (weights,), {}
    if op == "lamb_apply":
        state.update_P.copy_(gradients)  # if all directions were zero, the op would change nothing
        squares_2A = torch.ones(2, sum(segments.adapted), dtype=torch.float64, device=make.device)
        return (weights, state, segments, squares_2A), norm | rate
    numbers = step | norm if op == "lamb_directions" else step | rate | {"copies_P": weights.bfloat16()}
    return (weights, gradients, state, segments, hyperparameters), numbers
