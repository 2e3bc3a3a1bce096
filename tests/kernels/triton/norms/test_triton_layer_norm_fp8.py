# pyright: reportArgumentType=false, reportCallIssue=false
"""Triton's layer norms with casts under the interpreter: numbers against the definitions in float64, casts bit for bit."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference import layer_norm_fp8 as reference
from kernels.reference.fp8 import E4M3, E5M2, cast_transpose_fp8
from kernels.reference.random import Dropout
from kernels.triton.norms import layer_norm, layer_norm_fp8
from kernels.triton.norms.rows import SUM_TILE, dropout_scalars

DROPOUT = Dropout(0.1, torch.tensor([-(3 << 40) - 17, (1 << 33) + 77]), stream=16)
HIGH, LOW = torch.float32, torch.bfloat16
EPS = 1e-12
# Rows around the padding and a program's 32; columns around a tile of the transpose; more groups than programs.
CASES = [
    (0, 64, DROPOUT, HIGH),
    (1, 16, DROPOUT, HIGH),
    (16, 48, None, LOW),
    (33, 80, DROPOUT, HIGH),
    (70, 128, DROPOUT, LOW),
    (37, 144, None, torch.float16),
    (3, 1024, DROPOUT, LOW),
    (2, 2064, None, HIGH),
]
BOTH = pytest.mark.parametrize(
    ("tokens", "size", "dropout", "dtype"), CASES, ids=lambda x: "dropout" if isinstance(x, Dropout) else str(x)
)


@pytest.fixture(autouse=True)
def wide_rows_are_summed_in_wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else hundreds of programs do it, most of what the interpreter's time would be."""
    monkeypatch.setitem(SUM_TILE, "COLUMNS", 512)


