"""Triton's FP8 casts under the interpreter, against the definitions, bit for bit where no GELU is computed."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.reference import fp8
from kernels.reference.fp8 import E4M3, E5M2, padded
from kernels.triton import fp8 as triton_fp8

DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
# Rows around the padding and the tile; columns less than a tile, not a whole number of them, and many.
SHAPES = [(1, 16), (15, 48), (16, 16), (17, 320), (128, 64), (129, 80), (255, 48), (300, 16)]
SOURCES = pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def scalar(value: float) -> Tensor:
    return torch.tensor(value)


def bits(q: Tensor) -> Tensor:
    """The codes, all NaNs being one."""
    return torch.where(q.float().isnan(), 127, q.view(torch.uint8))


def inputs(rows: int, columns: int, source: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers from far below FP8's smallest to beyond its largest."""
    generator = torch.Generator().manual_seed(rows * columns + seed)
    magnitude = torch.randn(rows, columns, generator=generator) * 4
    x = torch.randn(rows, columns, generator=generator) * magnitude.exp()
    return x.clamp(-60000, 60000).to(source)  # fp16 has nothing larger


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch):
    """What no program writes shows as NaN."""
    plain = Tensor.new_empty

    def new_empty(self: Tensor, *args, **kwargs) -> Tensor:
        made = plain(self, *args, **kwargs)
        if "dtype" in kwargs:  # results, and not what the interpreter makes
            made.view(torch.uint8).fill_(0xFF)
        return made

    monkeypatch.setattr(Tensor, "new_empty", new_empty)


@pytest.mark.usefixtures("poisoned_memory")
@DTYPES
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-90, 2.0**14])
def test_every_number_of_16_bits(dtype: torch.dtype, source: torch.dtype, scale: float):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(source).view(512, 128)
    x = x.nan_to_num(0.0, math.inf, -math.inf)
    amaxes = scalar(0.0), scalar(0.0)
    expected = fp8.cast_fp8(x, scalar(scale), amaxes[0], dtype)
    found = triton_fp8.cast_fp8(x, scalar(scale), amaxes[1], dtype)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert amaxes[0] == amaxes[1] == math.inf


@pytest.mark.usefixtures("poisoned_memory")
@DTYPES
@SOURCES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cast_transpose_and_sum(shape: tuple[int, int], source: torch.dtype, dtype: torch.dtype):
    x, scale = inputs(*shape, source), scalar(4.0)
    amaxes = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0])
    expected = fp8.cast_transpose_sum_fp8(x, scale, amaxes[0], dtype)
    found = triton_fp8.cast_transpose_sum_fp8(x, scale, amaxes[1], dtype)
    pair = triton_fp8.cast_transpose_fp8(x, scale, amaxes[2], dtype)
    single = triton_fp8.cast_fp8(x, scale, amaxes[3], dtype)
    for result, wanted in ((found, expected[:2]), (pair, expected[:2]), ((single,), expected[:1])):
        for q, exact in zip(result, wanted, strict=False):
            assert q.dtype == dtype
            assert torch.equal(q.view(torch.uint8), exact.view(torch.uint8))
            assert q.is_contiguous()
    bound = x.double().abs().sum(0)
    assert ((found[2].double() - x.double().sum(0)).abs() <= 1e-6 * bound).all()
    assert amaxes.tolist() == [amaxes[0].item()] * 4 + [0.0]
    assert amaxes[0] == x.float().abs().max()


def test_amax_is_kept_raised_and_seen_to_be_bad():
    """In whichever tile the largest is; every tile's but the last row's is padding."""
    for place, value in (((0, 0), 9.0), ((128, 79), -9.0), ((60, 70), math.inf), ((128, 0), -math.nan)):
        x = torch.ones(129, 80)
        x[place] = value
        for before in (0.0, 20.0):
            amaxes = scalar(before), scalar(before)
            fp8.cast_fp8(x, scalar(1.0), amaxes[0], E4M3)
            q, transposed = triton_fp8.cast_transpose_fp8(x, scalar(1.0), amaxes[1], E4M3)
            assert torch.equal(amaxes[0].nan_to_num(-1), amaxes[1].nan_to_num(-1))
            assert torch.equal(q.float().isnan(), x.isnan())
            assert torch.equal(transposed[:, :129].float().isnan(), x.t().isnan())
    amax = scalar(math.nan)
    triton_fp8.cast_fp8(torch.ones(1, 16), scalar(1.0), amax, E4M3)
    assert amax.isnan()


