"""The seconds of a probe, by kind of measuring."""

import pytest

from cluster.probe.command import SHARES


def test_kinds_of_measuring_share_the_seconds_that_are_asked_for() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)
