# pyright: reportArgumentType=false, reportCallIssue=false
"""The definitions of ops, compared with formulas in float64 NumPy."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels import Dropout, dense_gelu, dropout_add_layer_norm, embedding_layer_norm, masked_lm_loss
from kernels.libraries import pytorch
from kernels.reference import ops as reference

Array = NDArray[np.float64]


def random_array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.sum(-1, keepdims=True) / x.shape[-1]
    variance = (centred**2).sum(-1, keepdims=True) / x.shape[-1]
    return centred / np.sqrt(variance + eps) * weight + bias


def with_p(p: float) -> Dropout:
    return Dropout(p, torch.tensor([3, 4]), 5)


@pytest.mark.parametrize(("tokens", "size"), [(1, 8), (13, 7)])
def test_dropout_add_layer_norm_without_dropout(tokens: int, size: int):
    x, residual = random_array(tokens, size), random_array(tokens, size, seed=1)
    bias, weight, norm_bias = (random_array(size, seed=seed) for seed in range(3))
    expected = layer_norm(x + bias + residual, weight, norm_bias, 1e-12)
    arguments = (tensor(x), tensor(bias), tensor(residual), tensor(weight), tensor(norm_bias), 1e-12)
    for implementation in (dropout_add_layer_norm, reference.dropout_add_layer_norm):
        np.testing.assert_allclose(implementation(*arguments).numpy(), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("shape", "dropout_p", "dtype"),
    [((1_000_003,), 0.1, torch.float32), ((10, 99, 101), 0.5, torch.float64), ((10, 99, 101), 0.1, torch.bfloat16)],
    ids=str,
)
def test_dropout_rate_scale_and_gradient(shape: tuple[int, ...], dropout_p: float, dtype: torch.dtype):
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


def test_the_definition_drops_what_the_mask_says():
    x, dropout = torch.rand(50, 40) + 1, with_p(0.3)
    dropped = reference.dropout_rows(x, dropout)
    mask = dropout.mask(torch.arange(50), 40)
    assert torch.equal(dropped, torch.where(mask, x * dropout.scale, 0.0))
    ids, gain = torch.zeros(50, dtype=torch.int64), torch.ones(40)
    table = torch.randn(1, 40)
    embedded = reference.embedding_layer_norm(ids, ids, ids, table, table, table, gain, gain + 9, 1e-12, dropout)
    assert torch.equal(embedded != 0, mask)


def test_dense_gelu_is_the_tanh_form():
    x, weight, bias = random_array(9, 5), random_array(4, 5), random_array(4)
    z = x @ weight.T + bias
    tanh_form = z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    erf_form = z / 2 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
    got = dense_gelu(tensor(x), tensor(weight), tensor(bias)).numpy()
    np.testing.assert_allclose(got, tanh_form, rtol=1e-12, atol=1e-12)
    assert np.abs(got - erf_form).max() > 1e-5


def test_embedding_layer_norm():
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, size, 11) for size in (20, 6, 2)]
    tables = [random_array(rows, 8) for rows in (20, 6, 2)]
    weight, bias = random_array(8), random_array(8, seed=1)
    got = embedding_layer_norm(*(torch.from_numpy(x) for x in (*ids, *tables, weight, bias)), 1e-12)
    summed = sum(table[rows] for table, rows in zip(tables, ids, strict=True))
    np.testing.assert_allclose(got.numpy(), layer_norm(summed, weight, bias, 1e-12), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("ignored", [[], [0, 3], list(range(7))])
def test_masked_lm_loss_sums_and_counts(ignored: list[int]):
    hidden, decoder, bias = random_array(7, 5), random_array(11, 5), random_array(11)
    logits = hidden @ decoder.T + bias
    labels = np.argmax(logits, axis=-1)
    labels[::2] = 4
    counted = [row for row in range(7) if row not in ignored]
    expected = sum(math.log(np.exp(logits[row]).sum()) - logits[row, labels[row]] for row in counted)
    right = sum(int(np.argmax(logits[row]) == labels[row]) for row in counted)
    labels[ignored] = -1
    loss, correct = masked_lm_loss(tensor(hidden), tensor(decoder), tensor(bias), torch.from_numpy(labels))
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert correct == right


def test_varlen_attention_by_hand():
    """Compute one head and two sequences in float64."""
    query, key, value = (random_array(5, 1, 4, seed=seed) for seed in range(3))
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    got = reference.varlen_attention(tensor(query), tensor(key), tensor(value), bounds, bounds, 3).numpy()
    for start, stop in ((0, 2), (2, 5)):
        for row in range(start, stop):
            scores = np.array([query[row, 0] @ key[other, 0] / 2 for other in range(start, stop)])
            probabilities = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(got[row, 0], probabilities @ value[start:stop, 0], rtol=1e-12, atol=1e-13)


def test_attention_drops_what_the_mask_says():
    """With equal scores and one-hot values, the output shows which probabilities were kept."""
    dropout, length, heads = Dropout(0.3, torch.tensor([7, 8]), 9), 21, 3
    query = torch.zeros(30, heads, 32)
    value = torch.eye(32)[:, None].expand(32, heads, 32)[:30]
    bounds = torch.tensor([0, 9, 30], dtype=torch.int32)
    output = reference.varlen_attention(query, query, value, bounds, bounds, length, dropout)
    kept_QHK = dropout.mask(torch.arange(9 * heads, 30 * heads), length).view(length, heads, length)
    assert torch.equal(output[9:, :, 9:30] != 0, kept_QHK)


def test_pytorchs_attention_drops_probabilities_at_the_rate():
    torch.manual_seed(0)
    length, p = 64, 0.1
    query, value = torch.zeros(length, 40, length), torch.eye(length)[:, None].expand(length, 40, length)
    bounds = torch.tensor([0, length], dtype=torch.int32)
    dropped = pytorch.varlen_attention(query, query, value, bounds, bounds, length, with_p(p)) * length
    kept = dropped[dropped != 0]
    assert abs(1 - len(kept) / dropped.numel() - p) < 5 * (p * (1 - p) / dropped.numel()) ** 0.5
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)))
