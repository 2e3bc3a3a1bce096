# pyright: reportArgumentType=false, reportCallIssue=false
"""Triton's layer norms against the definitions in float64, under its interpreter."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.libraries import pytorch
from kernels.reference import ops as reference
from kernels.reference.random import Dropout
from kernels.triton.norms import embedding_norm
from kernels.triton.norms import layer_norm as triton_layer_norm
from kernels.triton.norms.rows import SUM_TILE, dropout_scalars
from kernels.tuning.examples import Size, example_inputs
from tests.kernels.accuracy import CPU, output_and_gradients

DROPOUT = Dropout(0.1, torch.tensor([-(3 << 40) - 17, (1 << 33) + 77]), stream=16)
HIGH, LOW = torch.float32, torch.bfloat16
CASES = [
    (0, 64, DROPOUT, HIGH),
    (1, 8, DROPOUT, HIGH),
    *((5, 128, dropout, dtype) for dropout in (DROPOUT, None) for dtype in (HIGH, LOW)),
    (5, 64, DROPOUT, torch.float16),
    (11, 40, None, LOW),
    (70, 96, DROPOUT, HIGH),  # more rows than programs walk over at once
    *((6, 1024, DROPOUT, LOW), (3, 2056, None, HIGH), (2, 4096, DROPOUT, LOW)),  # the interpreter is slow
]
IN_TRITON: dict[str, Callable[..., Tensor]] = {
    "dropout_add_layer_norm": triton_layer_norm.dropout_add_layer_norm,
    "embedding_layer_norm": embedding_norm.embedding_layer_norm,
}
BOTH = pytest.mark.parametrize("name", IN_TRITON)


def inputs(
    name: str, tokens: int, size: int, dtype: torch.dtype = HIGH, dropout: Dropout | None = DROPOUT, seed: int = 0
) -> list[Any]:
    """Some ids and positions repeat; the residual has a mean that is large beside its deviation."""
    sizes = Size((tokens - tokens // 2, tokens // 2), max_seqlen=max(1, tokens), hidden=size, vocabulary=7)
    arguments = list(example_inputs(name, CPU, dtype, sizes, seed)[0])
    if name.startswith("dropout"):
        arguments[2] = arguments[2].detach() + 5
    return [*arguments[:-1], dropout]


@pytest.fixture(autouse=True)
def wide_rows_are_summed_in_wide_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else hundreds of programs do it, most of what the interpreter's time would be."""
    case = getattr(request.node, "callspec", None)
    if case and case.params.get("size", 0) >= 1024:
        monkeypatch.setitem(SUM_TILE, "COLUMNS", 512)


def errors(got: list[list[Tensor]], exact: list[list[Tensor]]) -> list[float]:
    """Root mean square of the errors in all draws over that of the exact values, of the output and of each gradient."""

    def root_mean_square(tensors: Iterable[Tensor]) -> float:
        return torch.cat([x.flatten() for x in tensors]).square().mean().sqrt().item()

    return [
        root_mean_square(x - y for x, y in zip(xs, ys, strict=True)) / max(root_mean_square(ys), 1e-300)
        for xs, ys in zip(zip(*got, strict=True), zip(*exact, strict=True), strict=True)
    ]


