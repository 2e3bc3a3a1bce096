"""Dropout in the ops' definitions (implementation "reference") and in their implementations by PyTorch.

Everything else in the definitions is compared with Hugging Face, through the whole model (``tests/bert/test_model.py``).
"""

import math

import pytest
import torch

from kernels import Dropout, embedding_layer_norm, varlen_attention
from kernels.libraries import pytorch
from kernels.reference.ops import compute_dtype, dropout_rows


def with_p(p: float) -> Dropout:
    return Dropout(p, torch.tensor([3, 4]), 5)


@pytest.mark.parametrize(
    ("shape", "dropout_p", "dtype"),
    [((1_000_003,), 0.1, torch.float32), ((10, 99, 101), 0.5, torch.float64), ((10, 99, 101), 0.1, torch.bfloat16)],
    ids=str,
)
def test_dropout_has_its_rate_and_scale_in_both_passes(shape: tuple[int, ...], dropout_p: float, dtype: torch.dtype):
    torch.manual_seed(0)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    dropped = pytorch.drop(x, with_p(dropout_p))
    assert dropped.dtype == dtype
    scale = torch.tensor(1 / (1 - dropout_p), dtype=dtype)
    assert bool(((dropped == 0) | (dropped == scale)).all())
    share = (dropped == 0).double().mean().item()
    assert abs(share - dropout_p) < 5 * math.sqrt(dropout_p * (1 - dropout_p) / x.numel())
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(gradient, dropped)


def test_definitions_drop_exactly_the_elements_that_the_mask_excludes():
    x, dropout = torch.rand(50, 40) + 1, with_p(0.3)
    dropped = dropout_rows(x, dropout)
    mask = dropout.mask(torch.arange(50), 40)
    assert torch.equal(dropped, torch.where(mask, x * dropout.scale, 0.0))
    ids, gain = torch.zeros(50, dtype=torch.int64), torch.ones(40)
    table = torch.randn(1, 40)
    tables = table, table, table
    embedded = embedding_layer_norm.definition(ids, ids, ids, *tables, gain, gain + 9, 1e-12, dropout)
    assert torch.equal(embedded != 0, mask)


def test_attention_drops_exactly_the_probabilities_that_the_mask_excludes():
    """With equal scores and one-hot values, the output shows which probabilities were kept."""
    dropout, length, heads = Dropout(0.3, torch.tensor([7, 8]), 9), 21, 3
    query = torch.zeros(30, heads, 32)
    value = torch.eye(32)[:, None].expand(32, heads, 32)[:30]
    bounds = torch.tensor([0, 9, 30], dtype=torch.int32)
    output = varlen_attention.definition(query, query, value, bounds, bounds, length, dropout)
    kept_QHK = dropout.mask(torch.arange(9 * heads, 30 * heads), length).view(length, heads, length)
    assert torch.equal(output[9:, :, 9:30] != 0, kept_QHK)


def test_autocast_sets_the_type_of_products_except_for_fp64() -> None:
    wide, plain = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    assert [compute_dtype(x) for x in (wide, plain, plain.half())] == [torch.float64, torch.float32, torch.float16]
    with torch.autocast("cpu", torch.bfloat16):
        assert [compute_dtype(x) for x in (wide, plain, plain.half())] == [torch.float64, *[torch.bfloat16] * 2]


def test_pytorchs_attention_drops_the_given_fraction_of_probabilities():
    torch.manual_seed(0)
    length, p = 64, 0.1
    query, value = torch.zeros(length, 40, length), torch.eye(length)[:, None].expand(length, 40, length)
    bounds = torch.tensor([0, length], dtype=torch.int32)
    dropped = pytorch.varlen_attention(query, query, value, bounds, bounds, length, with_p(p)) * length
    kept = dropped[dropped != 0]
    assert abs(1 - len(kept) / dropped.numel() - p) < 5 * (p * (1 - p) / dropped.numel()) ** 0.5
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)))
    query, key, value = torch.randn(3, 30, 2, 8).unbind()
    bounds = torch.tensor([0, 9, 29], dtype=torch.int32)
    nothing_dropped = pytorch.varlen_attention(query, key, value, bounds, bounds, 20, with_p(1e-9))
    torch.testing.assert_close(nothing_dropped, varlen_attention.definition(query, key, value, bounds, bounds, 20))
