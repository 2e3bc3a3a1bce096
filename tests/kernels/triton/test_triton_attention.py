"""Triton's variable-length attention under the interpreter, against float64 with the mask of ``Dropout.mask``."""

# pyright: reportCallIssue=false

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from kernels.reference.random import Dropout
from kernels.triton.attention import (
    configurations,
    unsupported_reasons,
    varlen_attention,
    varlen_self_attention,
    varlen_self_attention_unsupported_reasons,
)

HEADS = 2
EVERY_CHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
LENGTHS = {
    "one token": ([1], [1]),
    "around a block": ([31, 32, 33, 64, 65], [31, 32, 33, 64, 65]),  # 32 in fp32, else 64
    "with empty sequences": ([0, 5, 0, 0, 9, 9, 0], [0, 5, 0, 0, 9, 9, 0]),
    "few queries of many keys": ([2, 1, 2, 70], [66, 129, 1, 40]),
    "sequences that ask for nothing": ([0, 4, 0], [5, 6, 70]),
    "more queries than keys": ([70, 3], [2, 1]),
}


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def dropout_of(p: float, step: int = 3, stream: int = 5) -> Dropout:
    return Dropout(p, torch.tensor([2**40 + 7, step]), stream)


def definition(
    query: Tensor, key: Tensor, value: Tensor, lengths_q: list[int], lengths_k: list[int], dropout: Dropout | None
) -> Tensor:
    """Plain PyTorch in the dtype of its inputs; rows past the last sequence are 0."""
    outputs, heads = [], query.shape[1]
    bounds = zip(pairwise(cu_seqlens(lengths_q).tolist()), pairwise(cu_seqlens(lengths_k).tolist()), strict=True)
    for (start_q, stop_q), (start_k, stop_k) in bounds:
        scores = torch.einsum("qhe,khe->qhk", query[start_q:stop_q], key[start_k:stop_k]) * query.shape[-1] ** -0.5
        probabilities = scores.softmax(dim=-1)
        if dropout is not None:
            mask = dropout.mask(torch.arange(start_q * heads, stop_q * heads), stop_k - start_k)
            probabilities = probabilities * mask.view(probabilities.shape) * dropout.scale
        outputs.append(torch.einsum("qhk,khe->qhe", probabilities, value[start_k:stop_k]))
    return torch.cat([*outputs, query.new_zeros(len(query) - sum(lengths_q), *query.shape[1:])])


def random_qkv(queries: int, keys: int, size: int, dtype: torch.dtype, heads: int = HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = [(queries, heads, size), (keys, heads, size), (keys, heads, size)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def output_and_gradients(attention, qkv: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    output = attention(*leaves)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def run_triton(qkv: list[Tensor], lengths_q: list[int], lengths_k: list[int], dropout: Dropout | None) -> list[Tensor]:
    bounds = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
    longest = max(*lengths_q, *lengths_k)
    return output_and_gradients(lambda *leaves: varlen_attention(*leaves, *bounds, longest, dropout), qkv)


def assert_accurate(qkv: list[Tensor], lengths_q: list[int], lengths_k: list[int], p: float) -> None:
    """Error against float64: at most twice that of the definition run in the same dtype, output and every gradient.

    Free is a unit in the last place of numbers near 1 or of the largest, and a few of fp32: the interpreter's casts to bf16
    cut off, and the definition gets what one key makes of the gradients of scores, 0, exactly right.
    """
    dropout = dropout_of(p) if p else None
    plain, oracle = (
        output_and_gradients(lambda *leaves: definition(*leaves, lengths_q, lengths_k, dropout), leaves)
        for leaves in (qkv, [x.double() for x in qkv])
    )
    ours = run_triton(qkv, lengths_q, lengths_k, dropout)
    for name, got, expected, exact in zip(("output", "query", "key", "value"), ours, plain, oracle, strict=True):
        assert got.shape == exact.shape
        assert got.dtype == expected.dtype
        error, allowed = ((x.double() - exact).abs().max().item() for x in (got, expected))
        free = torch.finfo(got.dtype).eps * max(1.0, exact.abs().max().item()) + 16 * torch.finfo(torch.float32).eps
        assert error <= 2 * allowed + free, name


@pytest.mark.parametrize("p", [0.0, 0.1], ids=["no dropout", "dropout"])
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 32), (torch.bfloat16, 64), (torch.float16, 16)], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize(("lengths_q", "lengths_k"), LENGTHS.values(), ids=LENGTHS.keys())
def test_error_is_at_most_twice_plain_pytorch(
    lengths_q: list[int], lengths_k: list[int], dtype: torch.dtype, size: int, p: float
):
    assert_accurate(random_qkv(sum(lengths_q), sum(lengths_k), size, dtype), lengths_q, lengths_k, p)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "dtype"),
    [([512, 33], [33, 511], torch.float32), ([1 + 17 * i % 11 for i in range(24)],) * 2 + (torch.bfloat16,)],
    ids=["longest", "24 sequences"],
)
def test_error_of_large_batches(lengths_q: list[int], lengths_k: list[int], dtype: torch.dtype):
    """The interpreter is slow: one head, with dropout, and each loop at its longest by itself."""
    assert_accurate(random_qkv(sum(lengths_q), sum(lengths_k), 64, dtype, heads=1), lengths_q, lengths_k, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1], ids=["no dropout", "dropout"])
