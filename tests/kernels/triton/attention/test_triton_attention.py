# pyright: reportArgumentType=false, reportCallIssue=false
"""Triton's variable-length attention under the interpreter, against float64 with the mask of ``Dropout.mask``."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference import ops as reference
from kernels.reference.random import Dropout
from kernels.triton.attention.varlen import varlen_attention, varlen_self_attention
from kernels.tuning.examples import Size, example_inputs
from tests.kernels.accuracy import CPU, assert_within_twice, output_and_gradients

HEADS = 2
AROUND_A_BLOCK = [31, 32, 33, 64, 65]
"""Which is of 32 in fp32, else of 64."""
OTHER_LENGTHS = {
    "few queries of many keys": ([2, 1, 2, 70], [66, 129, 1, 40]),
    "sequences that ask for nothing": ([0, 4, 0], [5, 6, 70]),
    "more queries than keys": ([70, 3], [2, 1]),
}


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def dropout_of(p: float) -> Dropout:
    """Seed and step are more than 32 bits, of the latter of which the lower count."""
    return Dropout(p, torch.tensor([2**40 + 7, 2**32 + 3]), 5)


def inputs(
    lengths_q: list[int],
    lengths_k: list[int],
    dtype: torch.dtype = torch.float32,
    size: int = 32,
    dropout: Dropout | None = None,
) -> list[Any]:
    """Arguments of ``varlen_attention``."""
    queries, keys, longest = sum(lengths_q), sum(lengths_k), max(*lengths_q, *lengths_k)
    sizes = Size((max(queries, keys),), hidden=HEADS * size, heads=HEADS)
    query, key, value = example_inputs("varlen_attention", CPU, dtype, sizes, seed=1)[0][:3]
    return [query[:queries], key[:keys], value[:keys], cu_seqlens(lengths_q), cu_seqlens(lengths_k), longest, dropout]


def assert_accurate(arguments: list[Any]) -> None:
    """Free is a unit in the last place, and a few of fp32.

    The interpreter's casts to bf16 cut off, and the definition gets right what one key makes of the gradients of scores: 0.
    """
    free = torch.finfo(arguments[0].dtype).eps + 16 * torch.finfo(torch.float32).eps
    assert_within_twice(varlen_attention, reference.varlen_attention, arguments, free)


@pytest.mark.parametrize(
    ("dtype", "size", "p"),
    [(torch.float32, 32, 0.1), (torch.bfloat16, 64, 0.1), (torch.float16, 16, 0.0)],
    ids=["fp32", "bf16", "fp16, no dropout"],
)
def test_error_is_at_most_twice_plain_pytorch(dtype: torch.dtype, size: int, p: float):
    assert_accurate(inputs(AROUND_A_BLOCK, AROUND_A_BLOCK, dtype, size, dropout_of(p)))


@pytest.mark.parametrize(("lengths_q", "lengths_k"), OTHER_LENGTHS.values(), ids=OTHER_LENGTHS.keys())
def test_error_where_queries_and_keys_are_not_of_the_same_tokens(lengths_q: list[int], lengths_k: list[int]):
    assert_accurate(inputs(lengths_q, lengths_k, dropout=dropout_of(0.1)))


def test_empty_slots_are_inert():
    """Tokens past the last sequence hold anything finite, sequences past it are empty: real rows never see them."""
    lengths, rows = [66, 5], 71
    real = inputs(lengths, lengths, dropout=dropout_of(0.1))
    padded = [torch.cat([x, torch.full((100, *x.shape[1:]), 1e4)]) for x in real[:3]]
    bounds = cu_seqlens([*lengths, 0, 0])
    found = output_and_gradients(varlen_attention, [*padded, bounds, bounds, *real[5:]])
    for expected, got in zip(output_and_gradients(varlen_attention, real), found, strict=True):
        assert torch.equal(got[:rows], expected)
        assert not got[rows:].any()


def test_rows_of_strided_views_and_a_packed_tensor():
    """One tensor [T, 3, H, E] gives what three of its own do, and one gradient; a transposed view is taken too."""
    arguments = inputs([33, 3, 0, 5], [33, 3, 0, 5], dropout=dropout_of(0.1))
    arguments[3] = arguments[4] = bounds = cu_seqlens([33, 3, 0])  # five rows are nobody's
    expected = output_and_gradients(varlen_attention, arguments)
    assert not expected[0][36:].any()
    *_, longest, dropout = arguments
    attentions = {
        "packed": lambda qkv: varlen_self_attention(qkv, bounds, longest, dropout),
        "views": lambda qkv: varlen_attention(*qkv.unbind(1), bounds, bounds, longest, dropout),
        "transposed": lambda qkv: varlen_attention(
            *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv.unbind(1)), bounds, bounds, longest, dropout
        ),
    }
    for name, attention in attentions.items():
        output, gradient = output_and_gradients(attention, [torch.stack(arguments[:3], 1)])
        assert torch.equal(output, expected[0]), name
        assert torch.equal(gradient, torch.stack(expected[1:], 1)), name


def test_memory_that_nobody_wrote_is_noticed():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    assert torch.zeros(3).new_empty(3).isnan().all()


def test_upstream_gradient_need_not_be_contiguous():
    query, key, value, *others = inputs([9, 3], [9, 3])
    output = varlen_attention(query, key, value, *others)
    expected = torch.autograd.grad(output, (query, key, value), torch.ones_like(output), retain_graph=True)
    for got, same in zip(torch.autograd.grad(output.sum(), (query, key, value)), expected, strict=True):
        assert torch.equal(got, same)


@pytest.mark.parametrize(("dtype", "shown"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 64)])
def test_the_mask_is_bit_for_bit_that_of_the_definition(dtype: torch.dtype, shown: int):
    """Equal scores and one-hot values of the ``shown`` keys tell what the mask keeps; in bf16 blocks are of other sizes."""
    keys, size, dropout = 100, 64, dropout_of(0.25)
    query, key = torch.zeros(9, HEADS, size, dtype=dtype), torch.randn(keys, HEADS, size).to(dtype)
    value = torch.eye(keys, 128)[:, None, shown : shown + size].expand(keys, HEADS, size).to(dtype)
    output = varlen_attention(query, key, value, cu_seqlens([9]), cu_seqlens([keys]), keys, dropout)
    mask = dropout.mask(torch.arange(9 * HEADS), 128).view(9, HEADS, 128)[:, :, shown : shown + size]
    mask = mask & (torch.arange(shown, shown + size) < keys)
    torch.testing.assert_close(output.float(), mask * dropout.scale / keys, atol=0.0, rtol=0.01)


@pytest.mark.parametrize("scale", [1e-20, 10.0, 1e4])
def test_extreme_scores_stay_finite(scale: float):
    """Scores far below 0 for every key, where exponents of what lies past a sequence's end would overflow."""
    query, key, value, *others = inputs([3, 35], [3, 35])
    arguments = [query.abs() * scale, -key.abs() * scale, value, *others]
    oracle = output_and_gradients(reference.varlen_attention, arguments, torch.float64)
    for got, exact in zip(output_and_gradients(varlen_attention, arguments), oracle, strict=True):
        assert got.isfinite().all()
        if scale < 1e4:  # where rounding alone decides which key is the largest
            assert (got - exact).abs().max() <= 1e-2 * exact.abs().max() + 1e-6


def test_operators_pass_opcheck():
    ops, state = torch.ops.mlperf_bert, torch.tensor([7, 1])
    *qkv, bounds_q, bounds_k, _, _ = inputs([7], [11])
    packed = torch.randn(11, 3, HEADS, 32, requires_grad=True)
    calls = (ops.varlen_attention, (*qkv, bounds_q, bounds_k, 11)), (ops.varlen_self_attention, (packed, bounds_k, 11))
    for op, arguments in calls:
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(op.default, (*arguments, None, 0.0, 2), test_utils=tests)
        torch.library.opcheck(op.default, (*arguments, state, 0.1, 2))
        *tensors, most = (x.detach() if isinstance(x, Tensor) else x for x in arguments)
        output, lse, kept = op(*tensors, most, state, 0.1, 2)
        backward = getattr(ops, f"{op.__name__}_backward").default
        torch.library.opcheck(backward, (output, *tensors, output, lse, kept, most, 0.1), test_utils=tests)
