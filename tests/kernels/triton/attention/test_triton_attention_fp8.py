# pyright: reportArgumentType=false, reportCallIssue=false
"""Triton's self-attention with casts under the interpreter: what it casts is the plain kernels', bit for bit."""

import pytest
import torch
from torch import Tensor

from kernels.reference import attention_fp8 as reference
from kernels.reference.fp8 import E4M3, E5M2, cast_transpose_fp8, cast_transpose_sum_fp8
from kernels.reference.random import Dropout
from kernels.triton.attention import fp8 as attention_fp8
from kernels.triton.attention import varlen as attention

HEADS = 2
DROPOUT = Dropout(0.1, torch.tensor([2**40 + 7, 2**32 + 3]), 5)
# Sequences, and rows after them that are no one's: around blocks and the padding to 16.
CASES = [
    ([1], 0, None, torch.float32),
    ([31, 33, 65], 7, DROPOUT, torch.float32),
    ([0, 5, 0, 0, 9, 9, 0], 41, None, torch.bfloat16),
    ([70, 3], 7, DROPOUT, torch.bfloat16),
    ([16, 16], 0, DROPOUT, torch.float16),
]
BOTH = pytest.mark.parametrize(
    ("lengths", "rest", "dropout", "dtype"), CASES, ids=lambda x: "dropout" if isinstance(x, Dropout) else str(x)
)


def inputs(lengths: list[int], rest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int]:
    """Upstream gradient and packed input, bounds, longest."""
    generator, tokens = torch.Generator().manual_seed(1), sum(lengths) + rest
    upstream = torch.randn(tokens, HEADS, 16, generator=generator).to(dtype)
    qkv = torch.randn(tokens, 3, HEADS, 16, generator=generator).to(dtype)
    return upstream, qkv, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths)


def site(scale: float, amax: float = 0.0) -> tuple[Tensor, Tensor]:
    """Elements of vectors, as those of training."""
    return torch.tensor([1.0, scale])[1], torch.tensor([7.0, amax])[1]


def same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(found, expected, strict=True))


@BOTH
def test_both_passes_are_the_plain_ones_with_casts_behind(
    lengths: list[int], rest: int, dropout: Dropout | None, dtype: torch.dtype
) -> None:
    """Also of rows that are no one's: zeros, in the padding too. New memory is NaN here (conftest)."""
    upstream, qkv, bounds, longest = inputs(lengths, rest, dtype)
    state, p, stream = attention.dropout_arguments(dropout)
    expected, *saved = attention._self_attention(qkv, bounds, longest, state, p, stream)
    (scale, amax), (_, expected_amax) = site(16.0), site(16.0)
    context, *casts, lse, kept = attention_fp8.attention_cast_fp8(qkv, bounds, longest, dropout, scale, amax)
    assert all(torch.equal(x, y) for x, y in zip((context, kept), (expected, saved[1]), strict=True))
    owned = slice(None, sum(lengths))
    assert torch.equal(lse[:, owned], saved[0][:, owned])
    assert same_bits(casts, cast_transpose_fp8(expected.flatten(1), scale, expected_amax, E4M3))
    assert torch.equal(amax, expected_amax)

    arguments = upstream, qkv, bounds, context, lse, kept, longest
    (scale, amax), (_, expected_amax) = site(64.0), site(64.0)
    *casts, sums = attention_fp8.attention_backward_cast_fp8(*arguments, dropout, scale, amax)
    gradient = attention._self_attention_backward(*arguments, p)
    *expected_casts, expected_sums = cast_transpose_sum_fp8(gradient.flatten(1), scale, expected_amax, E5M2)
    assert same_bits(casts, expected_casts)
    assert torch.equal(amax, expected_amax)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-5, atol=1e-5)


@BOTH
def test_they_are_near_the_definition(
    lengths: list[int], rest: int, dropout: Dropout | None, dtype: torch.dtype
) -> None:
    """Which the plain kernels are held against more closely: here a step of FP8 either way, for one number in a hundred."""
    upstream, qkv, bounds, longest = inputs(lengths, rest, dtype)
    found, expected = [], []
    for module, results in ((attention_fp8, found), (reference, expected)):
        context, *casts, lse, kept = module.attention_cast_fp8(qkv, bounds, longest, dropout, *site(16.0))
        arguments = upstream, qkv, bounds, context, lse, kept, longest, dropout
        results += [*casts, *module.attention_backward_cast_fp8(*arguments, *site(64.0))]
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    for one, other in zip(found, expected, strict=True):
        difference = (one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-9)
        assert difference < (0.04 if dtype == torch.bfloat16 else 0.01)


def test_amax_is_kept_and_seen_to_be_bad() -> None:
    upstream, qkv, bounds, longest = inputs([20, 3], 2, torch.float32)
    scale, amax = site(1.0, 50.0)
    attention_fp8.attention_cast_fp8(qkv, bounds, longest, None, scale, amax)
    assert amax == 50
    qkv[21, 2] = float("nan")
    context, q, *_, lse, kept = attention_fp8.attention_cast_fp8(qkv, bounds, longest, None, scale, amax)
    assert amax.isnan()
    assert torch.equal(q.float().isnan(), context.flatten(1).isnan())
    scale, amax = site(1.0)
    attention_fp8.attention_backward_cast_fp8(upstream, qkv, bounds, context, lse, kept, longest, None, scale, amax)
    assert amax.isnan()


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["whole", "dropout"])
def test_opcheck(dropout: Dropout | None) -> None:
    """PyTorch's own checks of schema, aliasing and fake tensors, of both directions."""
    upstream, qkv, bounds, longest = inputs([5, 2], 1, torch.bfloat16)
    scalars, ops = attention.dropout_arguments(dropout), torch.ops.mlperf_bert
    only = {"test_utils": ("test_schema", "test_faketensor")}
    arguments = (qkv, bounds, longest, *scalars, *site(2.0))
    torch.library.opcheck(ops.attention_cast_fp8.default, arguments, **only)
    context, _, _, lse, kept = ops.attention_cast_fp8(*arguments)
    arguments = (upstream, qkv, bounds, context, lse, kept, longest, scalars[1], *site(2.0))
    torch.library.opcheck(ops.attention_backward_cast_fp8.default, arguments, **only)


def test_what_cannot_be_computed_says_why() -> None:
    upstream, qkv, bounds, longest = inputs([3], 0, torch.float64)
    kept = torch.empty(0)
    arguments = upstream, qkv, bounds, upstream, kept, kept, longest, None, *site(1.0)
    reasons = attention_fp8.attention_backward_cast_fp8_unsupported_reasons(*arguments)
    assert reasons[0] == "the forward pass was another implementation's"
    assert reasons[1:] == attention_fp8.attention_cast_fp8_unsupported_reasons(qkv, bounds, longest, None, *site(1.0))
    assert "torch.float64" in reasons[1]
