"""FP8: casts compared with a table of all FP8 numbers, scaled matrix products, and scales."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import OPS, scaled_matmul
from kernels.libraries import pytorch
from kernels.reference.fp8 import E4M3, E5M2, LARGEST, capability_reasons, new_scales

DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])


def scalar(value: float) -> Tensor:
    return torch.tensor(value)


@pytest.fixture(params=["reference", "triton"])
def casts(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Functions that compute the casts: the definitions, or Triton's kernels in the interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton")
    names = (name for name in OPS if name.endswith("fp8"))
    return SimpleNamespace(**{name: OPS[name].implementations[request.param].function(name) for name in names})


def in_rows(x: Tensor) -> Tensor:
    """Return the elements as [N, 16], padded with zeros."""
    return F.pad(x, (0, -len(x) % 16)).view(-1, 16)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest FP8 number from a table of all of them. Ties go to the even code."""
    table = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    table = table[table.isfinite()]
    magnitude = x.double().abs().clamp(max=LARGEST[dtype])
    above = torch.searchsorted(table, magnitude).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = table[above] - magnitude, magnitude - table[below]
    down = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    return torch.where(down, table[below], table[above]).copysign(x.double())


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 2.0**-90, 2.0**14])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_cast_to_the_nearest_fp8_number(
    casts: SimpleNamespace, dtype: torch.dtype, scale: float, source: torch.dtype
):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(source).view(512, 128)
    q = casts.cast_fp8(x, scalar(scale), scalar(0.0), dtype)
    assert (q.dtype, LARGEST[dtype]) == (dtype, torch.finfo(dtype).max)
    nan = x.isnan()
    assert torch.equal(q.float().isnan(), nan)
    assert torch.equal(q.double()[~nan], rounded(x[~nan].double() * scale, dtype))


@pytest.mark.parametrize(
    ("values", "before", "after"),
    [
        ([1.0, -3.0], 0.0, 3.0),
        ([1.0, -3.0], 5.0, 5.0),
        ([0.0, -0.0], 0.0, 0.0),
        ([1.0, -math.inf], 5.0, math.inf),
        ([math.nan, 1.0], 5.0, math.nan),
        ([1.0, 2.0], math.nan, math.nan),
    ],
)
def test_a_cast_raises_amax_in_place_to_the_largest_unscaled_magnitude(
    casts: SimpleNamespace, values: list[float], before: float, after: float
):
    amaxes = torch.tensor([7.0, before, 7.0])
    casts.cast_fp8(in_rows(torch.tensor(values)), scalar(64.0), amaxes[1], E4M3)
    assert torch.equal(amaxes.nan_to_num(-1), torch.tensor([7.0, after, 7.0]).nan_to_num(-1))


def test_columns_are_summed_in_fp32(casts: SimpleNamespace):
    """bf16 represents each of the 1,000 equal terms exactly but not their sums. FP8 represents neither exactly."""
    x = torch.full((1000, 16), 1.0078125, dtype=torch.bfloat16)
    *_, total = casts.cast_transpose_sum_fp8(x, scalar(1.0), scalar(0.0), E5M2)
    assert total.dtype == torch.float32
    assert total.tolist() == [1007.8125] * 16


def test_bias_gelu_casts_are_accurate_in_both_passes(casts: SimpleNamespace):
    generator = torch.Generator().manual_seed(17)
    product, upstream = (2 * torch.randn(17, 32, generator=generator).bfloat16() for _ in range(2))
    bias = torch.randn(32, generator=generator)
    leaves = [product.double().requires_grad_(), bias.double().requires_grad_()]
    output = F.gelu(leaves[0] + leaves[1], approximate="tanh")
    exact, exact_bias = torch.autograd.grad(output, leaves, upstream.double())
    q, transposed = casts.bias_gelu_cast_fp8(product, bias, scalar(16.0), scalar(0.0))
    within_half_a_unit(q, output.detach() * 16, E4M3)
    assert torch.equal(transposed[:, :17].float(), q.float().t())
    assert transposed.shape == (32, 32)
    assert not transposed[:, 17:].float().any()
    q, _, sums = casts.bias_gelu_backward_cast_fp8(upstream, product, bias, scalar(1024.0), scalar(0.0))
    within_half_a_unit(q, exact * 1024, E5M2)
    torch.testing.assert_close(sums.double(), exact_bias, rtol=1e-4, atol=1e-5)


