"""Sums over many ranks are computed in fp32, so that errors do not grow with the number of ranks."""

import pytest
import torch

from bert.parallel.reduction.gradients import add_contributions


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_contributions_of_4096_ranks_are_added_in_fp32(spread: float) -> None:
    """Add terms of both signs, and equal terms, whose bf16 sum would stop growing after 256 terms."""
    generator = torch.Generator().manual_seed(3)
    contributions_RW = (1 + 3 * spread * torch.randn(4096, 400, generator=generator)).bfloat16()
    whole_W = torch.full((402,), torch.nan)
    add_contributions(contributions_RW, whole_W[1:401])
    exact_W = contributions_RW.double().sum(0)
    assert (whole_W[1:401] - exact_W).norm() < 1e-6 * exact_W.norm()
    assert whole_W[[0, -1]].isnan().all()
