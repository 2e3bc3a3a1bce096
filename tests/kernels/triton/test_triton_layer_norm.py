# pyright: reportArgumentType=false, reportCallIssue=false
"""Triton's layer norms against the definitions in float64, under its interpreter."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference import ops as reference
from kernels.reference.random import Dropout
from kernels.triton import embedding_norm
from kernels.triton import layer_norm as triton_layer_norm
from kernels.triton.norm_rows import SUM_TILE, dropout_scalars

EPS = 1e-12
DROPOUT = Dropout(0.1, torch.tensor([-(3 << 40) - 17, (1 << 33) + 77]), stream=16)
HIGH, LOW = torch.float32, torch.bfloat16
SMALL = [(1, 8), (5, 128), (11, 40), (37, 256)]
CASES = [
    *((*SMALL[1], dropout, dtype) for dropout in (DROPOUT, None) for dtype in (HIGH, LOW)),
    *((*shape, *case) for shape in (SMALL[0], *SMALL[2:]) for case in ((DROPOUT, HIGH), (None, LOW))),
    # The interpreter is slow: wide rows once each.
    *((6, 1024, DROPOUT, LOW), (6, 1024, None, HIGH), (3, 2056, DROPOUT, HIGH), (2, 4096, DROPOUT, LOW)),
]


def add_norm_inputs(
    tokens: int, size: int, dtype: torch.dtype, vectors: torch.dtype | None = None, seed: int = 0
) -> list[Tensor]:
    """x, bias, residual, weight, norm_bias; the residual has a mean that is large beside its deviation."""
    generator = torch.Generator().manual_seed((seed * 1000 + tokens) * 10_000 + size)
    x, residual = (torch.randn(tokens, size, generator=generator) for _ in range(2))
    bias, gain, norm_bias = (torch.randn(size, generator=generator) for _ in range(3))
    rows = (x.to(dtype), (residual + 5).to(dtype))
    bias, weight, norm_bias = (vector.to(vectors or dtype) for vector in (bias, 1 + gain / 4, norm_bias))
    return [rows[0], bias, rows[1], weight, norm_bias]


def embedding_inputs(
    tokens: int, size: int, dtype: torch.dtype, ids: torch.dtype = torch.int64, seed: int = 0
) -> list[Tensor]:
    """Ids, of which some repeat, and tables of 7 words and as many positions as tokens; then weight and bias."""
    generator = torch.Generator().manual_seed((seed * 1000 + tokens) * 10_000 + size)
    words, segments = (torch.randint(0, stop, (tokens,), generator=generator).to(ids) for stop in (7, 2))
    tables = [torch.randn(rows, size, generator=generator) for rows in (7, tokens, 2)]
    weight, bias = 1 + torch.randn(size, generator=generator) / 4, torch.randn(size, generator=generator)
    positions = torch.arange(tokens, dtype=ids) // 2
    return [words, positions, segments, *(tensor.to(dtype) for tensor in (*tables, weight, bias))]


def results(
    function: Callable[..., Tensor], inputs: list[Tensor], dropout: Dropout | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The output and all gradients in float64, computed in ``dtype`` or as the inputs are."""
    leaves = [x.to(dtype or x.dtype).requires_grad_() if x.is_floating_point() else x for x in inputs]
    output = function(*leaves, EPS, dropout)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(inputs[-1].dtype)
    gradients = torch.autograd.grad(output, [x for x in leaves if x.requires_grad], upstream.to(output.dtype))
    return [x.double() for x in (output, *gradients)]


@pytest.fixture(autouse=True)
def wide_rows_are_summed_in_wide_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else hundreds of programs do it, most of what the interpreter's time would be."""
    case = getattr(request.node, "callspec", None)
    if case and case.params.get("size", 0) >= 1024:
        monkeypatch.setitem(SUM_TILE, "COLUMNS", 512)


MAKE = {"dropout_add_layer_norm": add_norm_inputs, "embedding_layer_norm": embedding_inputs}
IN_TRITON: dict[str, Callable[..., Tensor]] = {
    "dropout_add_layer_norm": triton_layer_norm.dropout_add_layer_norm,
    "embedding_layer_norm": embedding_norm.embedding_layer_norm,
}


def errors(got: list[list[Tensor]], exact: list[list[Tensor]]) -> list[float]:
    """Of the output and of each gradient the root mean square of the errors in all draws, over that of the exact values."""

    def root_mean_square(tensors: Iterable[Tensor]) -> float:
        return torch.cat([x.flatten() for x in tensors]).square().mean().sqrt().item()

    return [
        root_mean_square(x - y for x, y in zip(xs, ys, strict=True)) / max(root_mean_square(ys), 1e-300)
        for xs, ys in zip(zip(*got, strict=True), zip(*exact, strict=True), strict=True)
    ]


