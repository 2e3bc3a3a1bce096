"""The loss curve of a fixed small run does not change."""

import json

import pytest

from tests.convergence.golden import FILE, STEPS, losses


def test_the_loss_curve_matches_the_golden_one() -> None:
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    curve = losses()
    assert len(golden) == len(curve) == STEPS
    for step, (expected, found) in enumerate(zip(golden, curve, strict=True)):
        assert found == pytest.approx(expected, rel=1e-4), step
    assert curve[-1]["masked_lm_loss"] < 0.7 * curve[0]["masked_lm_loss"], "the run learns"
