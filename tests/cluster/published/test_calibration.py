"""The shipped calibration equals the command's output, and the model predicts held-out results accurately."""

import hashlib
import statistics
from dataclasses import replace

import pytest

from cluster.published.calibration import GROUPS, INTERVAL, Calibration, Held, calibrate, calibration, fit, prior_of
from cluster.published.cost_model import run_time
from cluster.published.results import TABLE, results_of_devices

pytestmark = pytest.mark.slow

BOUNDS = {"submitter": 0.045, "round": 0.05, "scale": 0.05, "accelerator": 0.08}
"""Largest accepted median error on held-out results."""


@pytest.fixture(scope="module")
def made() -> tuple[Calibration, dict[str, list[Held]]]:
    return calibrate()


def test_a_new_fit_equals_the_shipped_calibration(made: tuple[Calibration, object]) -> None:
    shipped, again = calibration(), made[0]
    assert set(again.parameters) == set(shipped.parameters)
    for name, value in again.parameters.items():
        assert value == pytest.approx(shipped.parameters[name], abs=0.1 * prior_of(name).deviation), name
    for result in results_of_devices():
        before, now = (run_time(each.parameters, result.run).total for each in (shipped, again))
        assert now == pytest.approx(before, rel=0.005)
        assert again.interval(result.run) == pytest.approx(shipped.interval(result.run), rel=0.02)
    assert again.models == shipped.models
    assert shipped.source == hashlib.sha256(TABLE.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", GROUPS)
def test_held_out_results_are_near_their_predictions_and_in_their_intervals(
    name: str, made: tuple[Calibration, dict[str, list[Held]]]
) -> None:
    held = made[1][name]
    assert len(held) == len(results_of_devices())
    assert not any(each.model_seen for each in made[1]["accelerator"])
    assert not any(each.scale_seen for each in made[1]["scale"])
    assert statistics.median(abs(each.deviation) for each in held) <= BOUNDS[name]
    assert INTERVAL - 0.05 <= statistics.mean(each.is_inside(made[0]) for each in held) <= INTERVAL + 0.08


def test_one_outlier_changes_predictions_by_at_most_a_tenth() -> None:
    spoiled = list(results_of_devices())
    worst = next(i for i, result in enumerate(spoiled) if result.run.machine.device.name == "H100-SXM-80GB")
    spoiled[worst] = replace(spoiled[worst], seconds=10 * spoiled[worst].seconds)
    parameters, _ = fit(spoiled, calibration().parameters)
    for result in results_of_devices():
        before, after = (run_time(each, result.run).total for each in (calibration().parameters, parameters))
        assert after == pytest.approx(before, rel=0.1)