def assert_as_exact_as_pytorch(
    name: str, tokens: int, size: int, dtype: torch.dtype, dropout: Dropout | None, **options: Any
) -> None:
    """Output and every gradient: at most twice plain PyTorch's error, and an eighth of a unit in the last place.

    Errors are root mean squares over several draws of small shapes, because the largest of few values is luck: PyTorch
    divides rows among threads, and with their number the largest error of its sums halves or doubles. What is free is for
    the interpreter's casts to bf16, which cut off and so make twice the error of rounding.
    """
    definition, function = getattr(reference, name), IN_TRITON[name]
    draws = [
        MAKE[name](tokens, size, dtype, seed=seed, **options) for seed in range(min(9, -(-16_000 // (tokens * size))))
    ]
    exact = [results(definition, inputs, dropout, torch.float64) for inputs in draws]
    plain = errors([results(definition, inputs, dropout) for inputs in draws], exact)
    own = errors([results(function, inputs, dropout) for inputs in draws], exact)
    limits = [2 * theirs + torch.finfo(dtype).eps / 8 for theirs in plain]
    assert all(ours <= limit for ours, limit in zip(own, limits, strict=True)), f"errors {own}, at most {limits}"


@pytest.mark.parametrize(
    ("tokens", "size", "dropout", "dtype"), CASES, ids=lambda x: "dropout" if isinstance(x, Dropout) else str(x)
)
def test_dropout_add_layer_norm(tokens: int, size: int, dropout: Dropout | None, dtype: torch.dtype):
    assert_as_exact_as_pytorch("dropout_add_layer_norm", tokens, size, dtype, dropout)


@pytest.mark.parametrize(
    ("tokens", "size", "dropout", "dtype"), CASES, ids=lambda x: "dropout" if isinstance(x, Dropout) else str(x)
)
def test_embedding_layer_norm(tokens: int, size: int, dropout: Dropout | None, dtype: torch.dtype):
    assert_as_exact_as_pytorch("embedding_layer_norm", tokens, size, dtype, dropout)


@pytest.mark.parametrize("name", MAKE)
def test_half_precision(name: str):
    assert_as_exact_as_pytorch(name, 5, 64, torch.float16, DROPOUT)


def test_more_rows_than_programs_walk_over_at_once():
    assert_as_exact_as_pytorch("dropout_add_layer_norm", 70, 96, HIGH, DROPOUT)
    assert_as_exact_as_pytorch("embedding_layer_norm", 70, 96, HIGH, DROPOUT, ids=torch.int32)


@pytest.mark.parametrize(("tokens", "size"), [(3, 24), (70, 128), (2, 1024)])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_mask_is_the_definitions_bit_for_bit(tokens: int, size: int, p: float):
    dropout = Dropout(p, DROPOUT.state, DROPOUT.stream)
    mask = dropout.mask(torch.arange(tokens), size)
    inputs = add_norm_inputs(tokens, size, HIGH)
    _, dx, _, dresidual, _, _ = results(triton_layer_norm.dropout_add_layer_norm, inputs, dropout)
    assert torch.equal(dx != 0, mask & (dresidual != 0))
    output, *_ = results(embedding_norm.embedding_layer_norm, embedding_inputs(tokens, size, HIGH), dropout)
    assert torch.equal(output != 0, mask)


def test_seed_step_and_stream_are_read_at_each_call():
    inputs, state = add_norm_inputs(4, 64, HIGH), DROPOUT.state.clone()
    run = triton_layer_norm.dropout_add_layer_norm
    outputs = [run(*inputs, EPS, Dropout(0.5, state, 1)), run(*inputs, EPS, Dropout(0.5, state, 2))]
    state[1] += 1
    outputs.append(run(*inputs, EPS, Dropout(0.5, state, 1)))
    assert not any(torch.equal(first, second) for first, second in zip(outputs, outputs[1:] + outputs[:1], strict=True))
    state[1] -= 1
    assert torch.equal(run(*inputs, EPS, Dropout(0.5, state, 1)), outputs[0])


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["whole", "dropout"])
@pytest.mark.parametrize("name", MAKE)
def test_rows_without_upstream_gradient_are_inert(name: str, dropout: Dropout | None):
    """Shape bucket slots: whatever is there, of constant rows too, nothing reaches parameters and the other rows."""
    real, shape_bucket, size = 5, 9, 64
    full = MAKE[name](shape_bucket, size, HIGH)
    if name.startswith("dropout"):
        full[0][real:], full[2][real:] = 1e4, 0.0
        short = [x[:real].clone() if x.ndim == 2 else x for x in full]
    else:
        full[0][real:] = full[1][real:] = full[2][real:] = 0
        short = [x[:real].clone() if not x.is_floating_point() else x for x in full]
    gradients = []
    for inputs in (full, short):
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        output = IN_TRITON[name](*leaves, EPS, dropout)
        assert output.isfinite().all()
        upstream = torch.ones_like(output).cumsum(1)
        upstream[real:] = 0
        gradients.append(torch.autograd.grad(output, [x for x in leaves if x.requires_grad], upstream))
    for with_slots, without in zip(*gradients, strict=True):
        torch.testing.assert_close(with_slots[: len(without)], without)
        assert not with_slots[len(without) :].any()


def test_no_tokens():
    for name, inputs in (
        ("dropout_add_layer_norm", add_norm_inputs(0, 64, HIGH)),
        ("embedding_layer_norm", embedding_inputs(0, 64, HIGH)),
    ):
        output, *gradients = results(IN_TRITON[name], inputs, DROPOUT)
        assert output.shape == (0, 64)
        assert not any(gradient.any() for gradient in gradients)


def test_parameters_keep_a_dtype_of_their_own():
    inputs = [x.requires_grad_() for x in add_norm_inputs(5, 64, LOW, vectors=HIGH)]
    output = triton_layer_norm.dropout_add_layer_norm(*inputs, EPS, DROPOUT)
    assert output.dtype == LOW
    output.sum().backward()
    assert [x.grad.dtype for x in inputs if x.grad is not None] == [LOW, HIGH, LOW, HIGH, HIGH]


def test_views_and_broadcast_gradients():
    """Strided rows, and a gradient whose strides are zero."""
    x, bias, residual, weight, norm_bias = add_norm_inputs(6, 64, HIGH)
    strided = torch.stack([x, residual], dim=1).requires_grad_()
    (got,) = torch.autograd.grad(
        triton_layer_norm.dropout_add_layer_norm(
            strided[:, 0], bias, strided[:, 1], weight, norm_bias, EPS, DROPOUT
        ).sum(),
        strided,
    )
    plain = strided.detach().double().requires_grad_()
    vectors = (vector.double() for vector in (bias, weight, norm_bias))
    bias, weight, norm_bias = vectors
    output = reference.dropout_add_layer_norm(plain[:, 0], bias, plain[:, 1], weight, norm_bias, EPS, DROPOUT)
    (expected,) = torch.autograd.grad(output.sum(), plain)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_both_branches_are_separate_where_they_are_leaves():
    """Without dropout they are one tensor inside: adding to one must not change the other."""
    x, bias, residual, weight, norm_bias = add_norm_inputs(3, 64, HIGH)
    leaves = [x.requires_grad_(), residual.requires_grad_()]
    triton_layer_norm.dropout_add_layer_norm(x, bias, residual, weight, norm_bias, EPS).square().sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    before = leaves[1].grad.clone()
    leaves[0].grad.add_(1)
    assert torch.equal(leaves[1].grad, before)


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["whole", "dropout"])
@pytest.mark.parametrize("name", MAKE)
def test_opcheck(name: str, dropout: Dropout | None):
    """PyTorch's own checks of schema, aliasing, fake tensors and autograd, of both directions."""
    inputs: list[Any] = [x.requires_grad_() if x.is_floating_point() else x for x in MAKE[name](3, 16, HIGH)]
    scalars = dropout_scalars(dropout)
    op = getattr(torch.ops.mlperf_bert, name).default
    torch.library.opcheck(op, (*inputs, EPS, *scalars))
    output, statistics = op(*inputs, EPS, *scalars)
    backward = getattr(torch.ops.mlperf_bert, f"{name}_backward").default
    detached = [x.detach() for x in inputs[:-1]]
    torch.library.opcheck(backward, (torch.ones_like(output).detach(), *detached, statistics, *scalars))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x_TD": torch.zeros(2, 12), "residual_TD": torch.zeros(2, 12)}, "hidden size of 12"),
        ({"x_TD": torch.zeros(2, 4104), "residual_TD": torch.zeros(2, 4104)}, "hidden size of 4104"),
        ({"x_TD": torch.zeros(2, 16, dtype=LOW)}, "x and residual are bfloat16, float32"),
        ({"weight_D": torch.zeros(16, dtype=torch.float64)}, "bias, weight and norm_bias are float32, float64"),
    ],
)
def test_what_the_residual_norm_refuses(change: dict[str, Tensor], reason: str):
    names = ("x_TD", "bias_D", "residual_TD", "weight_D", "norm_bias_D")
    inputs: dict[str, Any] = dict(zip(names, add_norm_inputs(2, 16, HIGH), strict=True))
    reasons = triton_layer_norm.dropout_add_layer_norm_unsupported_reasons
    assert reasons(**inputs, eps=EPS, dropout=DROPOUT) == []
    assert any(reason in found for found in reasons(**inputs | change, eps=EPS))


def test_what_the_embedding_norm_refuses():
    inputs = embedding_inputs(3, 16, HIGH)
    reasons = embedding_norm.embedding_layer_norm_unsupported_reasons
    assert reasons(*inputs, EPS, DROPOUT) == []
    assert "segment table of 3" in reasons(*inputs[:5], torch.zeros(3, 16), *inputs[6:], EPS)[0]
    assert "int64" in reasons(inputs[0].short(), *inputs[1:], EPS)[0]
    assert "float64" in reasons(*inputs[:3], inputs[3].double(), *inputs[4:], EPS)[0]