def test_empty_slots_are_inert(dtype: torch.dtype, p: float):
    """Tokens past the last sequence hold anything finite, sequences past it are empty: real rows never see them."""
    lengths, dropout = [70, 5, 33], dropout_of(p)
    qkv = random_qkv(sum(lengths), sum(lengths), 32, dtype)
    garbage = [torch.cat([x, torch.full((150, *x.shape[1:]), 1e4, dtype=dtype)]) for x in qkv]
    real, padded = (
        run_triton(x, [*lengths, *empty], [*lengths, *empty], dropout) for x, empty in ((qkv, []), (garbage, [0] * 4))
    )
    rows = sum(lengths)
    for expected, got in zip(real, padded, strict=True):
        assert torch.equal(got[:rows], expected)
        assert not got[rows:].any()


def test_rows_of_strided_views_and_a_packed_tensor():
    """One tensor [T, 3, H, E] gives what three of its own do, and one gradient; a transposed view is taken too."""
    lengths, dropout = [33, 3], dropout_of(0.1)
    bounds, longest = cu_seqlens(lengths), max(lengths)
    apart = random_qkv(sum(lengths), sum(lengths), 32, torch.float32)
    expected = run_triton(apart, lengths, lengths, dropout)
    packed = torch.stack(apart, 1)
    attentions = {
        "packed": lambda qkv: varlen_self_attention(qkv, bounds, longest, dropout),
        "views": lambda qkv: varlen_attention(*qkv.unbind(1), bounds, bounds, longest, dropout),
        "transposed": lambda qkv: varlen_attention(
            *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv.unbind(1)), bounds, bounds, longest, dropout
        ),
    }
    for name, attention in attentions.items():
        output, gradient = output_and_gradients(attention, [packed])
        assert torch.equal(output, expected[0]), name
        assert torch.equal(gradient, torch.stack(expected[1:], 1)), name


def test_memory_that_nobody_wrote_is_noticed():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    assert torch.zeros(3).new_empty(3).isnan().all()


def test_packed_gradient_of_empty_slots_is_zero():
    packed = torch.randn(90, 3, HEADS, 32, generator=torch.Generator().manual_seed(0))
    bounds = cu_seqlens([20, 7, 0, 0])
    output, gradient = output_and_gradients(lambda qkv: varlen_self_attention(qkv, bounds, 20, None), [packed])
    assert output[:27].any(-1).all()
    assert gradient[:27].any(-1).all()
    assert not output[27:].any()
    assert not gradient[27:].any()


def test_upstream_gradient_need_not_be_contiguous():
    bounds = cu_seqlens([40, 3])
    qkv = [x.requires_grad_() for x in random_qkv(43, 43, 32, torch.float32)]
    output = varlen_attention(*qkv, bounds, bounds, 40, None)
    expected = torch.autograd.grad(output, qkv, torch.ones_like(output), retain_graph=True)
    for got, same in zip(torch.autograd.grad(output.sum(), qkv), expected, strict=True):
        assert torch.equal(got, same)


def test_dropout_draws_anew_with_step_and_stream_and_the_same_with_the_same():
    lengths = [33, 20]
    qkv = random_qkv(53, 53, 32, torch.float32)
    first, again, step, stream = (
        run_triton(qkv, lengths, lengths, dropout)
        for dropout in (dropout_of(0.1), dropout_of(0.1), dropout_of(0.1, step=4), dropout_of(0.1, stream=6))
    )
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], step[0])
    assert not torch.equal(first[0], stream[0])
    without, never = run_triton(qkv, lengths, lengths, None), run_triton(qkv, lengths, lengths, dropout_of(0.0))
    assert all(torch.equal(x, y) for x, y in zip(without, never, strict=True))


def test_the_mask_is_bit_for_bit_that_of_the_definition():
    """Equal scores and one-hot values show each probability: zero where the mask drops, equal where it keeps."""
    keys, size, dropout = 64, 64, dropout_of(0.25)
    query, key = torch.zeros(9, HEADS, size), torch.randn(keys, HEADS, size)
    value = torch.eye(keys)[:, None, :].expand(keys, HEADS, size)
    output = varlen_attention(query, key, value, cu_seqlens([9]), cu_seqlens([keys]), keys, dropout)
    mask = dropout.mask(torch.arange(9 * HEADS), keys).view(9, HEADS, keys)
    torch.testing.assert_close(output, mask * dropout.scale / keys)


def test_step_is_taken_modulo_32_bits():
    lengths = [20]
    qkv = random_qkv(20, 20, 32, torch.float32)
    early, late = (run_triton(qkv, lengths, lengths, dropout_of(0.1, step)) for step in (3, 3 + 2**32))
    assert all(torch.equal(x, y) for x, y in zip(early, late, strict=True))


