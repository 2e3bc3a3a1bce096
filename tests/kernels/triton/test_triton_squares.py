"""The sum of squares in Triton, under its interpreter, against float64."""

import pytest
import torch

from kernels.triton import squares as triton_squares
from kernels.triton.squares import BLOCK, sum_of_squares


def exact(vector: torch.Tensor) -> float:
    return vector.double().square().sum().item()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 4097])
def test_any_length(size: int) -> None:
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    found = sum_of_squares(vector)
    assert found.dtype == torch.float64
    assert found.shape == ()
    assert found.item() == pytest.approx(exact(vector), rel=1e-12)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_squares_outside_of_fp32(magnitude: float) -> None:
    vector = magnitude * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert sum_of_squares(vector).item() == pytest.approx(exact(vector), rel=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad: float) -> None:
    vector = torch.ones(2 * BLOCK)
    vector[BLOCK + 3] = bad
    assert not sum_of_squares(vector).isfinite()


def test_is_a_proper_operator() -> None:
    torch.library.opcheck(triton_squares._partial_sums, (torch.rand(BLOCK + 5),))


def test_says_what_it_cannot_do() -> None:
    reasons = triton_squares.unsupported_reasons
    assert reasons(torch.zeros(5)) == []
    assert "float32" in reasons(torch.zeros(5).double())[0]
    assert "contiguous" in reasons(torch.zeros(10)[::2])[0]
