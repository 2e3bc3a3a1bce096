"""LAMB in Triton's interpreter, compared with NumPy in float64 and with plain PyTorch in the same type."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu_parts.accuracy import same_bits
from kernels import LambHyperparameters, LambSegments, LambState, WeightCast, cast_transpose_into_fp8, lamb_step
from kernels.reference.fp8 import E4M3
from kernels.triton import lamb as triton_lamb
from kernels.triton.quantize import fp8_pair
from tests.kernels.lamb_oracle import HYPERPARAMETERS, NumpyLamb, at

CHUNK = triton_lamb.CHUNK
ULP = torch.finfo(torch.float32).eps
LAYOUTS = {
    "one element": LambSegments((1,), (True,)),
    "nothing adapted": LambSegments((5, 3 * CHUNK), (False, False)),
    "chunks filled exactly": LambSegments((CHUNK, 2 * CHUNK), (True, True)),
    "one less, one more": LambSegments((CHUNK - 1, CHUNK + 1, CHUNK), (True, True, False)),
    "starts at every alignment": LambSegments((*range(1, 36), CHUNK), (True, False) * 18),
    "as in BERT": LambSegments((7630, 2 * CHUNK + 130, 512, 64, 64, 1024, 1024, 1024, 192, 2), (False, True) * 5),
}


def error(found: torch.Tensor, exact: np.ndarray) -> float:
    """Return the largest error, relative to the largest value."""
    return float(np.abs(found.double().numpy() - exact).max() / max(np.abs(exact).max(), 1e-30))


def weights_and_gradients(
    segments: LambSegments, steps: int, scale: float = 1.0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return weights and gradients of very different magnitudes, with one segment that starts at zero."""
    generator = torch.Generator().manual_seed(len(segments.sizes))
    flat, *gradients = torch.randn(steps + 1, sum(segments.sizes), generator=generator).unbind()
    flat, gradients = flat.clone(), [scale * gradient for gradient in gradients]
    for number, segment in enumerate(segments.views(flat)):
        segment.mul_(2.0 ** (number % 7 - 3))
    segments.views(flat)[len(segments.sizes) // 2].zero_()
    for gradient in gradients:
        for number, segment in enumerate(segments.views(gradient)):
            segment.mul_(3.0 ** (number % 5 - 2))
    return flat, gradients


@pytest.mark.parametrize(
    ("layout", "scale", "hyper"),
    [
        *((layout, 1.0, HYPERPARAMETERS) for layout in LAYOUTS),
        ("as in BERT", 1e-4, replace(HYPERPARAMETERS, beta_1=0.0, beta_2=0.0, weight_decay=0.1)),
        ("as in BERT", 1e3, replace(HYPERPARAMETERS, beta_1=0.60466, beta_2=0.85437, weight_decay=0.0)),
        ("starts at every alignment", 1e-4, replace(HYPERPARAMETERS, beta_1=0.3, beta_2=0.4)),
    ],
)
def test_triton_lamb_is_as_accurate_as_plain_pytorch(layout: str, scale: float, hyper: LambHyperparameters) -> None:
    """Errors of weights, moments and norm are at most twice PyTorch's errors plus one unit in the last place."""
    segments = LAYOUTS[layout]
    flat, gradients = weights_and_gradients(segments, 3, scale)
    exact = NumpyLamb(flat, segments, hyper)
    plain, found = flat.clone(), flat.clone()
    plain_state, found_state = LambState.zeros_like(flat), LambState.zeros_like(flat)
    for step, gradient in enumerate(gradients, start=1):
        rate = 0.1 / step
        exact_norm = exact.step(gradient, float(torch.tensor(rate)))
        lamb_step.definition(plain, gradient.clone(), plain_state, segments, hyper, **at(step, rate))
        norm = triton_lamb.lamb_step(found, gradient, found_state, segments, hyper, **at(step, rate))
        assert norm.item() == pytest.approx(exact_norm, rel=1e-6)
        assert not gradient.any()
        for name, of_found, of_plain, of_exact in (
            ("weights", found, plain, exact.weights),
            ("momentum", found_state.momentum_P, plain_state.momentum_P, exact.momentum),
            ("variance", found_state.variance_P, plain_state.variance_P, exact.variance),
        ):
            for number, (mine, theirs, truth) in enumerate(
                zip(segments.views(of_found), segments.views(of_plain), of_exact, strict=True)
            ):
                assert error(mine, truth) <= 2 * error(theirs, truth) + ULP, (step, name, number)


def test_a_segment_may_have_more_chunks_than_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment has too many chunks for one round of additions, as BERT-Large's word embeddings do."""
    monkeypatch.setattr(triton_lamb, "REDUCTION", 2)
    test_triton_lamb_is_as_accurate_as_plain_pytorch("as in BERT", 1.0, HYPERPARAMETERS)


def test_a_skipped_first_step_keeps_minus_zero_and_zero_moments() -> None:
    """With zero moments and epsilon 0, the update would be 0 / 0. Adding 0 would turn a weight of -0 into +0."""
    weights = torch.tensor([-0.0, 1.0, 2.0])
    state, segments = LambState.zeros_like(weights), LambSegments((3,), (True,))
    hyper = replace(HYPERPARAMETERS, epsilon=0.0)
    triton_lamb.lamb_step(weights, torch.full((3,), torch.nan), state, segments, hyper, **at(1, 0.1))
    assert weights.tolist() == [0.0, 1.0, 2.0]
    assert weights[0].signbit()
    assert not state.momentum_P.any()
    assert not state.variance_P.any()


def test_results_do_not_depend_on_the_size_of_groups_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and moments are equal bit for bit. A skipped step counts once, not once per group."""
    segments = LAYOUTS["as in BERT"]
    flat, gradients = weights_and_gradients(segments, 2)
    gradients.append(torch.full_like(flat, torch.nan))
    found = []
    for group, dtype in ((1 << 30, torch.float16), (1500, torch.float32), (1, torch.bfloat16)):
        monkeypatch.setattr(triton_lamb, "GROUP", group)
        weights, copies, state = flat.clone(), torch.zeros(len(flat), dtype=dtype), LambState.zeros_like(flat)
        for step, gradient in enumerate(gradients, start=1):
            given = gradient.clone()
            triton_lamb.lamb_step(weights, given, state, segments, HYPERPARAMETERS, **at(step, 0.1), copies_P=copies)
            assert not given.any()
            rtol = 2**-7 if dtype == torch.bfloat16 else 0
            torch.testing.assert_close(copies, weights.to(dtype), rtol=rtol, atol=0)
        found.append((weights, state.momentum_P, state.variance_P))
        assert state.skipped.item() == 1
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("group", [1 << 30, 2100, 1])
def test_casts_in_a_step_equal_separate_casts(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """FP8 casts in a step equal separate casts of the new weights. The last step is skipped, but also casts."""
    monkeypatch.setattr(triton_lamb, "GROUP", group)
    segments = LambSegments((1024, 1024, 1024, 21, 43, 80 * 32), (True,) * 6)
    flat, gradients = weights_and_gradients(segments, 2)
    weights, others = flat.clone(), flat.clone()
    states = LambState.zeros_like(flat), LambState.zeros_like(flat)
    for step, gradient in enumerate([*gradients, torch.full_like(flat, torch.nan)], start=1):
        found, expected = (
            tuple(
                WeightCast(start, torch.tensor(2.0**-step), torch.zeros(()), *fp8_pair(torch.zeros(shape), E4M3))
                for start, shape in ((0, (48, 64)), (3 * 1024 + 64, (80, 32)))
            )
            for _ in range(2)
        )
        numbers = segments, HYPERPARAMETERS
        triton_lamb.lamb_step(weights, gradient.clone(), states[0], *numbers, **at(step, 0.1), casts=found)
        triton_lamb.lamb_step(others, gradient.clone(), states[1], *numbers, **at(step, 0.1))
        assert torch.equal(weights, others)
        for mine, theirs in zip(found, expected, strict=True):
            cast_transpose_into_fp8.definition(
                theirs.weight(others), theirs.scale, theirs.amax, theirs.q_NK, theirs.q_KN
            )
            assert mine.amax == theirs.amax > 0
            assert same_bits(mine.q_NK, theirs.q_NK)
            assert same_bits(mine.q_KN, theirs.q_KN)


@pytest.mark.parametrize("step", [lamb_step.definition, triton_lamb.lamb_step], ids=["definition", "triton"])
def test_an_overwritten_gradient_is_not_cleared(step: Callable[..., torch.Tensor]) -> None:
    sizes, adapted, overwritten = (CHUNK + 5, 70, 16), (True, False, True), (True, False, False)
    flat, gradient = torch.randn(2, sum(sizes), generator=torch.Generator().manual_seed(0)).unbind()
    stepped = []
    for segments in (LambSegments(sizes, adapted), LambSegments(sizes, adapted, overwritten)):
        weights, given = flat.clone(), gradient.clone()
        step(weights, given, LambState.zeros_like(flat), segments, HYPERPARAMETERS, **at(1, 0.1))
        stepped.append(weights)
        left = [bool(view.any()) for view in segments.views(given)]
        assert left == list(segments.overwritten or (False,) * 3)
    assert torch.equal(*stepped)
