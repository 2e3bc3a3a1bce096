"""Time to train against the number of accelerators: the curve, its table, its page."""

import csv
import re
from pathlib import Path

import pytest

from cluster.devices import device_named
from cluster.display.scaling_page import render
from cluster.model.scaling import CAUSES, LARGEST, published_on, scale, write_table


def test_the_curve_falls_and_its_efficiency_is_lost_to_causes_that_add_up() -> None:
    points = scale(device_named("H100-SXM"), per_node=8)
    assert [point.accelerators for point in points] == [8 * 2**power for power in range(12)]
    assert points[-1].accelerators == LARGEST
    minutes = [point.prediction.minutes for point in points]
    assert minutes == sorted(minutes, reverse=True)
    assert points[0].efficiency == pytest.approx(1)
    assert 0.9 < points[3].efficiency < 1
    assert points[-1].efficiency < 0.2
    for point in points:
        assert sum(point.share(cause) for cause in CAUSES) == pytest.approx(1)
    assert points[-1].share("reduction") > points[0].share("reduction")


def test_the_table_has_what_the_curve_has(tmp_path: Path) -> None:
    points = scale(device_named("A100-SXM-80GB"), per_node=8)
    write_table(points, tmp_path / "scale.csv")
    with (tmp_path / "scale.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["accelerators"]) for row in rows] == [point.accelerators for point in points]
    for row, point in zip(rows, points, strict=True):
        assert float(row["minutes"]) == pytest.approx(point.prediction.minutes, rel=1e-5)
        assert float(row["low_minutes"]) < float(row["minutes"]) < float(row["high_minutes"])
        parts = [float(value) for name, value in row.items() if name.endswith("_minutes")][2:]
        assert sum(parts) == pytest.approx(point.prediction.minutes, rel=1e-4)


def test_a_node_that_is_larger_than_the_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="GPUs per node: 16,385, expected at most 16,384"):
        scale(device_named("H100-SXM"), per_node=LARGEST + 1)


def test_the_page_holds_every_point_and_loads_nothing() -> None:
    device = device_named("A100-SXM-80GB")
    points, published = scale(device, per_node=8), published_on(device)
    page = render(device, points, published)
    assert len(published) > 20
    assert f"{len([one for one in published if one.run.machine.accelerators >= 8])} published results" in page
    for point in points:
        assert f"<td>{point.accelerators:,}</td><td>{point.prediction.run.batch:,}</td>" in page
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|<script|src=", page.replace("default-src", ""))
