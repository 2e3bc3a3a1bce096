"""The budget of a step on paper: sums, limits, what replaces the assumptions, and the command."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.budget import paper
from cluster.budget.launches import StepPrecision
from cluster.budget.paper import TABLE, Budget, BudgetRow, paper_budget
from cluster.devices import device_named, devices
from tests.cluster.budget.five_layers import SEQUENCES, launches
from tests.cluster.conftest import Command

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
H100 = device_named("H100-SXM")
FP8_TFLOPS = H100.fp8_tflops or 0.0


@pytest.fixture(autouse=True)
def five_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "step_launches", launches)


def row(budget: Budget, part: str) -> BudgetRow:
    [found] = [row for row in budget.rows if row.part == part]
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_work_and_bytes_are_those_of_the_launches(precision: StepPrecision) -> None:
    budget, traced = paper_budget(H100, precision, SEQUENCES), launches(precision)
    flop = sum(row.gflop for row in budget.rows)
    assert flop == pytest.approx(2e-9 * sum(each.launch.multiply_adds for each in traced) / SEQUENCES)
    moved = 1e-6 * sum(each.bytes / (4 if each.part == "update" else 1) for each in traced) / SEQUENCES
    assert sum(row.megabytes for row in budget.rows) == pytest.approx(moved)
    assert sum(row.launches for row in budget.rows if row.part != "launches") == len(traced)
    assert budget.total == pytest.approx(sum(row.microseconds for row in budget.rows))


def test_a_part_takes_as_long_as_its_slowest_resource() -> None:
    budget = paper_budget(H100, "fp8", SEQUENCES)
    shares = {each.resource: each for each in budget.efficiencies}
    products, passes = row(budget, "encoder products"), row(budget, "element-wise")
    assert products.slowest == "fp8 product"
    assert products.microseconds == pytest.approx(
        1e3 * products.gflop / FP8_TFLOPS / shares["fp8 product"].share, rel=0.02
    )
    assert passes.slowest == "memory, passes over tokens"
    assert passes.microseconds == pytest.approx(
        1e3 * passes.megabytes / H100.memory_gb_s / shares["memory, passes over tokens"].share
    )
    for each in budget.rows:
        assert each.at_peak <= each.at_ceiling <= each.microseconds * (1 + 1e-9)


def test_twice_the_bandwidth_halves_what_waits_for_memory_and_nothing_gets_slower() -> None:
    slow, fast = (
        paper_budget(replace(H100, memory_gb_s=factor * H100.memory_gb_s), "bf16", SEQUENCES) for factor in (1, 2)
    )
    for part in ("element-wise", "weights and gradients", "update"):
        assert row(fast, part).microseconds == pytest.approx(row(slow, part).microseconds / 2)
    assert all(after.microseconds <= before.microseconds for before, after in zip(slow.rows, fast.rows, strict=True))
    assert row(fast, "encoder products").microseconds == pytest.approx(
        row(slow, "encoder products").microseconds, rel=0.02
    )


def test_what_was_measured_takes_the_place_of_what_is_assumed(tmp_path: Path) -> None:
    def report(part: str, figures: Mapping[str, float | None]) -> None:
        rows = [{"name": name, "figure": figure} for name, figure in figures.items()]
        (tmp_path / f"{part}.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")

    names = [f"FP8 {kind}, the 4 products of a layer" for kind in ("forward", "input gradient", "weight gradient")]
    report(
        "ceilings",
        dict(zip(names, (1200.0, 1200.0, 600.0), strict=True)) | {"bf16 forward, the 4 products of a layer": 700.0},
    )
    report("kernels", {"varlen_self_attention both ways": 150.0, "lamb_step": None})
    assumed, measured = (paper_budget(H100, "fp8", SEQUENCES, folder) for folder in (None, tmp_path))
    by_name = {each.resource: each for each in measured.efficiencies}
    assert by_name["fp8 product"].share * FP8_TFLOPS == pytest.approx(900)
    assert by_name["fp8 product"].source == f"measured: {tmp_path}"
    unchanged = {each for each in assumed.efficiencies if each.resource in ("bf16 product", "memory, update")}
    assert unchanged <= set(measured.efficiencies)
    attention = row(measured, "attention")
    assert attention.microseconds == pytest.approx(1e3 * attention.gflop * 6 / 9 / 150)
    assert attention.slowest == "attention product"


@pytest.mark.parametrize("text", ["{", '{"rows": [{"name": 1}]}', "[]"])
def test_a_file_that_is_no_report_is_named(text: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "ceilings.json").write_text(text, encoding="utf-8")
    assert "ceilings.json is no report" in refused("budget", "--measured", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--accelerator", "A100-SXM"), "A100-SXM-80GB has no FP8"),
        (("--accelerator", "L40S"), "expected one of A100, B200, H100, H200"),
        (("--accelerator", "Z80"), "unknown"),
        (("--micro-batch", "0"), "--micro-batch is 0"),
        (("--micro-batch", "5000"), "expected 1 to 4096"),
        (("--measured", "/nowhere"), "no figures"),
    ],
)
def test_what_cannot_be_budgeted_is_refused(
    arguments: tuple[str, ...], expected: str, refused: Callable[..., str]
) -> None:
    assert expected in refused("budget", *arguments)


def test_the_command_prints_parts_and_the_best_published(cluster: Command) -> None:
    done = cluster("budget")
    assert done.status == 0
    assert done.out.startswith("H100-SXM-80GB, fp8, micro-batches of 64")
    assert "published at best in one node" in done.out
    document = json.loads(cluster("budget", "--accelerator", "H200", "--json").out)
    assert document["microseconds"] == pytest.approx(sum(part["microseconds"] for part in document["parts"]))
    assert (document["goal_microseconds"], document["published"]) == (None, None)


def test_every_efficiency_has_a_source_and_every_device_its_instructions() -> None:
    table = paper._table()
    for entry in table["resource"].values():
        assert entry["source"]
        assert entry["ceiling_source"]
        assert 0 < entry["of_ceiling"] <= 1
        assert all(0 < share <= 1 for share in entry["ceiling"].values())
    for model in table["resource"]["bf16 product"]["ceiling"]:
        [device] = [device for device in devices() if device.model == model and device.multiprocessors]
        assert table["attention"][device.chip].keys() >= set(paper.ATTENTION_PRODUCTS)
    assert TABLE.name in (TABLE.parent / "paper.py").read_text(encoding="utf-8")
