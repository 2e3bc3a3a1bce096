# pyright: reportArgumentType=false, reportCallIssue=false
"""LAMB compared with NumPy in float64, the division of a model into segments, and the learning rate."""

import importlib.util
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bert.checkpoints.initial_model import initialize_
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters, Lamb, learning_rate
from bert.parallel.reduction.gradients import bucket_slices
from kernels import LambHyperparameters, LambSegments, LambState, lamb_directions, lamb_step, sum_of_squares
from kernels.reference.fp8 import E4M3
from kernels.reference.lamb import WeightCast
from tests.conftest import at_most
from tests.kernels.lamb_oracle import HYPERPARAMETERS, NumpyLamb, at

NO_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
EITHER = pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=NO_TRITON)])


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
def test_matches_numpy(parts, zero_weights, gradient_scale, betas, weight_decay, seed):
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
def test_zero_update_and_zero_weight_leave_a_ratio_of_one(implementation: str):
    segments, hyper = LambSegments((3, 3), (True, True)), replace(HYPERPARAMETERS, weight_decay=0.0)
    flat = torch.tensor([0.0, 0, 0, 1, 2, 3])
    with lamb_step.using(implementation):
        lamb_step(flat, torch.zeros(6), LambState.zeros_like(flat), segments, hyper, **at(1, 0.1))
        assert flat.tolist() == [0, 0, 0, 1, 2, 3]
        lamb_step(flat, torch.ones(6), LambState.zeros_like(flat), segments, hyper, **at(1, 0.1))
    assert flat[:3].tolist() == pytest.approx([-0.1] * 3, rel=1e-5)  # the trust ratio is 1


def test_copies_are_of_the_updated_weights_and_nothing_need_be_adapted():
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
def test_a_step_that_is_not_finite_changes_nothing(implementation: str, bad: float, where: int):
    """A skipped step does not affect the next step. Large finite gradients also have an infinite norm."""
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
def test_the_sum_of_squares(implementation: str, size: int, magnitude: float):
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


def test_the_step_count_waits_for_a_step_that_is_taken():
    """Skipped steps do not advance the schedule and the bias corrections either."""
    flats = [FlatParameters.of(small_model()) for _ in range(2)]
    disturbed, plain = (Lamb(flat, OptimizerConfig(0.1, 10, num_warmup_steps=4)) for flat in flats)
    for bad in (False, True, False, True, True, False):
        gradient = torch.randn(flats[0].gradients_P.shape, generator=torch.Generator().manual_seed(7))
        disturbed.flat.gradients_P.copy_(gradient)
        if bad:
            disturbed.flat.gradients_P[5] = torch.nan
        else:
            plain.flat.gradients_P.copy_(gradient)
            plain.step()
        disturbed.step()
        assert not disturbed.flat.gradients_P.any()
        assert torch.equal(flats[0].weights_P, flats[1].weights_P)
    assert disturbed.steps.item() == plain.steps.item() == 3
    assert disturbed.state.skipped.item() == 3
    disturbed.reset()
    assert disturbed.steps.item() == disturbed.state.skipped.item() == 0
    assert not disturbed.state.momentum_P.any()
    assert not disturbed.state.variance_P.any()


def small_model() -> BertForPreTraining:
    model = BertForPreTraining(ModelConfig(2, 8, 2, 16, 30, 12))
    initialize_(model, torch.Generator().manual_seed(0))
    return model


