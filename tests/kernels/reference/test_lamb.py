# pyright: reportArgumentType=false, reportCallIssue=false
"""LAMB compared with NumPy in float64, with gradients that are not finite, and its copies of the weights."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import LambHyperparameters, LambSegments, LambState, lamb_directions, lamb_step, sum_of_squares
from kernels.reference.fp8 import E4M3
from kernels.reference.lamb import WeightCast
from tests.conftest import at_most
from tests.kernels.accuracy import EITHER
from tests.kernels.lamb_oracle import HYPERPARAMETERS, NumpyLamb, at


@pytest.mark.oldest_torch
@at_most(25)
@given(
    parts=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=8),
    zero_weights=st.integers(0, 7),
    gradient_scale=st.sampled_from([1e-4, 1.0, 1e4]),
    betas=st.sampled_from([(0.0, 0.999), (0.60466, 0.85437), (0.9, 0.0), (0.9, 0.999)]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.1]),
    seed=st.integers(0, 2**31),
)
def test_lamb_agrees_with_numpy(parts, zero_weights, gradient_scale, betas, weight_decay, seed):
    """Drawn inputs include weights that start at zero, and gradients above and below the clipping limit."""
    segments = LambSegments(tuple(size for size, _ in parts), tuple(adapted for _, adapted in parts))
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(sum(segments.sizes), generator=generator, dtype=torch.float64)
    segments.views(flat)[zero_weights % len(parts)].zero_()
    gradients = [gradient_scale * torch.randn(flat.shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    hyper = LambHyperparameters(*betas, 1e-6, weight_decay, 1.0)
    exact, state = NumpyLamb(flat, segments, hyper), LambState.zeros_like(flat)
    for step, gradient in enumerate(gradients, start=1):
        when = {"step": torch.tensor(step), "learning_rate": torch.tensor(0.1 / step, dtype=torch.float64)}
        norm = lamb_step(flat, gradient.clone(), state, segments, hyper, **when)
        assert norm.item() == pytest.approx(exact.step(gradient, 0.1 / step), rel=1e-12)
        np.testing.assert_allclose(flat.numpy(), np.concatenate(exact.weights), rtol=1e-9, atol=1e-12)


@EITHER
def test_the_trust_ratio_is_one_for_a_zero_update_or_zero_weights(implementation: str):
    segments, hyper = LambSegments((3, 3), (True, True)), replace(HYPERPARAMETERS, weight_decay=0.0)
    flat = torch.tensor([0.0, 0, 0, 1, 2, 3])
    with lamb_step.using(implementation):
        lamb_step(flat, torch.zeros(6), LambState.zeros_like(flat), segments, hyper, **at(1, 0.1))
        assert flat.tolist() == [0, 0, 0, 1, 2, 3]
        lamb_step(flat, torch.ones(6), LambState.zeros_like(flat), segments, hyper, **at(1, 0.1))
    assert flat[:3].tolist() == pytest.approx([-0.1] * 3, rel=1e-5)  # the step with a trust ratio of 1


def test_copies_and_casts_are_made_of_the_updated_weights():
    segments, flat, ones = LambSegments((40, 256, 5), (True, True, False)), torch.linspace(-3, 3, 301), torch.ones(301)
    copies, casts = torch.zeros(301, dtype=torch.bfloat16), torch.zeros(2, 16, 16).to(E4M3)
    cast, state = WeightCast(40, torch.tensor(2.0), torch.tensor(0.0), *casts), LambState.zeros_like(flat)
    new = {"copies_P": copies, "casts": (cast,)}
    norm = lamb_step.definition(flat, ones, state, segments, HYPERPARAMETERS, **at(1, 0.1), **new)
    weight = flat[40:296].view(16, 16)
    assert copies.equal(flat.bfloat16())
    assert cast.amax == weight.abs().max()
    assert casts.float().equal(torch.stack([weight, weight.t()]).mul(2).to(E4M3).float())
    call = flat, ones, state, LambSegments((301,), (False,)), HYPERPARAMETERS
    assert lamb_directions.definition(*call, norm=norm, step=torch.tensor(2)).shape == (2, 0)


@pytest.mark.oldest_torch
@EITHER
@pytest.mark.parametrize(("bad", "where"), [(math.nan, 0), (math.inf, 71), (-math.inf, -1), (3e38, 4200)])
def test_a_step_with_gradients_that_are_not_finite_is_skipped(implementation: str, bad: float, where: int):
    """A skipped step has no effect on the next step. Large finite gradients also have an infinite norm."""
    segments = LambSegments((70, 4126, 40), (True, True, False))
    flat, first, second = torch.randn(3, 4236, generator=torch.Generator().manual_seed(0)).unbind()
    state = LambState.zeros_like(flat)

    def step(flat: torch.Tensor, gradient: torch.Tensor, state: LambState, number: int) -> torch.Tensor:
        used_up = gradient.clone()
        with lamb_step.using(implementation):
            norm = lamb_step(flat, used_up, state, segments, HYPERPARAMETERS, **at(number, 0.1))
        assert not used_up.any()
        return norm

    step(flat, first, state, 1)
    buffers = flat, state.momentum_P, state.variance_P
    undisturbed, *moments = before = [buffer.clone() for buffer in buffers]
    broken = second.clone()
    broken[[where, 5]] = bad
    assert not step(flat, broken, state, 2).isfinite()
    assert all(map(torch.equal, buffers, before))
    assert state.skipped.item() == 1
    step(flat, second, state, 2)
    step(undisturbed, second, LambState(*moments, torch.zeros_like(flat), torch.tensor(0)), 2)
    assert torch.equal(flat, undisturbed)
    assert state.skipped.item() == 1


@EITHER
@pytest.mark.parametrize(
    ("size", "magnitude"), [(0, 1), (1, 1), (8191, 1), (8192, 1e30), (8193, 1e-30), (5 * 8192 + 4097, 1)]
)
def test_sum_of_squares_agrees_with_float64(implementation: str, size: int, magnitude: float):
    vector = magnitude * torch.randn(size, generator=torch.Generator().manual_seed(size))
    with sum_of_squares.using(implementation):
        found = sum_of_squares(vector)
        assert (found.dtype, found.shape) == (torch.float64, ())
        assert found.item() == pytest.approx(vector.double().square().sum().item(), rel=1e-12)
        vector[-1:] = math.nan
        assert not size or not sum_of_squares(vector).isfinite()


@pytest.mark.parametrize("beta_2", [0.85437, 0.999])
def test_the_variance_of_a_constant_gradient_is_its_square(beta_2: float):
    """If beta and 1 - beta were rounded to fp32, the variance would be too large by a factor of 1 + 1.3e-5."""
    flat, gradient = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, -0.2, 0.3])
    state = LambState.zeros_like(flat)
    state.momentum_P.copy_(gradient)
    state.variance_P.copy_(gradient.square())
    hyper = replace(HYPERPARAMETERS, beta_2=beta_2)
    for step in range(1, 401):
        lamb_step(flat, gradient.clone(), state, LambSegments((3,), (True,)), hyper, **at(step, 0.0))
    exact = gradient.double().square()
    assert (state.variance_P / exact - 1).abs().max().item() < 1e-6
    assert (state.momentum_P / gradient - 1).abs().max().item() < 1e-6
