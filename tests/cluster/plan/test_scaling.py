"""Time to train against the number of accelerators: the curve, its table, its page."""

import csv
import re
from pathlib import Path

import pytest

from bert.configuration.recipes import RECIPES, tiny_cpu
from cluster.devices import device_named
from cluster.plan.scaling import CAUSES, LARGEST, ScalingPoint, published_on, scale, write_table
from cluster.plan.scaling_page import render

DEVICE = device_named("A100-SXM-80GB")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def points() -> list[ScalingPoint]:
    """Points of 4,096 accelerators a node, so that there are few from few nodes to the largest number."""
    reported: list[ScalingPoint] = []
    found = scale(RECIPES["dgxa100_8x8"](), DEVICE, 4096, report=reported.append)
    assert reported == found, "each as soon as it is planned"
    return found


def test_the_curve_falls_and_its_time_goes_to_causes_that_add_up(points: list[ScalingPoint]) -> None:
    assert [point.accelerators for point in points] == [4096, 8192, 16384]
    assert points[-1].accelerators == LARGEST
    minutes = [point.minutes for point in points]
    assert minutes == sorted(minutes, reverse=True)
    assert points[0].efficiency == pytest.approx(1)
    assert points[-1].efficiency < 0.5 < points[0].efficiency
    for point in points:
        assert sum(point.share(cause) for cause in CAUSES) == pytest.approx(1)
        assert point.low < point.minutes < point.high
    assert points[-1].share("launches and small kernels") > points[0].share("launches and small kernels")


def test_the_table_has_what_the_curve_has(points: list[ScalingPoint], tmp_path: Path) -> None:
    write_table(points, tmp_path / "scale.csv")
    with (tmp_path / "scale.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["accelerators"]) for row in rows] == [point.accelerators for point in points]
    for row, point in zip(rows, points, strict=True):
        for name in ("reduction", "tensor", "pipeline"):
            assert row[name] == str(getattr(point.plan.strategy, name))
        assert float(row["minutes"]) == pytest.approx(point.minutes, rel=1e-5)
        assert float(row["low_minutes"]) < float(row["minutes"]) < float(row["high_minutes"])
        parts = [float(value) for name, value in row.items() if name.endswith("_minutes")][2:]
        assert sum(parts) == pytest.approx(point.minutes, rel=1e-4)


def test_what_has_no_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="GPUs per node: 16,385, expected 1 to 16,384"):
        scale(RECIPES["dgxa100_8x8"](), DEVICE, LARGEST + 1)
    with pytest.raises(ValueError, match="tiny_cpu is not the benchmark"):
        scale(tiny_cpu(), DEVICE, 8)


def test_the_page_holds_every_point_and_loads_nothing(points: list[ScalingPoint]) -> None:
    published = published_on(DEVICE)
    page = render("dgxa100_8x8", DEVICE, points, published)
    shown = [one for one in published if one.run.machine.accelerators >= points[0].accelerators]
    assert f"{len(shown)} published results" in page
    assert f"<dt>Published</dt><dd>{len(shown)}<" in page, "the same number wherever it stands"
    for point in points:
        batch = f"{point.plan.strategy.global_batch_size:,}"
        assert f'<th scope="row">{point.accelerators:,}</th><td>{batch}</td>' in page
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|<script|src=", page.replace("default-src", ""))


def test_the_curve_fills_its_axis_between_round_numbers(points: list[ScalingPoint]) -> None:
    page = render("dgxa100_8x8", DEVICE, points, [])
    [band] = re.findall(r'var\(--band\)" points="([^"]*)"', page)
    heights = [float(place.partition(",")[2]) for place in band.split()]
    lines = sorted(float(line) for line in re.findall(r'class="grid" d="M0 ([\d.]+)H', page))
    assert lines[0] <= min(heights) < lines[1]
    assert lines[-2] < max(heights) <= lines[-1]
    labels = re.findall(r'class="y" style="bottom:[\d.]+%">([\d.,]+)</span>', page)
    assert len(labels) == len(lines)
    assert {label.strip("0.,") for label in labels} <= {"1", "3"}
