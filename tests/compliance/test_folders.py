"""Limits of the search of folders, choice of the benchmark folder, and names and order of logs."""

from pathlib import Path

import pytest

from compliance.artefact import MAX_FILE_BYTES
from compliance.folders import MAX_DEPTH, find, layout_findings, numbered_logs, repository_findings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty benchmark folder in a submission."""
    (tmp_path / "org" / "systems").mkdir(parents=True)
    path = tmp_path / "org" / "results" / "node" / "bert"
    path.mkdir(parents=True)
    return path


def test_the_repository_search_is_limited_in_depth_and_reports_files_above_50_mib(folder: Path) -> None:
    root = folder.parents[2]
    (folder / "result_0.txt").touch()
    (root / ".git" / "a b").mkdir(parents=True)  # the inside of hidden folders is not searched
    deep = root
    for depth in range(1, MAX_DEPTH + 3):
        deep /= "d"
        deep.mkdir()
        if depth > MAX_DEPTH - 2:
            (deep / f"at {depth}").touch()
    for name, more in (("just.bin", 0), ("larger.bin", 1), ("largest.bin", 2)):
        with (root / name).open("wb") as file:
            file.truncate(MAX_FILE_BYTES + more)
    assert [(finding.found, finding.more) for finding in repository_findings(find(root))] == [
        (".git has a space or a leading dot in its name, expected neither", 2),
        ("larger.bin is too large, expected at most 50 MiB", 1),
    ]


def test_without_logs_the_innermost_folder_named_bert_is_the_benchmark_folder(folder: Path) -> None:
    for name, inner in (("old", folder), ("bert_2", folder / "bert_2")):
        (folder / name).mkdir()
        assert [found.path for found in find(folder).benchmarks] == [inner]


@pytest.mark.parametrize(("below", "found"), [("earlier", "runs"), ("bert", "runs/bert")])
def test_a_folder_with_logs_is_chosen_unless_a_subfolder_is_named_bert(folder: Path, below: str, found: str) -> None:
    (folder / "runs" / below).mkdir(parents=True)
    for path in (folder / "runs", folder / "runs" / below):
        (path / "result_0.txt").touch()
    assert [each.path for each in find(folder / "runs").benchmarks] == [folder / found]


def test_logs_are_ordered_by_number(folder: Path) -> None:
    for number in ("10", "9", "99999999999999999999", "10000000000", "seed"):
        (folder / f"result_{number}.txt").touch()
    names = [path.stem.removeprefix("result_") for path in find(folder).benchmarks[0].logs]
    assert names == ["9", "10", "10000000000", "99999999999999999999", "seed"]
    assert [number for number, _ in numbered_logs(folder)] == [9, 10, 10**10, 10**20 - 1]


@pytest.mark.parametrize(("logs", "others"), [(9, 1), (9, 3), (8, 4), (10, 1), (11, 1)])
def test_misnamed_files_with_records_are_reported_if_logs_are_missing(folder: Path, logs: int, others: int) -> None:
    (folder.parents[2] / "systems" / "node.json").touch()
    with pytest.raises(ValueError, match=r" in it, expected results/<system>/bert after a run$"):
        numbered_logs(folder)
    for number in range(others):
        (folder / f"run_{number}.log").write_text(':::MLLOG {"key": "init_start"}\n')
    with pytest.raises(ValueError, match=r" in it, run_0.*\.log hold a run's records; name the logs result_<n>\.txt$"):
        numbered_logs(folder)
    for number in range(logs):
        (folder / f"result_{number}.txt").touch()
    misnamed = {1: "run_0.log is", 3: "run_0.log, run_1.log, run_2.log are", 4: "run_0.log, run_1.log, run_2.log are"}
    lost = (f"{misnamed[others]} not counted as a log, expected result_<n>.txt", max(0, others - 3))
    wrong = (f"{logs} logs result_<n>.txt, expected exactly 10 in a submission", 0)
    expected = {(9, 1): [lost], (9, 3): [lost, wrong], (8, 4): [lost, wrong], (10, 1): [], (11, 1): [wrong]}
    found = layout_findings(find(folder).benchmarks[0], 10)
    assert [(finding.found, finding.more) for finding in found] == expected[logs, others]
