"""FP8's casts against float64 and a table of all FP8 numbers; scaled matrix products; scales; no GPU is asked."""

import importlib
import math
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import kernels
from kernels.libraries import pytorch_fp8
from kernels.reference import fp8
from kernels.reference.fp8 import E4M3, E5M2, LARGEST, new_scales, padded

DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
ROWS = pytest.mark.parametrize("rows", [1, 16, 17, 1000])


def scalar(value: float) -> Tensor:
    return torch.tensor(value)


@pytest.fixture(params=["reference", "triton"])
def casts(request: pytest.FixtureRequest) -> ModuleType:
    """The definitions, and Triton's in its interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton")
    return importlib.import_module(f"kernels.{request.param}.fp8")


def in_rows(x: Tensor) -> Tensor:
    """[N, 16], filled up with zeros."""
    return F.pad(x, (0, -len(x) % 16)).view(-1, 16)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest FP8 number in fp64, found in the table of all of them; of two equally near the one with an even code."""
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
def test_every_number_goes_to_the_nearest(casts: ModuleType, dtype: torch.dtype, scale: float, source: torch.dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(source).view(512, 128)
    q = casts.cast_fp8(x, scalar(scale), scalar(0.0), dtype)
    assert q.dtype == dtype
    nan = x.isnan()
    assert torch.equal(q.float().isnan(), nan)
    assert torch.equal(q.double()[~nan], rounded(x[~nan].double() * scale, dtype))


@DTYPES
def test_midpoints_and_their_neighbours_in_fp32(casts: ModuleType, dtype: torch.dtype):
    table = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    table = table[table.isfinite()]
    middle = (table[1:] + table[:-1]) / 2
    x = in_rows(torch.cat([middle, middle.nextafter(scalar(0.0)), middle.nextafter(scalar(1e9))]))
    assert torch.equal(casts.cast_fp8(x, scalar(1.0), scalar(0.0), dtype).double(), rounded(x, dtype))


@DTYPES
def test_what_lies_beyond_becomes_the_largest(casts: ModuleType, dtype: torch.dtype):
    x = in_rows(torch.tensor([LARGEST[dtype], 1e30, -1e30, math.inf, -math.inf, math.nan]))
    q = casts.cast_fp8(x, scalar(1.0), scalar(0.0), dtype).float()
    assert q[0, :5].tolist() == [LARGEST[dtype] * sign for sign in (1, 1, -1, 1, -1)]
    assert q[0, 5].isnan()
    assert LARGEST[dtype] == torch.finfo(dtype).max


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
def test_amax_is_raised_in_place_by_what_is_not_scaled(
    casts: ModuleType, values: list[float], before: float, after: float
):
    amaxes = torch.tensor([7.0, before, 7.0])
    casts.cast_fp8(in_rows(torch.tensor(values)), scalar(64.0), amaxes[1], E4M3)
    assert torch.equal(amaxes.nan_to_num(-1), torch.tensor([7.0, after, 7.0]).nan_to_num(-1))


@ROWS
@DTYPES
def test_the_transpose_is_padded_with_zeros(casts: ModuleType, rows: int, dtype: torch.dtype):
    x = (torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows)) + 1).bfloat16()
    amax = scalar(0.0)
    q, transposed = casts.cast_transpose_fp8(x, scalar(8.0), amax, dtype)
    assert torch.equal(q.float(), casts.cast_fp8(x, scalar(8.0), scalar(0.0), dtype).float())
    assert transposed.shape == (48, padded(rows))
    assert padded(rows) % 16 == 0 <= padded(rows) - rows < 16
    assert transposed.is_contiguous()
    assert torch.equal(transposed[:, :rows].float(), q.float().t())
    assert not transposed[:, rows:].float().any()
    assert amax == x.float().abs().max()


def test_columns_are_summed_in_fp32(casts: ModuleType):
    """1,000 equal terms that bf16 holds exactly, as it does not hold their sums, and FP8 holds neither."""
    x = torch.full((1000, 16), 1.0078125, dtype=torch.bfloat16)
    *_, total = casts.cast_transpose_sum_fp8(x, scalar(1.0), scalar(0.0), E5M2)
    assert total.dtype == torch.float32
    assert total.tolist() == [1007.8125] * 16