def inputs(tokens: int, size: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Rows in ``dtype``, vectors in fp32 as under autocast; the residual has a mean that is large beside its deviation."""
    generator = torch.Generator().manual_seed(seed)
    rows = {name: torch.randn(tokens, size, generator=generator) for name in ("dy", "shortcut_dy", "x", "residual")}
    rows["residual"] += 5
    vectors = {name: torch.randn(size, generator=generator) for name in ("bias", "weight", "norm_bias")}
    return {name: made.to(dtype) for name, made in rows.items()} | vectors


def forward(module: Any, given: dict[str, Tensor], dropout: Dropout | None, *site: Tensor | None) -> tuple[Any, ...]:
    names = "x", "bias", "residual", "weight", "norm_bias"
    return module.add_norm_cast_fp8(*(given[name] for name in names), EPS, dropout, *site)


def backward(
    module: Any, given: Mapping[str, Tensor | None], statistics: Tensor, dropout: Dropout | None, *site: Tensor
) -> tuple[Tensor, ...]:
    names = "dy", "shortcut_dy", "x", "bias", "residual", "weight"
    tensors = (given[name] for name in names)
    return module.add_norm_backward_cast_fp8(*tensors, statistics, dropout, *site)


def site(scale: float, amax: float = 0.0) -> tuple[Tensor, Tensor]:
    """Elements of vectors, as those of training."""
    return torch.tensor([1.0, scale])[1], torch.tensor([7.0, amax])[1]


def bits(q: Tensor) -> Tensor:
    return q.view(torch.uint8)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()


@BOTH
def test_forward_is_the_plain_kernels_with_a_cast_behind(
    tokens: int, size: int, dropout: Dropout | None, dtype: torch.dtype
) -> None:
    given, (scale, amax) = inputs(tokens, size, dtype), site(16.0)
    y, statistics, q, transposed = forward(layer_norm_fp8, given, dropout, scale, amax)
    plain = layer_norm._add_norm(*(given[name] for name in ("x", "bias", "residual", "weight", "norm_bias")), EPS,
                                 *dropout_scalars(dropout))  # fmt: skip
    assert y.dtype == dtype
    for found, expected in zip((y, statistics), plain, strict=True):
        assert torch.equal(found, expected)
    scale, expected_amax = site(16.0)
    casts = cast_transpose_fp8(y, scale, expected_amax, E4M3)
    assert all(torch.equal(bits(found), bits(cast)) for found, cast in zip((q, transposed), casts, strict=True))
    assert torch.equal(amax, expected_amax)


@BOTH
def test_backward(tokens: int, size: int, dropout: Dropout | None, dtype: torch.dtype) -> None:
    given, wide = inputs(tokens, size, dtype), torch.float64
    statistics = forward(layer_norm_fp8, given, dropout, None, None)[1]
    plain_statistics = forward(reference, given, dropout, None, None)[1]
    exact_given = {name: x.to(wide) for name, x in given.items()}
    exact_statistics = forward(reference, exact_given, dropout, None, None)[1]
    (scale, amax), (_, plain_amax), (_, exact_amax) = (site(64.0) for _ in range(3))
    found = backward(layer_norm_fp8, given, statistics, dropout, scale, amax)
    plain = backward(reference, given, plain_statistics, dropout, scale, plain_amax)
    exact = backward(reference, exact_given, exact_statistics, dropout, scale, exact_amax)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in plain]
    q, transposed, *others = found
    assert torch.equal(bits(transposed[:, :tokens]), bits(q.t().contiguous()))
    assert not bits(transposed[:, tokens:]).any()
    if not tokens:
        assert not any(x.any() for x in others)
        return
    torch.testing.assert_close(amax, plain_amax, rtol=0.01, atol=0)
    free = torch.finfo(dtype).eps / 8
    for ours, theirs, truth in zip((q, *others), (plain[0], *plain[2:]), (exact[0], *exact[2:]), strict=True):
        assert error(ours.double(), truth.double()) <= 2 * error(theirs.double(), truth.double()) + free


@pytest.mark.parametrize("dropout", [DROPOUT, None], ids=["dropout", "whole"])
@pytest.mark.parametrize("shortcut", [True, False])
def test_backward_is_the_plain_kernels_with_a_sum_before_and_a_cast_behind(
    dropout: Dropout | None, shortcut: bool
) -> None:
    """In fp32, where the interpreter rounds as PyTorch does; bit for bit but for sums over rows by other programs."""
    given = inputs(45, 48, HIGH)
    dy = given["dy"] + given["shortcut_dy"] if shortcut else given["dy"]
    rows = given["x"], given["bias"], given["residual"], given["weight"]
    statistics = forward(layer_norm_fp8, given, dropout, None, None)[1]
    both: dict[str, Tensor | None] = {**given} if shortcut else {**given, "shortcut_dy": None}
    q, transposed, *found = backward(layer_norm_fp8, both, statistics, dropout, *site(64.0))
    dx, dresidual, vectors = layer_norm._add_norm_gradients(dy, *rows, statistics, *dropout_scalars(dropout))
    casts = cast_transpose_fp8(dx if len(dx) else dresidual, *site(64.0), E5M2)
    assert all(torch.equal(bits(one), bits(cast)) for one, cast in zip((q, transposed), casts, strict=True))
    assert torch.equal(found[0], dresidual)
    torch.testing.assert_close(found[1:], list(vectors))


def test_amax_is_kept_raised_and_seen_to_be_bad() -> None:
    """In whichever group of rows the largest is."""
    given = inputs(70, 32, HIGH)
    y = forward(layer_norm_fp8, given, None, *site(1.0))[0]
    for kept, value in ((100.0, 0.0), (0.0, 50.0), (0.0, float("nan")), (0.0, float("inf"))):
        given["norm_bias"][20] = value
        scale, amax = site(1.0, kept)
        y, _, q, _ = forward(layer_norm_fp8, given, None, scale, amax)
        expected = torch.maximum(torch.tensor(kept), y.abs().max())
        torch.testing.assert_close(amax, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(q.float().isnan(), y.isnan())


def test_without_a_scale_nothing_is_cast() -> None:
    given = inputs(5, 32, HIGH)
    results = [forward(module, given, DROPOUT, None, None) for module in (layer_norm_fp8, reference)]
    assert all(result[2:] == (None, None) for result in results)
    torch.testing.assert_close(results[0][:2], results[1][:2])


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["whole", "dropout"])
def test_opcheck(dropout: Dropout | None) -> None:
    """PyTorch's own checks of schema, aliasing and fake tensors, of both directions."""
    given, scalars = inputs(3, 16, LOW), dropout_scalars(dropout)
    ops = torch.ops.mlperf_bert
    only = {"test_utils": ("test_schema", "test_faketensor")}
    tensors = [given[name] for name in ("x", "bias", "residual", "weight", "norm_bias")]
    for cast in (site(2.0), (None, None)):
        torch.library.opcheck(ops.add_norm_cast_fp8.default, (*tensors, EPS, *scalars, *cast), **only)
    statistics = forward(layer_norm_fp8, given, dropout, None, None)[1]
    for shortcut in (given["shortcut_dy"], None):
        arguments = (given["dy"], shortcut, *tensors[:-1], statistics, *scalars, *site(2.0))
        torch.library.opcheck(ops.add_norm_backward_cast_fp8.default, arguments, **only)


def test_what_cannot_be_computed_says_why() -> None:
    given = inputs(3, 24, LOW)
    statistics = torch.zeros(2, 3)
    names = "x", "bias", "residual", "weight", "norm_bias"
    (one,) = layer_norm_fp8.add_norm_cast_fp8_unsupported_reasons(
        *(given[name] for name in names), EPS, None, *site(1.0)
    )
    arguments = (given["dy"].float(), None, *(given[name] for name in names[:4]), statistics, None, *site(1.0))
    other, again = layer_norm_fp8.add_norm_backward_cast_fp8_unsupported_reasons(*arguments)
    assert one == again == "24 columns, not a multiple of 16"
    assert other == "gradients in torch.float32, expected torch.bfloat16"
