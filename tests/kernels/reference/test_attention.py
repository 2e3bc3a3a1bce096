"""``kernels.varlen_attention`` against its definition, forward and gradients."""

import pytest
import torch
from torch import Tensor

from kernels import Dropout, varlen_attention
from kernels.reference import ops as reference
from tests.kernels.accuracy import assert_within_twice, output_and_gradients

SAME = [
    [1],
    [512, 511, 1, 37, 2],
    [64] * 5,
    [7, 7, 3, 7, 3, 3],
    [1 + 17 * i % 11 for i in range(100)],
    [0, 5, 0, 0, 9, 9, 0],
]
LENGTHS = [
    *((lengths, lengths) for lengths in SAME),
    ([3, 3, 1, 2], [9, 9, 9, 4]),  # equal keys, different queries
    ([2, 2, 2], [512, 511, 1]),
    ([0, 4, 0], [5, 6, 7]),  # sequences that ask for nothing still take part in the key gradients' shape
    ([1] * 100, [1 + i % 13 for i in range(100)]),
]


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def inputs(
    lengths_q: list[int], lengths_k: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    queries, keys = sum(lengths_q), sum(lengths_k)
    generator = torch.Generator().manual_seed(queries + keys)
    query, key, value = (
        torch.randn(rows, 2, 16, generator=generator, dtype=torch.float64).to(dtype) for rows in (queries, keys, keys)
    )
    return query, key, value, cu_seqlens(lengths_q), cu_seqlens(lengths_k), max(*lengths_q, *lengths_k)


@pytest.mark.oldest_torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lengths_q", "lengths_k"), LENGTHS)
def test_error_is_at_most_twice_the_definitions(lengths_q: list[int], lengths_k: list[int], dtype: torch.dtype):
    """Free are a few units of rounding of numbers near 1, for what the definition happens to get exactly right."""
    free = 16 * torch.finfo(torch.float32).eps
    assert_within_twice(varlen_attention, reference.varlen_attention, inputs(lengths_q, lengths_k, dtype), free)


def test_views_of_a_fused_tensor_give_the_same_as_contiguous_ones():
    query, key, value = torch.randn(30, 3, 2, 16, dtype=torch.float64).unbind(1)
    bounds = cu_seqlens([10, 10, 7, 3])
    from_views = varlen_attention(query, key, value, bounds, bounds, 10)
    from_copies = varlen_attention(query.contiguous(), key.contiguous(), value.contiguous(), bounds, bounds, 10)
    torch.testing.assert_close(from_views, from_copies, rtol=1e-14, atol=1e-14)


def test_dropout_rate_and_mean():
    """Equal scores and one-hot values read the dropped probabilities off the output."""
    torch.manual_seed(0)
    length, dropout_p, rounds = 64, 0.1, 40
    query = torch.zeros(length, 4, length)
    value = torch.eye(length)[:, None].expand(length, 4, length)
    bounds = cu_seqlens([length])
    dropouts = [Dropout(dropout_p, torch.tensor([1, step]), 2) for step in range(rounds)]
    seen = (
        torch.stack([varlen_attention(query, query, value, bounds, bounds, length, drop) for drop in dropouts]) * length
    )
    dropped = (seen == 0).double().mean().item()
    count = seen.numel()
    assert abs(dropped - dropout_p) < 5 * (dropout_p * (1 - dropout_p) / count) ** 0.5
    kept = seen[seen != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - dropout_p)))
    assert len(torch.unique(seen, dim=0)) == rounds  # a fresh mask every step


def test_the_definition_drops_what_the_mask_says():
    dropout = Dropout(0.3, torch.tensor([7, 8]), 9)
    length, heads = 21, 3
    query = torch.zeros(30, heads, 32)
    value = torch.eye(32)[:, None].expand(32, heads, 32)[:30]
    bounds = cu_seqlens([9, length])
    output = reference.varlen_attention(query, query, value, bounds, bounds, length, dropout)
    kept_QHK = dropout.mask(torch.arange(9 * heads, 30 * heads), length).view(length, heads, length)
    assert torch.equal(output[9:, :, 9:30] != 0, kept_QHK)


def test_dropout_path_is_the_same_attention():
    """A probability that rounds to never dropping: what is left is attention, by another way than without dropout."""
    never = Dropout(1e-12, torch.zeros(2, dtype=torch.int64), 0)
    arguments = inputs([9, 9, 30, 1], [9, 9, 30, 1], torch.float64)
    got = output_and_gradients(varlen_attention, [*arguments, never])
    expected = output_and_gradients(reference.varlen_attention, arguments)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_cu_seqlens_of_different_length_are_refused():
    query, key, value, bounds, _, longest = inputs([4], [4], torch.float32)
    with pytest.raises(ValueError, match="argument 2 is"):
        varlen_attention(query, key, value, bounds, cu_seqlens([2, 2]), longest)