@pytest.mark.parametrize("scale", [1e-20, 10.0, 1e4])
def test_extreme_scores_stay_finite(scale: float):
    """Scores far below 0 for every key, where exponents of what lies past a sequence's end would overflow."""
    query, key, value = random_qkv(70, 70, 32, torch.float32)
    qkv = [query.abs() * scale, -key.abs() * scale, value]
    oracle = output_and_gradients(
        lambda *leaves: definition(*leaves, [3, 67], [3, 67], None), [x.double() for x in qkv]
    )
    for got, exact in zip(run_triton(qkv, [3, 67], [3, 67], None), oracle, strict=True):
        assert got.isfinite().all()
        if scale < 1e4:  # where rounding alone decides which key is the largest
            assert (got - exact).abs().max() <= 1e-2 * exact.abs().max() + 1e-6


def test_operators_pass_opcheck():
    ops = torch.ops.mlperf_bert
    query, key, value = (x.requires_grad_() for x in random_qkv(12, 20, 32, torch.float32))
    bounds_q, bounds_k = cu_seqlens([5, 7]), cu_seqlens([11, 9])
    state = torch.tensor([7, 1])
    packed = torch.randn(20, 3, HEADS, 32, requires_grad=True)
    for drawn, p, tests in ((state, 0.1, EVERY_CHECK), (None, 0.0, ("test_schema", "test_faketensor"))):
        arguments = (query, key, value, bounds_q, bounds_k, 11, drawn, p, 2)
        torch.library.opcheck(ops.varlen_attention.default, arguments, test_utils=tests)
        arguments = (packed, bounds_k, 11, drawn, p, 2)
        torch.library.opcheck(ops.varlen_self_attention.default, arguments, test_utils=tests)
    output, lse, kept = ops.varlen_attention(query, key, value, bounds_q, bounds_k, 11, state, 0.1, 2)
    saved = [x.detach() for x in (output, query, key, value)]
    backward = (*saved, bounds_q, bounds_k, output.detach(), lse, kept, 11, 0.1)
    torch.library.opcheck(ops.varlen_attention_backward.default, backward)
    output, lse, kept = ops.varlen_self_attention(packed.detach(), bounds_k, 11, state, 0.1, 2)
    backward = (output, packed.detach(), bounds_k, output, lse, kept, 11, 0.1)
    torch.library.opcheck(ops.varlen_self_attention_backward.default, backward)


def test_self_attention_without_data():
    """Shapes and strides of output and gradient follow from the inputs alone, so that nothing waits for the device."""
    with FakeTensorMode():
        packed = torch.randn(90, 3, HEADS, 32, requires_grad=True)
        bounds = torch.zeros(4, dtype=torch.int32)
        output = varlen_self_attention(packed, bounds, 40, Dropout(0.1, torch.zeros(2, dtype=torch.int64), 1))
        (gradient,) = torch.autograd.grad(output.sum(), packed)
    assert (output.shape, output.is_contiguous()) == ((90, HEADS, 32), True)
    assert (gradient.shape, gradient.is_contiguous()) == (packed.shape, True)


def test_reasons():
    qkv, bounds = random_qkv(6, 6, 32, torch.float32), cu_seqlens([6])
    assert unsupported_reasons(*qkv, bounds, bounds, 6, dropout_of(0.1)) == []
    doubles = [x.double() for x in qkv]
    assert "float64" in unsupported_reasons(*doubles, bounds, bounds, 6, None)[0]
    wide = random_qkv(6, 6, 48, torch.float32)
    assert "head size 48" in unsupported_reasons(*wide, bounds, bounds, 6, None)[0]
    assert "int64" in unsupported_reasons(*qkv, bounds.long(), bounds, 6, None)[0]
    packed = torch.stack(qkv, 1)
    assert varlen_self_attention_unsupported_reasons(packed, bounds, 6, dropout_of(0.1)) == []
    assert "float64" in varlen_self_attention_unsupported_reasons(packed.double(), bounds, 6)[0]


def test_numbers_that_vary_are_not_compiled_in():
    """Triton compiles anew for a 1 and for multiples of 16: of token counts and call sites, in the midst of training."""
    program = """
from kernels.triton import attention as triton_attention
from kernels.triton import dense as triton_dense
from kernels.triton import embedding_norm, layer_norm
for module in (triton_attention, triton_dense, embedding_norm, layer_norm):
    for configuration in module.configurations():
        for parameter in configuration.kernel.params:
            if configuration.signature[parameter.name] in ("i32", "i64") and not parameter.do_not_specialize:
                print(parameter.name)
"""
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", program], env=compiling, capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) <= {"columns", "width", "programs"}  # of the model and the device


def test_configurations_name_every_parameter_once():
    names = [configuration.name for configuration in configurations()]
    assert len(set(names)) == len(names) == 48