@ROWS
def test_bias_and_gelu_both_ways(casts: ModuleType, rows: int):
    generator = torch.Generator().manual_seed(rows)
    product, upstream = (2 * torch.randn(rows, 32, generator=generator).bfloat16() for _ in range(2))
    bias = torch.randn(32, generator=generator)
    leaves = [product.double().requires_grad_(), bias.double().requires_grad_()]
    output = F.gelu(leaves[0] + leaves[1], approximate="tanh")
    exact, exact_bias = torch.autograd.grad(output, leaves, upstream.double())
    amaxes = torch.zeros(2)
    forward = casts.bias_gelu_cast_fp8(product, bias, scalar(16.0), amaxes[0])
    within_half_a_unit(forward[0], output.detach() * 16, E4M3)
    *backward, bias_gradient = casts.bias_gelu_backward_cast_fp8(upstream, product, bias, scalar(1024.0), amaxes[1])
    within_half_a_unit(backward[0], exact * 1024, E5M2)
    for q, transposed in (forward, backward):
        assert torch.equal(transposed[:, :rows].float(), q.float().t())
        assert not transposed[:, rows:].float().any()
    assert bias_gradient.dtype == torch.float32
    torch.testing.assert_close(bias_gradient.double(), exact_bias, rtol=1e-4, atol=1e-5)
    largest = torch.stack([x.abs().max() for x in (output.detach(), exact)])
    torch.testing.assert_close(amaxes.double(), largest, rtol=1e-5, atol=0)


def within_half_a_unit(q: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert q.dtype == dtype
    half = torch.finfo(dtype).eps / 2 * exact.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    fp32 = 1e-6 * exact.abs().max()
    assert ((q.double() - exact).abs() <= half + fp32).all()


def test_no_gradient_is_recorded():
    x = torch.randn(4, 16, requires_grad=True)
    amax = scalar(0.0)
    outputs = fp8.bias_gelu_backward_cast_fp8(x, x, x[0], scalar(1.0), amax)
    assert not any(tensor.requires_grad for tensor in (*outputs, amax))


SIDES = pytest.mark.parametrize("sides", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [fp8, pytorch_fp8], ids=["definition", "pytorch"])


def operands(sides: tuple[torch.dtype, torch.dtype], shape: tuple[int, int, int]) -> list[Tensor]:
    m, n, k = shape
    generator = torch.Generator().manual_seed(m)
    return [torch.randn(size, k, generator=generator).to(side) for size, side in zip((m, n), sides, strict=True)]


def assert_product(found: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, error: float) -> None:
    """Check a product of operands scaled by 0.125 and 2^-9; ``error`` is relative to the sum of the terms' magnitudes."""
    left, right = a.double() * 0.125, (b.double() * 2.0**-9).t()
    exact, bound = left @ right, left.abs() @ right.abs()
    assert (found.shape, found.dtype) == (exact.shape, out_dtype)
    assert ((found.double() - exact).abs() <= error * bound + torch.finfo(out_dtype).eps / 2 * exact.abs()).all()


@SIDES
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
@IMPLEMENTATIONS
def test_scaled_products(implementation, sides, out_dtype: torch.dtype, shape: tuple[int, int, int]):
    a, b = operands(sides, shape)
    found = implementation.scaled_matmul(a, b, scalar(0.125), scalar(2.0**-9), out_dtype)
    assert_product(found, a, b, out_dtype, error=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@SIDES
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scaled_products_on_a_gpu(sides, out_dtype: torch.dtype):
    """Tokens in no multiple of anything; the bound is that of sums of which tensor cores keep 14 bits."""
    if reasons := fp8.capability_reasons(torch.device("cuda")):
        pytest.skip(reasons[0])
    a, b = (side.cuda() for side in operands(sides, (1237, 4096, 1024)))
    inverses = torch.tensor([0.0, 0.125, 2.0**-9], device="cuda")  # elements of a vector, as in training
    assert pytorch_fp8.unsupported_reasons(a, b, inverses[1], inverses[2], out_dtype) == []
    with torch.autocast("cuda", torch.bfloat16):  # as in training; on a CPU PyTorch's product rounds to bf16 in it
        found = pytorch_fp8.scaled_matmul(a, b, inverses[1], inverses[2], out_dtype)
    assert_product(found, a, b, out_dtype, error=2.0**-11)


def test_the_definition_of_a_product_ignores_autocast():
    a, b = (torch.randn(16, 32).to(E4M3) for _ in range(2))
    plain = fp8.scaled_matmul(a, b, scalar(1.0), scalar(1.0), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = fp8.scaled_matmul(a, b, scalar(1.0), scalar(1.0), torch.float32)
    torch.testing.assert_close(inside, plain)


@pytest.mark.parametrize("asked", [True, False])
def test_who_adds_up_is_the_callers_to_say(monkeypatch: pytest.MonkeyPatch, asked: bool):
    """And nobody leaves it to the tensor cores unless told to."""
    seen = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, use_fast_accum, **__: seen.append(use_fast_accum))
    a, b = torch.zeros(16, 32, dtype=E5M2), torch.zeros(16, 32, dtype=E4M3)
    pytorch_fp8.scaled_matmul(a, b, scalar(1.0), scalar(1.0), torch.bfloat16, use_fast_accum=asked)
    pytorch_fp8.scaled_matmul(a, b, scalar(1.0), scalar(1.0), torch.bfloat16)
    assert seen == [asked, False]


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@IMPLEMENTATIONS
def test_the_bias_of_a_product(implementation, bias_dtype: torch.dtype):
    a, b = (torch.randn(rows, 32).to(E4M3) for rows in (5, 48))
    bias = torch.randn(48).to(bias_dtype).requires_grad_()
    found = implementation.scaled_matmul(a, b, scalar(0.5), scalar(0.25), torch.bfloat16, bias)
    assert not found.requires_grad
    exact = (a.double() / 2) @ (b.double() / 4).t() + bias.bfloat16().double()
    assert ((found.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps * (exact.abs() + bias.abs())).all()


A, B = (torch.zeros(rows, 48, dtype=E4M3) for rows in (3, 32))
HALF = torch.ones((), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"b_NK": B.to(E5M2)}, None),
        ({"a_MK": A.to(E5M2), "b_NK": B.to(E5M2)}, "E5M2"),
        ({"a_MK": A.bfloat16()}, "bfloat16 and"),
        ({"a_MK": A[:, :24].contiguous(), "b_NK": B[:, :24].contiguous()}, "multiples of 16"),
        ({"b_NK": B[:17]}, "multiples of 16"),
        ({"out_dtype": torch.float64}, "a product in"),
        ({"out_dtype": torch.float32, "bias_N": torch.zeros(32)}, "bias"),
        ({"inverse_b": HALF}, "expected float32"),
        ({"a_MK": A[:, :16], "b_NK": B[:, :16].contiguous()}, "contiguous"),
    ],
)
def test_what_cannot_be_multiplied(changes: dict, reason: str | None):
    fine = {"a_MK": A, "b_NK": B, "inverse_a": scalar(1.0), "inverse_b": scalar(1.0), "out_dtype": torch.bfloat16}
    reasons = pytorch_fp8.unsupported_reasons(**fine | changes)
    assert [reason in found for found in reasons] == [True] if reason else reasons == []


