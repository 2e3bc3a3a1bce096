"""Outlier detection reports almost nothing in noise of any distribution, and reports parts that are slow."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats

from cluster.outliers import judge

Noise = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
NOISES: dict[str, Noise] = {
    "bell-shaped": lambda rng, shape: rng.normal(0, 0.05, shape),
    "heavy-tailed": lambda rng, shape: 0.03 * rng.standard_t(2, shape),
    "one-sided": lambda rng, shape: rng.exponential(0.1, shape),
    "bursts": lambda rng, shape: rng.normal(0, 0.02, shape) + (rng.random(shape) < 0.15) * rng.exponential(1, shape),
    "bursts that hit all": lambda rng, shape: rng.normal(0, 0.03, shape) + rng.exponential(1, (shape[0], 1)),
}
TURNS = 10
"""Number of measurements of each part. The probe has as many after a second measurement."""


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("parts", [4, 8, 64])
def test_noise_of_any_distribution_rarely_gives_an_outlier(noise: Noise, parts: int) -> None:
    rng = np.random.default_rng(parts)
    named = sum(judge(noise(rng, (TURNS, parts)), 4 * parts).is_outlier.any() for _ in range(100))
    assert named <= 1


@pytest.mark.parametrize("parts", [3, 5, 11])
@pytest.mark.parametrize("fitted", [1, 3])
@pytest.mark.parametrize("noise", [0.001, 0.05, 0.4])
def test_deviations_and_limits_are_those_of_the_formula(parts: int, fitted: int, noise: float) -> None:
    """A part's times are its excess plus noise of alternating sign, so that medians over turns and parts are known."""
    excess = np.arange(parts) / 10 - (parts // 2) / 10
    signs = np.array([[1.0], [1.0], [-1.0], [-1.0]])
    noises = np.where(excess == 0, 0.0, noise)
    noises[-1] *= 2
    times = excess + signs * noises * np.sign(excess) / 4
    free = max(1, parts - fitted)
    residual = math.sqrt((parts - 1) / free)
    repeated = 1.4826 * 1.2533 * residual * 4 / 2.6 * np.maximum(noises / 4, noise / 4) / 2
    between = 1.4826 * {3: 1.495, 5: 1.206, 11: 11 / 10.2}[parts] * np.median(np.abs(excess)) * residual
    scale = np.maximum(repeated, between)
    found = judge(times, 1, fitted=fitted)
    np.testing.assert_allclose(found.ratios, np.exp(excess))
    np.testing.assert_allclose(found.deviations, excess / scale, atol=1e-12)
    beyond = np.maximum(0.0, between**2 - repeated**2)
    freedom = scale**4 / (repeated**4 / max(1.0, 0.37 * free * 3) + beyond**2 / free)
    chance = scipy.stats.t.sf(excess[-1] / scale[-1], np.maximum(1.0, freedom[-1]))
    for comparisons, factor in ((1, 0.999), (1, 1.001), (4, 0.999), (4, 1.001)):
        judgement = judge(times, comparisons, float(factor / chance / comparisons), fitted)  # type: ignore[arg-type]
        assert judgement.is_outlier[-1] == (factor < 1), (comparisons, factor)


def test_small_excesses_and_pairs_of_parts_give_no_outlier() -> None:
    """All parts but the first have equal times, so the first part's deviation would be infinite without clipping."""
    for parts, excess in itertools.product((1, 2, 3, 8), (0.0009, 0.0011, -0.5)):
        times = np.zeros((3, parts))
        times[:, 0] = excess
        judgement = judge(times, 1)
        assert judgement.is_outlier.tolist() == [parts > 2 and excess == 0.0011, *[False] * (parts - 1)]
        if parts > 2:
            assert judgement.deviations.tolist() == [math.copysign(1e6, excess), *[0] * (parts - 1)]
