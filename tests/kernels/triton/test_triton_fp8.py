# pyright: reportArgumentType=false, reportCallIssue=false
"""Triton's FP8 casts under the interpreter, against the definitions, bit for bit where no GELU is computed."""

import math
import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.reference import fp8
from kernels.reference.fp8 import E4M3, E5M2
from kernels.triton import fp8 as triton_fp8

# Rows around the padding and the tile; columns less than a tile, not a whole number of them, and many.
SHAPES = [(1, 16), (15, 48), (16, 16), (17, 320), (128, 64), (129, 80), (255, 48), (300, 16)]
TYPES = [(torch.bfloat16, E4M3), (torch.float32, E5M2), (torch.float16, E4M3), (torch.bfloat16, E5M2)]
CASES = [*zip(SHAPES, cycle(TYPES), strict=False), ((129, 80), (torch.float32, E4M3))]


def scalar(value: float) -> Tensor:
    return torch.tensor(value)


def bits(q: Tensor) -> Tensor:
    """The codes, all NaNs being one."""
    return torch.where(q.float().isnan(), 127, q.view(torch.uint8)).cpu()


def inputs(rows: int, columns: int, source: torch.dtype) -> Tensor:
    """Numbers from far below FP8's smallest to beyond its largest."""
    generator = torch.Generator().manual_seed(rows * columns)
    magnitude = torch.randn(rows, columns, generator=generator) * 4
    x = torch.randn(rows, columns, generator=generator) * magnitude.exp()
    return x.clamp(-60000, 60000).to(source)  # fp16 has nothing larger