def gelu_inputs(rows: int, columns: int, source: torch.dtype, bias_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Upstream gradient, product and bias, such that the GELU sees both tails."""
    generator = torch.Generator().manual_seed(rows)
    upstream, product = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    bias = torch.randn(columns, generator=generator) * 2 + 1  # not zero past the last row, where products are
    return upstream.to(source), product.to(source), bias.to(bias_dtype)


@pytest.mark.usefixtures("poisoned_memory")
@SOURCES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gelu_cast(shape: tuple[int, int], source: torch.dtype):
    _, product, bias = gelu_inputs(*shape, source, torch.float32)
    amaxes = scalar(0.0), scalar(0.0)
    exact = fp8.bias_gelu_cast_fp8(product.double(), bias.double(), scalar(32.0), amaxes[0])
    found = triton_fp8.bias_gelu_cast_fp8(product, bias, scalar(32.0), amaxes[1])
    nearly_the_same(found, exact, E4M3)
    assert amaxes[1].item() == pytest.approx(amaxes[0].item(), rel=1e-6)


@pytest.mark.usefixtures("poisoned_memory")
@SOURCES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gelu_backward_cast(shape: tuple[int, int], source: torch.dtype):
    upstream, product, bias = gelu_inputs(*shape, source, torch.bfloat16)
    amaxes = scalar(0.0), scalar(0.0)
    exact = fp8.bias_gelu_backward_cast_fp8(
        upstream.double(), product.double(), bias.double(), scalar(512.0), amaxes[0]
    )
    found = triton_fp8.bias_gelu_backward_cast_fp8(upstream, product, bias, scalar(512.0), amaxes[1])
    nearly_the_same(found[:2], exact[:2], E5M2)
    assert found[2].dtype == torch.float32
    torch.testing.assert_close(found[2].double(), exact[2], rtol=1e-5, atol=1e-5)
    assert amaxes[1].item() == pytest.approx(amaxes[0].item(), rel=1e-5)


def nearly_the_same(found: tuple[Tensor, ...], exact: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """One number in 1,000 may be the neighbour, fp32's rounding moving it over a boundary; the transpose has the same."""
    (q, transposed), (wanted, wanted_transposed) = found, exact
    assert q.dtype == transposed.dtype == dtype
    assert transposed.shape == wanted_transposed.shape
    codes = torch.stack([bits(result).int() for result in (q, wanted)])
    steps = torch.where(codes >= 128, 128 - codes, codes).diff(dim=0).abs()
    assert steps.max() <= 1
    assert steps.sum() <= 1 + 0.001 * q.numel()
    assert torch.equal(transposed[:, : len(q)].float(), q.float().t())
    assert not transposed[:, len(q) :].float().any()


def test_rows_without_upstream_add_nothing():
    """Slots past the real tokens hold anything finite."""
    upstream, product, bias = gelu_inputs(70, 32, torch.float32, torch.float32)
    padding = torch.full((30, 32), 1e4)
    amaxes = scalar(0.0), scalar(0.0)
    real = triton_fp8.bias_gelu_backward_cast_fp8(upstream, product, bias, scalar(64.0), amaxes[0])
    more = torch.cat([upstream, padding * 0]), torch.cat([product, padding])
    found = triton_fp8.bias_gelu_backward_cast_fp8(*more, bias, scalar(64.0), amaxes[1])
    assert torch.equal(found[0][:70].float(), real[0].float())
    assert not found[0][70:].float().any()
    assert torch.equal(found[2], real[2])
    assert amaxes[0] == amaxes[1]


def test_strided_inputs():
    x = torch.randn(48, 20).t()
    expanded = torch.randn(48).expand(20, 48)
    for strided in (x, expanded):
        found = triton_fp8.cast_transpose_fp8(strided, scalar(1.0), scalar(0.0), E4M3)
        expected = fp8.cast_transpose_fp8(strided, scalar(1.0), scalar(0.0), E4M3)
        for q, wanted in zip(found, expected, strict=True):
            assert torch.equal(q.view(torch.uint8), wanted.view(torch.uint8))


def test_no_rows():
    amax = scalar(2.0)
    q, transposed, total = triton_fp8.cast_transpose_sum_fp8(torch.zeros(0, 32), scalar(1.0), amax, E5M2)
    assert (q.shape, transposed.shape, padded(0)) == ((0, 32), (32, 0), 0)
    assert not total.any()
    assert amax == 2


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("cast_fp8", ["x"]),
        ("cast_transpose_fp8", ["x"]),
        ("cast_transpose_sum_fp8", ["x"]),
        ("bias_gelu_cast_fp8", ["x", "bias"]),
        ("bias_gelu_backward_cast_fp8", ["x", "x", "bias"]),
    ],
)
def test_opcheck(op: str, inputs: list[str]):
    made = {"x": torch.randn(5, 16, dtype=torch.bfloat16), "bias": torch.randn(16)}
    dtype = (E5M2,) if op.startswith("cast") else ()
    arguments = (*(made[name] for name in inputs), scalar(2.0), torch.zeros(3)[1], *dtype)
    torch.library.opcheck(getattr(triton_fp8, op), arguments)