def test_segments_follow_roles():
    """A segment is a parameter or a third of the fused QKV weight. A parameter's last segment includes its padding."""
    model = small_model()
    flat = FlatParameters.of(model)
    sizes = iter(zip(flat.segments.sizes, flat.segments.adapted, strict=True))
    start = 0
    for name, parameter in model.named_parameters():
        assert flat.places[parameter] == slice(start, start + parameter.numel()), name
        excluded = name.endswith("bias") or "norm" in name
        parts = 3 if name.endswith("query_key_value.weight") else 1
        for part in range(parts):
            size, adapted = next(sizes)
            padding = -parameter.numel() % 16 if part == parts - 1 else 0
            assert (size - padding, adapted) == (parameter.numel() // parts, not excluded), name
            start += size
    assert next(sizes, None) is None
    assert start == len(flat.weights_P)


@pytest.mark.parametrize("recipe", ["tiny_cpu", "h100_1x8", "dgxa100_1x8"])
@pytest.mark.parametrize("ranks", [1, 24, 4096])
def test_everything_that_a_kernel_reads_is_aligned(recipe: str, ranks: int):
    """Parameters, gradients, and every rank's shard of each bucket start at multiples of 16 elements."""
    with torch.device("meta"):
        model = BertForPreTraining(RECIPES[recipe]().model)
    flat = FlatParameters.of(model, ranks)
    assert list(flat.places) == list(model.parameters())
    assert all(place.start % 16 == 0 for place in flat.places.values())
    for bucket in bucket_slices(len(flat.weights_N), ranks, RECIPES[recipe]().training.bucket_bytes):
        piece, rest = divmod(bucket.stop - bucket.start, ranks)
        assert (bucket.start % 16, piece % 16, rest) == (0, 0, 0)
    assert 0 <= len(flat.weights_P) - sum(parameter.numel() for parameter in model.parameters()) < 1000


def test_padding_stays_zero_and_has_no_part_in_any_norm():
    """The sizes of this model are not multiples of the alignment, so parameters need padding."""
    model = BertForPreTraining(ModelConfig(2, 6, 2, 10, 31, 7))
    initialize_(model, torch.Generator().manual_seed(0))
    flat = FlatParameters.of(model, 3)
    assert flat.weights_P.data_ptr() % 64 == 0
    padding, exact = torch.ones_like(flat.weights_N, dtype=torch.bool), 0.0
    for parameter, place in flat.places.items():
        padding[place] = False
        assert parameter.grad is not None
        assert parameter.data_ptr() % 16 == parameter.grad.data_ptr() % 16 == 0
        parameter.grad.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        exact += parameter.grad.double().square().sum().item()
    assert Lamb(flat, OptimizerConfig(0.1, 10)).step().item() == pytest.approx(exact**0.5, rel=1e-6)
    assert not flat.weights_N[padding].any()
    assert padding.sum() > 20


@pytest.mark.parametrize(
    ("base", "train_steps", "warmup", "start", "expected"),
    [
        # no warm-up: the rate is base * (1 - step / train_steps) from the first step
        (4.25e-4, 6700, 0, 0, {0: 4.25e-4, 3350: 2.125e-4, 6700: 0.0, 7000: 0.0}),
        # as submitted on 64 GPUs: warm-up steps -25 to 74, then decay by the absolute step, so the rate jumps
        (1.5e-3, 1271, 100, -25, {0: 3.75e-4, 74: 1.485e-3, 75: 1.5e-3 * (1 - 75 / 1271)}),
        # "flat" schedule: nearly the base rate for 330 steps, then a drop to 0.529 of the base rate
        (2.58e-3, 700, 200330, -200000, {0: 2.58e-3 * 200000 / 200330, 330: 2.58e-3 * (1 - 330 / 700)}),
        # 0.95 to 1.0 of the base rate over 500 steps, then a drop to 0.51 of it
        (2e-3, 1024, 10000, -9500, {0: 1.9e-3, 499: 2e-3 * 0.9999, 500: 2e-3 * (1 - 500 / 1024)}),
        (1e-3, 100, 10, 0, {0: 0.0, 5: 5e-4, 9: 9e-4, 10: 9e-4, 99: 1e-5}),
    ],
)
def test_learning_rate(base: float, train_steps: int, warmup: int, start: int, expected: dict[int, float]):
    config = OptimizerConfig(base, train_steps, num_warmup_steps=warmup, start_warmup_step=start)
    rates = learning_rate(config, torch.arange(8000))
    assert rates.dtype == torch.float64
    assert {step: rates[step].item() for step in expected} == pytest.approx(expected, rel=1e-12, abs=1e-18)
    assert not rates[train_steps:].any(), "past the end of the schedule"
    assert learning_rate(config, torch.tensor(50)) == rates[50]
