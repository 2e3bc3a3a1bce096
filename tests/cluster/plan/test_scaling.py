"""Time to train against the number of accelerators: the curve and its page."""

import re
from itertools import islice
from pathlib import Path

import pytest

from bert.configuration.recipes import RECIPES, tiny_cpu
from cluster.devices import device_named, devices
from cluster.plan.scaling import CAUSES, LARGEST, ScalingPoint, fastest_published, scale, write_page
from cluster.published.prediction import minutes_in_digits

DEVICE = device_named("A100-SXM-80GB")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def points() -> list[ScalingPoint]:
    """Points of a scaling curve. There are few of them, because a node has 4,096 accelerators."""
    return list(scale(RECIPES["dgxa100_8x8"](), DEVICE, 4096))


def test_the_curve_falls_and_its_time_goes_to_causes_that_add_up(points: list[ScalingPoint]) -> None:
    assert [point.accelerators for point in points] == [4096, 8192, LARGEST]
    minutes = [point.minutes for point in points]
    assert minutes == sorted(minutes, reverse=True)
    assert points[0].efficiency == pytest.approx(1)
    assert points[-1].efficiency < 0.5 < points[0].efficiency
    for point in points:
        assert sum(point.share(cause) for cause in CAUSES) == pytest.approx(1)
        assert point.low < point.minutes < point.high
    assert points[-1].share("launches and small kernels") > points[0].share("launches and small kernels")


def test_what_has_no_curve_is_refused() -> None:
    for recipe, per_node, said in ((RECIPES["dgxa100_8x8"](), LARGEST + 1, "is 16,385"), (tiny_cpu(), 8, "tiny_cpu")):
        with pytest.raises(ValueError, match=said):
            list(islice(scale(recipe, DEVICE, per_node), 1))


def test_published_results_are_the_fastest_of_their_size() -> None:
    found = {result.run.machine.accelerators: result.seconds / 60 for result in fastest_published(DEVICE)}
    assert found[8] == pytest.approx(15.4, abs=0.1)
    assert list(found) == sorted(found)


def test_the_page_has_every_point_and_loads_nothing(points: list[ScalingPoint], tmp_path: Path) -> None:
    write_page("dgxa100_8x8", DEVICE, points, tmp_path / "scale.html")
    page = (tmp_path / "scale.html").read_text()
    for point in points:
        batch = f"{point.plan.strategy.global_batch_size:,}"
        assert f'<th scope="row">{point.accelerators:,}</th><td>{batch}</td>' in page
    for device in devices():
        for result in fastest_published(device):
            row = f'<th scope="row">{device.name}</th><td>{result.run.machine.accelerators:,}</td>'
            assert row + f"<td>{minutes_in_digits(result.seconds / 60)}</td>" in page
    assert page.count('class="chart"') > 10
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|<script|src=", page.replace("default-src", ""))
