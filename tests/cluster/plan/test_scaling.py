"""Time to train against the number of accelerators: the curve and its page."""

import math
import re
from itertools import islice
from pathlib import Path

import pytest

from bert.configuration.recipes import RECIPES, tiny_cpu
from cluster.devices import device_named, devices
from cluster.plan import scaling
from cluster.plan.scaling import LARGEST, ScalingPoint, fastest_published, scale
from cluster.plan.search import Found
from cluster.published.calibration import calibration
from cluster.published.prediction import minutes_in_digits
from tests.cluster.conftest import Command

DEVICE = device_named("A100-SXM-80GB")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def curve() -> tuple[list[ScalingPoint], list[Found]]:
    """Return the points of a scaling curve and their searches. Nodes have 4,096 accelerators to keep the points few."""
    found: list[Found] = []
    with pytest.MonkeyPatch.context() as patch:
        search = scaling.search
        patch.setattr(scaling, "search", lambda *arguments: found.append(search(*arguments)) or found[-1])
        return list(scale(RECIPES["dgxa100_8x8"](), DEVICE, 4096)), found


def test_time_falls_with_scale_and_the_shares_of_its_causes_add_up(
    curve: tuple[list[ScalingPoint], list[Found]],
) -> None:
    points, found = curve
    assert [point.accelerators for point in points] == [4096, 8192, LARGEST]
    minutes = [point.minutes for point in points]
    assert minutes == [min(each.seconds for each in every.ranked) / 60 for every in found]
    assert minutes == sorted(minutes, reverse=True)
    rates = [point.plan.run.samples / point.plan.seconds / point.accelerators for point in points]
    assert [point.efficiency for point in points] == pytest.approx([rate / rates[0] for rate in rates])
    assert points[-1].efficiency < 0.5
    for point in points:
        assert sum(point.shares.values()) == pytest.approx(1)
        assert 0.8 < point.low / point.minutes < 1 < point.high / point.minutes < 1.6
        assert point.seconds["update"] == point.plan.run.parts["update"]
    share = points[0].shares["launches and small kernels"]
    assert share * points[0].plan.seconds > points[0].plan.run.steps * math.exp(calibration().parameters["launch"])
    assert points[-1].shares["launches and small kernels"] > share


def test_too_large_nodes_and_open_recipes_are_refused() -> None:
    for recipe, per_node, said in ((RECIPES["dgxa100_8x8"](), LARGEST + 1, "is 16,385"), (tiny_cpu(), 8, "tiny_cpu")):
        with pytest.raises(ValueError, match=said):
            list(islice(scale(recipe, DEVICE, per_node), 1))


def test_scale_prints_every_point_and_writes_a_self_contained_page(
    curve: tuple[list[ScalingPoint], list[Found]], tmp_path: Path, cluster: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    points, _ = curve
    monkeypatch.setattr(scaling, "scale", lambda *_: iter(points))
    done = cluster("scale", "dgxa100_8x8", "--out", tmp_path / "scale.html")
    title, *rows, last = done.stdout.splitlines()
    assert (title.split()[:3], last) == ([DEVICE.name, "batch", "precision"], str(tmp_path / "scale.html"))
    page = (tmp_path / "scale.html").read_text()
    for point, row in zip(points, rows, strict=True):
        batch = f"{point.plan.strategy.global_batch_size:,}"
        assert row.split()[:2] == [f"{point.accelerators:,}", batch]
        assert float(row.split()[4]) == pytest.approx(point.minutes, rel=0.005)
        assert f'<th scope="row">{point.accelerators:,}</th><td>{batch}</td>' in page
    for device in devices():
        every = fastest_published(device)
        assert [each.run.machine.accelerators for each in every] == sorted({e.run.machine.accelerators for e in every})
        for result in every:
            row = f'<th scope="row">{device.name}</th><td>{result.run.machine.accelerators:,}</td>'
            assert row + f"<td>{minutes_in_digits(result.seconds / 60)}</td>" in page
    assert {each.run.machine.accelerators: each.seconds for each in fastest_published(DEVICE)}[8] < 60 * 15.5
    assert page.count('class="chart"') > 10
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|<script|src=", page.replace("default-src", ""))