@pytest.mark.parametrize(("capability", "usable"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_without_fp8(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], usable: bool):
    assert fp8.capability_reasons(torch.device("cpu")) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    reasons = fp8.capability_reasons(torch.device("cuda"))
    assert usable is (reasons == [])
    assert usable or "8.9" in reasons[0]


@given(st.floats(width=32).map(abs), st.sampled_from(list(LARGEST.values())))
def test_a_new_scale_is_the_largest_power_of_two_that_fits(amax: float, largest: float):
    (scale,) = new_scales(torch.tensor([amax]), torch.tensor([3.0]), torch.tensor([largest])).tolist()
    if amax == 0 or not math.isfinite(amax):
        assert scale == 3.0
        return
    assert math.frexp(scale)[0] == 0.5
    assert scale * amax <= largest  # in doubles all of this is exact
    assert largest < 2 * scale * amax or scale == 2.0**126
    smallest = float(np.finfo(np.float32).tiny)
    assert min(scale, 1 / scale) >= smallest


def test_new_scales_of_a_vector():
    amax = torch.tensor([448.0, 448.00003, 224.0, 0.0, math.inf, math.nan, 57344.0, 1e-45])
    largest = torch.tensor([448.0] * 6 + [57344.0] * 2)
    found = new_scales(amax, torch.full((8,), 32.0), largest)
    assert found.dtype == torch.float32
    assert found.tolist() == [1, 0.5, 2, 32, 32, 32, 1, 2.0**126]


def test_the_host_reads_nothing():
    """On tensors without data, said to be on a GPU, any read is an error; each op finds an implementation all the same."""
    mode = FakeTensorMode()

    def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda"))

    scale, amax, bias = on_gpu(), on_gpu(), on_gpu(48)
    product = on_gpu(17, 48, dtype=torch.bfloat16)
    with mode:
        q, transposed, total = kernels.bias_gelu_backward_cast_fp8(product, product, bias, scale, amax)
        wide, _ = kernels.bias_gelu_cast_fp8(product, bias, scale, amax)
        _, other = kernels.cast_transpose_fp8(product, scale, amax, E4M3)
        *_, other_total = kernels.cast_transpose_sum_fp8(product, scale, amax, E5M2)
        plain = kernels.cast_fp8(product, scale, amax, E4M3)
        weight_gradient = kernels.scaled_matmul(transposed, other, scale, scale, torch.float32)
        defined = fp8.bias_gelu_backward_cast_fp8(product, product, bias, scale, amax)
        scales = new_scales(bias, bias, bias)
    found = (q, transposed, total)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in defined]
    assert [x.dtype for x in (wide, plain, other)] == [E4M3] * 3
    assert (other_total.shape, weight_gradient.shape) == ((48,), (48, 48))
    assert all(x.is_cuda for x in (*found, *defined, other_total, weight_gradient, scales))
    assert kernels.scaled_matmul.chosen(transposed, other, scale, scale, torch.float32).name == "pytorch"
