"""``kernels.varlen_attention`` against its definition, forward and gradients."""

import pytest
import torch
from torch import Tensor

from kernels import Dropout, varlen_attention
from kernels.reference import ops as reference

pytestmark = pytest.mark.oldest_torch

LENGTHS = {
    "one token": [1],
    "one sequence": [512],
    "odd lengths": [512, 511, 1, 37, 2],
    "equal lengths": [64] * 5,
    "unsorted with repeats": [7, 7, 3, 7, 3, 3],
    "200 sequences": [1 + 17 * i % 11 for i in range(200)],
    "with empty sequences": [0, 5, 0, 0, 9, 9, 0],
}


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def random_qkv(queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = [(queries, 2, 16), (keys, 2, 16), (keys, 2, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def output_and_gradients(attention, qkv: list[Tensor], lengths_q: list[int], lengths_k: list[int]) -> list[Tensor]:
    output = attention(*qkv, cu_seqlens(lengths_q), cu_seqlens(lengths_k), max([*lengths_q, *lengths_k]))
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output, *torch.autograd.grad(output, qkv, upstream.to(output.dtype))]


def assert_within_twice_plain_pytorch(lengths_q: list[int], lengths_k: list[int], dtype: torch.dtype) -> None:
    """Error against a float64 oracle: at most twice that of the definition run in ``dtype``.

    The floor, a few units of rounding of inputs near 1, is for what the definition happens to get exactly right.
    """
    floor = 1e-13 if dtype == torch.float64 else 16 * torch.finfo(torch.float32).eps
    qkv = random_qkv(sum(lengths_q), sum(lengths_k), dtype)
    exact_qkv = [x.detach().double().requires_grad_() for x in qkv]
    oracle = output_and_gradients(reference.varlen_attention, exact_qkv, lengths_q, lengths_k)
    plain = output_and_gradients(reference.varlen_attention, qkv, lengths_q, lengths_k)
    ours = output_and_gradients(varlen_attention, qkv, lengths_q, lengths_k)
    for name, exact, expected, got in zip(("output", "query", "key", "value"), oracle, plain, ours, strict=True):
        assert got.shape == exact.shape
        assert got.dtype == dtype
        allowed = 2 * (expected.double() - exact).abs().max() + floor
        assert (got.double() - exact).abs().max() <= allowed, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_self_attention(lengths: list[int], dtype: torch.dtype):
    assert_within_twice_plain_pytorch(lengths, lengths, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [
        ([3, 3, 1, 2], [9, 9, 9, 4]),  # equal keys, different queries
        ([2, 2, 2], [512, 511, 1]),
        ([0, 4, 0], [5, 6, 7]),  # sequences that ask for nothing still take part in the key gradients' shape
        ([1] * 200, [1 + i % 13 for i in range(200)]),
    ],
)
def test_subset_of_queries(lengths_q: list[int], lengths_k: list[int], dtype: torch.dtype):
    assert_within_twice_plain_pytorch(lengths_q, lengths_k, dtype)


def test_views_of_a_fused_tensor_give_the_same_as_contiguous_ones():
    query, key, value = torch.randn(30, 3, 2, 16, dtype=torch.float64).unbind(1)
    bounds = cu_seqlens([10, 10, 7, 3])
    from_views = varlen_attention(query, key, value, bounds, bounds, 10)
    from_copies = varlen_attention(query.contiguous(), key.contiguous(), value.contiguous(), bounds, bounds, 10)
    torch.testing.assert_close(from_views, from_copies, rtol=1e-14, atol=1e-14)


def test_no_sequence_sees_another():
    query, key, value = random_qkv(20, 20, torch.float64)
    bounds = cu_seqlens([8, 8, 4])
    before = varlen_attention(query, key, value, bounds, bounds, 10)
    with torch.no_grad():
        key[8:16] += 100
        value[8:16] += 100
    after = varlen_attention(query, key, value, bounds, bounds, 10)
    assert torch.equal(before[:8], after[:8])
    assert torch.equal(before[16:], after[16:])
    assert not torch.equal(before[8:16], after[8:16])


@pytest.mark.parametrize("attention", [varlen_attention, reference.varlen_attention])
def test_dropout_rate_and_mean(attention):
    """Equal scores and one-hot values read the dropped probabilities off the output."""
    torch.manual_seed(0)
    length, dropout_p, rounds = 64, 0.1, 40
    query = torch.zeros(length, 4, length)
    value = torch.eye(length)[:, None].expand(length, 4, length)
    bounds = cu_seqlens([length])
    dropouts = [Dropout(dropout_p, torch.tensor([1, step]), 2) for step in range(rounds)]
    seen = torch.stack([attention(query, query, value, bounds, bounds, length, drop) for drop in dropouts]) * length
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

    def with_dropout(
        query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, most: int
    ) -> Tensor:
        never = Dropout(1e-12, torch.zeros(2, dtype=torch.int64), 0)
        return varlen_attention(query, key, value, bounds_q, bounds_k, most, never)

    lengths = [9, 9, 30, 1]
    qkv = random_qkv(sum(lengths), sum(lengths), torch.float64)
    expected = output_and_gradients(reference.varlen_attention, qkv, lengths, lengths)
    got = output_and_gradients(with_dropout, qkv, lengths, lengths)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_cu_seqlens_of_different_length_are_refused():
    query, key, value = random_qkv(4, 4, torch.float32)
    with pytest.raises(ValueError, match="argument 2 is"):
        varlen_attention(query, key, value, cu_seqlens([4]), cu_seqlens([2, 2]), 4)