def test_reasons(monkeypatch: pytest.MonkeyPatch):
    x, one = torch.zeros(2, 16), scalar(1.0)
    assert triton_fp8.unsupported_reasons(x, one, one, E4M3) == []
    assert "float64" in triton_fp8.unsupported_reasons(x, x[0].double(), one, one)[0]
    assert "multiple of 16" in triton_fp8.unsupported_reasons(x[:, :8], one, one, E4M3)[0]
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    assert "CUDA" in triton_fp8.unsupported_reasons(x, one, one, E4M3)[0]


def compare(device: str, shapes: list[tuple[int, int]]) -> None:
    """All ops against the definitions, where they are compiled and where they are interpreted."""
    for shape in shapes:
        for source, dtype in ((torch.bfloat16, E4M3), (torch.bfloat16, E5M2), (torch.float32, E4M3)):
            x = inputs(*shape, source).to(device)
            x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
            amaxes = torch.zeros(3, device=device)
            scale = torch.tensor(4.0, device=device)
            expected = fp8.cast_transpose_sum_fp8(x, scale, amaxes[0], dtype)
            found = triton_fp8.cast_transpose_sum_fp8(x, scale, amaxes[1], dtype)
            single = triton_fp8.cast_fp8(x, scale, amaxes[2], dtype)
            for q, wanted in zip((*found[:2], single), (*expected[:2], expected[0]), strict=True):
                assert torch.equal(bits(q.cpu()), bits(wanted.cpu()))
            torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-2 * shape[0], equal_nan=True)
            assert amaxes.isnan().all()
        leaves = [leaf.to(device) for leaf in gelu_inputs(*shape, torch.bfloat16, torch.float32)]
        exact, scale, amax = [leaf.double() for leaf in leaves], torch.tensor(512.0, device=device), amaxes.zero_()
        wanted = fp8.bias_gelu_backward_cast_fp8(exact[0], exact[1], exact[2], scale, amax[0])
        found = triton_fp8.bias_gelu_backward_cast_fp8(leaves[0], leaves[1], leaves[2], scale, amax[1])
        nearly_the_same((found[0].cpu(), found[1].cpu()), (wanted[0].cpu(), wanted[1].cpu()), E5M2)
        torch.testing.assert_close(found[2].double(), wanted[2], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(amax[1], amax[0])
        amax.zero_()
        forward = fp8.bias_gelu_cast_fp8(exact[1], exact[2], scale / 16, amax[0])
        found = triton_fp8.bias_gelu_cast_fp8(leaves[1], leaves[2], scale / 16, amax[1])
        nearly_the_same((found[0].cpu(), found[1].cpu()), (forward[0].cpu(), forward[1].cpu()), E4M3)
        torch.testing.assert_close(amax[1], amax[0])


def test_all_ops_together():
    compare("cpu", [(129, 80)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu():
    """In a process of its own, because in this one Triton interprets."""
    if reasons := fp8.capability_reasons(torch.device("cuda")):
        pytest.skip(reasons[0])
    program = f"from tests.kernels.triton.test_triton_fp8 import compare; compare('cuda', {[*SHAPES, (24571, 1024)]})"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    repository = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, env=environment, check=False)
    assert done.returncode == 0
