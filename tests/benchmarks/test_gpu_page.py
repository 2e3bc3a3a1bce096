"""The report of the GPU benchmark, from files of parts with synthetic figures."""

from pathlib import Path

import pytest

from benchmarks.gpu_parts.page import OURS, page
from benchmarks.gpu_parts.report import Figure, PartReport

FULL = '{"rows": [], "complete": true, "measuring": null, "error": null, "took": 1.0, "versions": 3}'
PARTS = ("correctness", "step", "peers", "kernels")


def write(folder: Path, part: str, *rows: Figure, error: str | None = None, **about: object) -> None:
    report = PartReport(
        folder / f"{part}.json", {"device": "Made-up GPU", "commit": "c" * 40, "date": "2030-01-02", **about}
    )
    report.add(*rows, quiet=True)
    report.end(error)


def tables(text: str) -> dict[str, list[list[str]]]:
    """Return the cells of each section's table, without the header."""
    sections = (section.split("\n") for section in text.split("\n## ")[1:])
    return {
        name: [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
        for name, *lines in sections
    }


def test_each_rate_is_compared_with_our_bf16_and_fp8_rates(tmp_path: Path) -> None:
    rates = {OURS["bf16"]: 900.0, OURS["FP8"]: 1200.0, "padded": 300.0}
    found = [Figure(name, 1.0, rate, "sequences/s", share=rate / 2000, page=True) for name, rate in rates.items()]
    write(tmp_path, "peers", Figure("ceiling: bf16 product", 1.0, 800.0, "TFLOP/s"), *found)
    shown = tables(page(tmp_path, PARTS))
    assert [line[:5] for line in shown["Training on one device, in one run"]] == [
        [OURS["bf16"], "900", "45.0 %", "1.00 x", "1.33 x"],
        [OURS["FP8"], "1,200", "60.0 %", "0.75 x", "1.00 x"],
        ["padded", "300", "15.0 %", "3.00 x", "4.00 x"],
    ]
    assert shown["Ceilings of that run"] == [["ceiling: bf16 product", "1", "800", "TFLOP/s", "", "", ""]]


def test_the_ten_slowest_ops_and_the_ten_longest_kernels_of_a_step_are_shown(tmp_path: Path) -> None:
    ops = [Figure(f"op {index}", float(index), share=0.25, peer=2.0, page=True) for index in range(1, 13)]
    write(tmp_path, "kernels", *ops, Figure("op 99, triton", 99.0))
    split = [
        Figure(f"split, fp8: kernel {index}", float(index), 9.0, "us a sequence", share=0.01) for index in range(12)
    ]
    write(tmp_path, "step", *split)
    shown = tables(page(tmp_path, PARTS))
    assert [line[0] for line in shown["The slowest ops"]] == [f"op {index}" for index in range(12, 2, -1)]
    assert shown["The slowest ops"][0][1:6] == ["12", "", "", "25.0 %", "2"]
    assert shown["Where a step's time goes"][0][:5] == ["split, fp8: kernel 11", "11", "9", "us a sequence", "1.0 %"]
    assert len(shown["Where a step's time goes"]) == 10


def test_failures_come_first_and_parts_list_their_replaced_ops(tmp_path: Path) -> None:
    wrong = Figure("dense_gelu, triton", figure=3.0, note="WRONG | worst in tensor 0")
    largest = Figure("largest error", figure=3.0, note="2 checked, 1 wrong", page=True)
    write(tmp_path, "correctness", wrong, largest, versions={"torch": "2.11.0", "triton": "3.6.0"})
    write(tmp_path, "kernels", error="cut off at its limit of 9 s", without={"dense_gelu": "reference"})
    text = page(tmp_path, PARTS)
    shown = tables(text)
    assert text.startswith("# Made-up GPU\n\n## Wrong or failed")
    assert shown["Wrong or failed"] == [["correctness", "dense_gelu, triton", "WRONG / worst in tensor 0"]]
    correctness, kernels = shown["Parts"]
    assert correctness[1] == "complete: 2 rows, 1 FAILED, 2 checked, 1 wrong"
    assert correctness[3:] == ["c" * 10, "2030-01-02", "2.11.0", "3.6.0", ""]
    assert kernels[1] == "NOT COMPLETE: 0 rows, cut off at its limit of 9 s"
    assert kernels[-1] == "dense_gelu (instead reference)"
    assert "All important rows" not in shown
    [row] = tables(page(tmp_path, PARTS, every_row=True))["All important rows"]
    assert row == ["largest error", "", "3", "", "", "", "2 checked, 1 wrong"]


def test_the_title_names_all_devices(tmp_path: Path) -> None:
    for part, device in (("step", "A"), ("peers", "B"), ("kernels", "A")):
        write(tmp_path, part, device=device)
    assert page(tmp_path, PARTS).startswith("# A and B\n")


def test_the_page_of_an_empty_folder_says_that_nothing_was_measured(tmp_path: Path) -> None:
    assert page(tmp_path, PARTS) == "# Nothing was measured"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[{}]", '{"rows": 3}', '{"rows": [{"name": "x", "other": 1}]}', '{"rows": []}']
)
def test_an_invalid_report_is_listed_as_not_complete_beside_a_valid_one(tmp_path: Path, text: str) -> None:
    write(tmp_path, "step", Figure("split, bf16: kernel", 1.0, 2.0))
    (path := tmp_path / "kernels.json").write_text(text)
    with pytest.raises(ValueError, match="is not a report of this program"):
        PartReport.load(path)
    outcomes = {line[0]: line[1] for line in tables(page(tmp_path, PARTS))["Parts"]}
    assert outcomes["step"].startswith("complete: 1 rows")
    assert outcomes["kernels"].startswith(f"NOT COMPLETE: 0 rows, {path}"[:60])