def within_half_a_unit(q: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert q.dtype == dtype
    half = torch.finfo(dtype).eps / 2 * exact.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    assert ((q.double() - exact).abs() <= half + 1e-6 * exact.abs().max()).all()


PRODUCTS = pytest.mark.parametrize(
    "product", [scaled_matmul.definition, pytorch.scaled_matmul], ids=["definition", "pytorch"]
)


@pytest.mark.parametrize("sides", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize(
    ("shape", "out_dtype"),
    [
        ((1, 16, 16), torch.bfloat16),
        ((17, 48, 32), torch.float32),
        ((512, 16, 1024), torch.float32),
        ((33, 112, 4096), torch.bfloat16),
    ],
    ids=str,
)
@PRODUCTS
def test_scaled_products_agree_with_float64(product, sides, out_dtype: torch.dtype, shape: tuple[int, int, int]):
    """The error is relative to the sum of the terms' magnitudes."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randn(size, k, generator=generator).to(side) for size, side in zip((m, n), sides, strict=True))
    found = product(a, b, scalar(0.125), scalar(2.0**-9), out_dtype)
    left, right = a.double() * 0.125, (b.double() * 2.0**-9).t()
    exact, bound = left @ right, left.abs() @ right.abs()
    assert (found.shape, found.dtype) == (exact.shape, out_dtype)
    assert ((found.double() - exact).abs() <= 1e-6 * bound + torch.finfo(out_dtype).eps / 2 * exact.abs()).all()


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@PRODUCTS
def test_a_scaled_product_adds_its_bias(product, bias_dtype: torch.dtype):
    a, b = (torch.randn(rows, 32).to(E4M3) for rows in (5, 48))
    bias = torch.randn(48).to(bias_dtype).requires_grad_()
    found = product(a, b, scalar(0.5), scalar(0.25), torch.bfloat16, bias)
    assert not found.requires_grad
    exact = (a.double() / 2) @ (b.double() / 4).t() + bias.bfloat16().double()
    assert ((found.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps * (exact.abs() + bias.abs())).all()


@pytest.mark.parametrize(
    ("types", "sizes", "out_dtype", "reason"),
    [
        ((E4M3, E4M3), (3, 32, 48), torch.bfloat16, ""),
        ((E5M2, E5M2), (3, 32, 48), torch.bfloat16, "E4M3"),
        ((E4M3, E4M3), (3, 32, 24), torch.bfloat16, "multiples of 16"),
        ((E4M3, E4M3), (3, 32, 48), torch.float64, "a product in"),
    ],
)
def test_scaled_products_give_reasons_against_unsupported_types_and_sizes(
    types, sizes: tuple[int, int, int], out_dtype: torch.dtype, reason: str
):
    m, n, k = sizes
    a, b = torch.zeros(m, k, dtype=types[0]), torch.zeros(n, k, dtype=types[1])
    reasons = pytorch.scaled_matmul_reasons(a, b, scalar(1.0), scalar(1.0), out_dtype)
    assert reason in "; ".join(reasons)
    assert len(reasons) == bool(reason)


def test_fp8_needs_compute_capability_8_9_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert capability_reasons(torch.device("cuda")) == []  # fake tensors need no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for found, reasons in (((8, 9), []), ((8, 6), ["compute capability 8.6, FP8 needs 8.9"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=found: found)
        assert capability_reasons(torch.device("cuda")) == reasons
        assert capability_reasons(torch.device("cpu")) == []


@given(st.floats(width=32).map(abs), st.sampled_from(list(LARGEST.values())))
def test_a_new_scale_is_the_largest_power_of_two_that_fits(amax: float, largest: float):
    (scale,) = new_scales(torch.tensor([amax]), torch.tensor([3.0]), torch.tensor([largest])).tolist()
    if amax == 0 or not math.isfinite(amax):
        assert scale == 3.0
        return
    assert math.frexp(scale)[0] == 0.5
    assert scale * amax <= largest  # exact, because Python multiplies in float64
    assert largest < 2 * scale * amax or scale == 2.0**126
    smallest = float(np.finfo(np.float32).tiny)
    assert min(scale, 1 / scale) >= smallest