def check_casts(x: Tensor, dtype: torch.dtype) -> None:
    """All casts of what is on a CPU, interpreted, or on a GPU, compiled."""
    scale, amaxes = torch.tensor(4.0, device=x.device), torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.0], device=x.device)
    q, transposed, total = fp8.cast_transpose_sum_fp8(x, scale, amaxes[0], dtype)
    found = triton_fp8.cast_transpose_sum_fp8(x, scale, amaxes[1], dtype)
    pair = triton_fp8.cast_transpose_fp8(x, scale, amaxes[2], dtype)
    single = triton_fp8.cast_fp8(x, scale, amaxes[3], dtype)
    kept = [torch.full(each.shape, 0xFF, dtype=torch.uint8, device=x.device).view(dtype) for each in (q, transposed)]
    triton_fp8.cast_transpose_into_fp8(x, scale, amaxes[4], *kept)
    for result, exact in (
        *((each[0], q) for each in (found, pair, kept, (single,))),
        *((each[1], transposed) for each in (found, pair, kept)),
    ):
        assert result.dtype == dtype
        assert result.is_contiguous()
        assert torch.equal(bits(result), bits(exact))
    finite = x.isfinite().all(0)
    error = (found[2].double() - x.double().sum(0)).abs()
    assert (error <= (1e-5 if x.is_cuda else 1e-6) * x.double().abs().sum(0))[finite].all()
    assert total[~finite].isfinite().equal(found[2][~finite].isfinite())
    largest = amaxes[0].expand(5)
    torch.testing.assert_close(
        amaxes, torch.cat([largest, torch.zeros_like(scale)[None]]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(("shape", "types"), CASES, ids=str)
def test_casts(shape: tuple[int, int], types: tuple[torch.dtype, torch.dtype]):
    check_casts(inputs(*shape, types[0]), types[1])


def check_gelu(shape: tuple[int, int], source: torch.dtype, bias_dtype: torch.dtype, device: str = "cpu") -> None:
    """The GELU sees both tails, and its bias is not zero past the last row, where products are."""
    generator = torch.Generator().manual_seed(shape[0])
    upstream, product = (torch.randn(shape, generator=generator).to(device, source) for _ in range(2))
    bias = (torch.randn(shape[1], generator=generator) * 2 + 1).to(device, bias_dtype)
    amaxes, scale = torch.zeros(4, device=device), torch.tensor(32.0, device=device)
    exact = fp8.bias_gelu_cast_fp8(product.double(), bias.double(), scale, amaxes[0])
    nearly_the_same(triton_fp8.bias_gelu_cast_fp8(product, bias, scale, amaxes[1]), exact, E4M3)
    leaves = upstream, product, bias
    *exact, exact_sum = fp8.bias_gelu_backward_cast_fp8(*(x.double() for x in leaves), 16 * scale, amaxes[2])
    *found, found_sum = triton_fp8.bias_gelu_backward_cast_fp8(*leaves, 16 * scale, amaxes[3])
    nearly_the_same(found, exact, E5M2)
    assert found_sum.dtype == torch.float32
    torch.testing.assert_close(found_sum.double(), exact_sum, rtol=1e-5, atol=1e-5 if device == "cpu" else 1e-4)
    torch.testing.assert_close(amaxes[1::2], amaxes[::2], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("shape", "types"), CASES, ids=str)
def test_gelu(shape: tuple[int, int], types: tuple[torch.dtype, torch.dtype]):
    check_gelu(shape, types[0], torch.float32 if types[1] == E4M3 else torch.bfloat16)


def nearly_the_same(
    found: list[Tensor] | tuple[Tensor, ...], exact: list[Tensor] | tuple[Tensor, ...], dtype: torch.dtype
) -> None:
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


@pytest.mark.parametrize(
    ("place", "value"), [((0, 0), 9.0), ((128, 79), -9.0), ((60, 70), math.inf), ((128, 0), -math.nan)]
)
def test_amax_is_kept_raised_and_seen_to_be_bad(place: tuple[int, int], value: float):
    """In whichever tile the largest is; every tile's but the last row's is padding."""
    x = torch.ones(129, 80)
    x[place] = value
    check_casts(x, E4M3)


@pytest.mark.parametrize("x", [torch.randn(48, 20).t(), torch.randn(48).expand(20, 48)], ids=["turned", "expanded"])
def test_strided_inputs(x: Tensor):
    check_casts(x, E4M3)


def test_no_rows():
    amax = scalar(2.0)
    q, transposed, total = triton_fp8.cast_transpose_sum_fp8(torch.zeros(0, 32), scalar(1.0), amax, E5M2)
    assert (q.shape, transposed.shape, total.any().item(), amax.item()) == ((0, 32), (32, 0), False, 2)


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("cast_fp8", ["x"]),
        ("cast_transpose_fp8", ["x"]),
        ("cast_transpose_into_fp8", ["x"]),
        ("cast_transpose_sum_fp8", ["x"]),
        ("bias_gelu_cast_fp8", ["x", "bias"]),
        ("bias_gelu_backward_cast_fp8", ["x", "x", "bias"]),
    ],
)
def test_opcheck(op: str, inputs: list[str]):
    made = {"x": torch.randn(5, 16, dtype=torch.bfloat16), "bias": torch.randn(16)}
    others: tuple[object, ...] = (E5M2,) if op.startswith("cast") else ()
    checks = ["test_faketensor", "test_schema"]
    if "into" in op:
        others = torch.zeros(5, 16, dtype=E5M2), torch.zeros(16, 16, dtype=E5M2)
        checks.pop()  # it compares what is given, for which PyTorch has no FP8
    arguments = (*(made[name] for name in inputs), scalar(2.0), torch.zeros(3)[1], *others)
    torch.library.opcheck(getattr(triton_fp8, op), arguments, test_utils=checks)


def compare(device: str) -> None:
    """Compare all ops with the definitions, at BERT-Large's size too."""
    for shape in (*SHAPES, (24571, 1024)):
        for source, dtype in TYPES:
            x = inputs(*shape, source).to(device)
            check_casts(x, dtype)
            x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
            check_casts(x, dtype)
        check_gelu(shape, torch.bfloat16, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu():
    """In a process of its own, because in this one Triton interprets."""
    if reasons := fp8.capability_reasons(torch.device("cuda")):
        pytest.skip(reasons[0])
    program = "from tests.kernels.triton.test_triton_fp8 import compare; compare('cuda')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    repository = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, env=environment, check=False)
    assert done.returncode == 0
