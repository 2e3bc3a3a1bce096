"""Tuning of processes and threads: noise that must not count as a gain, and measured short runs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bert.launch.layout import Layout
from cluster.tune import is_faster, layouts
from tests.conftest import SmallRun


def test_layouts_use_all_cores_then_half_and_divide_the_batch() -> None:
    assert layouts(Layout(2, 1), 32, 2) == [Layout(1, 2), Layout(1, 1)]
    assert layouts(Layout(1, 1), 32, 1) == []
    twelve = [Layout(*each) for each in ((2, 4), (4, 2), (1, 4), (2, 2), (4, 1))]
    assert layouts(Layout(1, 8), 12, 8) == twelve
    assert layouts(Layout(1, 6), 8, 6) == [Layout(*each) for each in ((2, 3), (4, 1), (1, 3), (2, 1))]


@pytest.mark.parametrize(
    ("mean", "least", "most"), [(1.0, 0.0, 0.05), (1.02, 0.0, 0.03), (0.7, 0.9, 1.0), (1.5, 0.0, 0.0)]
)
def test_noise_is_not_taken_for_gain_and_gain_is_found(mean: float, least: float, most: float) -> None:
    generator = np.random.default_rng(5)
    times = generator.lognormal(0.0, 0.05, (1000, 2, 3)) * np.where(generator.random((1000, 2, 3)) < 0.02, 1.5, 1.0)
    taken = [is_faster((mean * one).tolist(), other.tolist()) for one, other in times]
    assert least <= np.mean(taken) <= most
    assert not is_faster([0.1], [1.0]), "once is luck"


@pytest.mark.slow
def test_a_default_that_cannot_run_says_why(small_run: SmallRun, tmp_path: Path, refused: Callable[..., str]) -> None:
    settings = small_run.arguments(tmp_path / "results")[1:]
    assert "data.prefetch is 0" in refused("tune", "tiny_cpu", "--", *settings, "--data.prefetch", "0")
    saving = ("--save-checkpoint", tmp_path / "weights")
    assert "omit" in refused("tune", "tiny_cpu", "--", *settings, *saving)