@BOTH
@pytest.mark.parametrize(
    ("tokens", "size", "dropout", "dtype"), CASES, ids=lambda x: "dropout" if isinstance(x, Dropout) else str(x)
)
def test_error_is_at_most_twice_plain_pytorch(
    name: str, tokens: int, size: int, dropout: Dropout | None, dtype: torch.dtype
) -> None:
    """Output and every gradient: at most twice plain PyTorch's error, and an eighth of a unit in the last place.

    Errors are root mean squares over several draws of small shapes, because the largest of few values is luck: PyTorch
    divides rows among threads, and with their number the largest error of its sums halves or doubles. What is free is for
    the interpreter's casts to bf16, which cut off and so make twice the error of rounding.
    """
    count = min(5, -(-8000 // (tokens * size))) if tokens else 1
    draws = [inputs(name, tokens, size, dtype, dropout, seed) for seed in range(count)]
    definition, function = getattr(reference, name), IN_TRITON[name]
    exact = [output_and_gradients(definition, arguments, torch.float64) for arguments in draws]
    plain, own = ([output_and_gradients(each, arguments) for arguments in draws] for each in (definition, function))
    assert [(x.shape, x.dtype) for x in own[0]] == [(x.shape, x.dtype) for x in plain[0]]
    if not tokens:
        assert not any(gradient.any() for gradient in own[0])
        return
    limits = [2 * theirs + torch.finfo(dtype).eps / 8 for theirs in errors(plain, exact)]
    found = errors(own, exact)
    assert all(ours <= limit for ours, limit in zip(found, limits, strict=True)), f"errors {found}, at most {limits}"


@pytest.mark.parametrize(("tokens", "size", "p"), [(3, 24, 0.1), (70, 128, 0.5), (2, 1024, 0.1)])
def test_the_mask_is_the_definitions_bit_for_bit(tokens: int, size: int, p: float):
    dropout = Dropout(p, DROPOUT.state, DROPOUT.stream)
    mask = dropout.mask(torch.arange(tokens), size)
    arguments = inputs("dropout_add_layer_norm", tokens, size, dropout=dropout)
    _, dx, _, dresidual, _, _ = output_and_gradients(triton_layer_norm.dropout_add_layer_norm, arguments)
    assert torch.equal(dx != 0, mask & (dresidual != 0))
    output = embedding_norm.embedding_layer_norm(*inputs("embedding_layer_norm", tokens, size, dropout=dropout))
    assert torch.equal(output != 0, mask)


@BOTH
def test_constant_rows_without_upstream_gradient_are_inert(name: str):
    """Shape bucket slots: rows after the fifth, of one token and position or of equal numbers, reach no parameter."""
    arguments = inputs(name, 9, 64, dropout=None)
    for place in (0, 1, 2) if name.startswith("embedding") else (0, 2):
        arguments[place] = arguments[place].detach().clone()
        arguments[place][5:] = 0
    short = [x[:5] if isinstance(x, Tensor) and len(x) == 9 and place < 3 else x for place, x in enumerate(arguments)]
    gradients = []
    for given in (arguments, short):
        output = IN_TRITON[name](*given)
        assert output.isfinite().all()
        vectors = [x for x in given[3:] if isinstance(x, Tensor)]
        gradients.append(torch.autograd.grad(output[:5].square().sum(), vectors))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("module", [reference, pytorch, embedding_norm], ids=lambda module: module.__name__)
def test_the_word_tables_gradient_is_added_where_it_is_asked_for(module: Any):
    """In fp32 also of a table in 16 bits; autograd has none of it, and the other gradients as before."""
    arguments = inputs("embedding_layer_norm", 9, 64, LOW, None)
    leaves = arguments[3:8]
    gradients = []
    added = torch.ones(7, 64)
    for given in ({}, {"word_gradient_VD": added}):
        module.embedding_layer_norm(*arguments, **given).float().square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    (expected, *others), (found, *found_others) = gradients
    assert found is None
    assert all(map(torch.equal, found_others, others))
    torch.testing.assert_close(added, 1 + expected.float(), rtol=0.01, atol=0.01)


def test_parameters_keep_a_dtype_of_their_own():
    arguments = inputs("dropout_add_layer_norm", 5, 64)
    leaves = [x.detach().to(LOW if x.ndim > 1 else HIGH).requires_grad_() for x in arguments[:5]]
    output = triton_layer_norm.dropout_add_layer_norm(*leaves, *arguments[5:])
    assert output.dtype == LOW
    output.sum().backward()
    assert [x.grad.dtype for x in leaves if x.grad is not None] == [LOW, HIGH, LOW, HIGH, HIGH]


def test_views_and_broadcast_gradients():
    """Strided rows, and a gradient whose strides are zero."""
    x, bias, residual, *others = inputs("dropout_add_layer_norm", 6, 64)
    strided = torch.stack([x, residual], dim=1).detach()
    found = []
    for norm, dtype in ((triton_layer_norm, HIGH), (reference, torch.float64)):
        leaf = strided.to(dtype).requires_grad_()
        rest = [value.to(dtype) if isinstance(value, Tensor) else value for value in (bias, *others)]
        output = norm.dropout_add_layer_norm(leaf[:, 0], rest[0], leaf[:, 1], *rest[1:])
        found.append(torch.autograd.grad(output.sum(), leaf)[0].double())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_gradients_of_both_branches_are_separate_where_they_are_leaves():
    """Without dropout they are one tensor inside: adding to one must not change the other."""
    arguments = inputs("dropout_add_layer_norm", 3, 64, dropout=None)
    x, residual = arguments[0], arguments[2].requires_grad_()
    triton_layer_norm.dropout_add_layer_norm(*arguments).square().sum().backward()
    before = residual.grad.clone()
    x.grad.add_(1)
    assert torch.equal(residual.grad, before)


@pytest.mark.parametrize(
    ("name", "dropout"),
    [("dropout_add_layer_norm", None), ("dropout_add_layer_norm", DROPOUT), ("embedding_layer_norm", DROPOUT)],
    ids=["whole", "dropout", "embeddings"],
)
def test_opcheck(name: str, dropout: Dropout | None):
    """PyTorch's own checks of schema, aliasing, fake tensors and autograd, of both directions."""
    *tensors, eps, _ = inputs(name, 3, 16)
    scalars = dropout_scalars(dropout)
    op = getattr(torch.ops.mlperf_bert, name).default
    torch.library.opcheck(op, (*tensors, eps, *scalars))
    output, statistics = op(*tensors, eps, *scalars)
    backward = getattr(torch.ops.mlperf_bert, f"{name}_backward").default
    detached = [x.detach() for x in tensors[:-1]]
    added = [torch.zeros(7, 16)] if name.startswith("embedding") else []
    arguments = (torch.ones_like(output).detach(), *detached, statistics, *scalars, *added)
    torch.library.opcheck(backward, arguments, test_utils=("test_schema", "test_faketensor"))
