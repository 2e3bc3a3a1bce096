"""No folder passes without readable logs, and derived files that contradict the logs get findings."""

import json
import math
from pathlib import Path

import pytest

from compliance.log.metrics import EndRecord, EvaluationRecord, Metrics, Record, RunRecord, StepRecord
from compliance.log.reader import read_log
from compliance.submission.check import accepted, check_paths
from compliance.submission.derived import metrics_fault
from tests.compliance.command import run
from tests.compliance.log_edits import Edit, in_turn, metadata, value
from tests.compliance.result_folders import (
    SYSTEM,
    without_chain,
    write_closed_folder,
    write_description,
    write_log,
    write_series,
)
from tests.compliance.run_logs import START_MS


def closed(root: Path, change: Edit | None = None, runs: int = 10) -> Path:
    """Write results/<system>/bert with closed logs without digests and a description. Apply `change` to each log."""
    folder = root / "results" / SYSTEM / "bert"
    for path in write_series(folder, [17] * runs, platform=SYSTEM):
        without_chain(path)
        path.write_text(change(path.read_text()) if change else path.read_text())
    write_description(root / "results")
    return folder


# Paths


@pytest.mark.slow
def test_a_failing_folder_also_fails_if_its_path_is_relative(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = closed(tmp_path, change=value("global_batch_size", 0), runs=2)
    monkeypatch.chdir(folder)
    for options in ([], ["--json"], ["--format", "github"], ["--quiet"], ["--junit", "../a.xml"]):
        for path in (".", f"../{folder.name}", folder):
            assert run("check", path, *options)[0] == 1
    monkeypatch.chdir(root)
    assert run("check", ".")[0] == 0
    (root / "systems" / f"{SYSTEM}.json").write_text("{}")
    status, text = run("check", ".")
    assert (status, f"FAIL systems/{SYSTEM}.json" in text) == (1, True)


@pytest.mark.parametrize("names", [None, "20240928_{}.log", "Result_{}.TXT", "run-{}.out"])
def test_a_folder_never_passes_without_a_readable_log(tmp_path: Path, names: str | None) -> None:
    folder = closed(tmp_path, runs=2)
    (folder / "scaling.json").write_text("{}")
    for number in range(2):
        log = folder / f"result_{number}.txt"
        log.unlink() if names is None else log.rename(folder / names.format(number))
    for path in (folder, folder.parent, tmp_path, tmp_path / "results"):
        status, text = run("check", path)
        assert (status, "no log was read" in text) == (2, True)
        assert names is None or (names.format(0) in text and "result_0.txt" in text)
    for command in ("summary", "report", "convergence"):
        status, text = run(command, folder)
        assert (status, "result_<n>.txt" in text) == (2, True)
        assert names is None or names.format(0) in text


def test_empty_lists_empty_paths_and_huge_folders_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not accepted([])
    with pytest.raises(ValueError, match="no log was read: no path given"):
        check_paths([])
    monkeypatch.chdir(folder := closed(tmp_path, runs=3))
    for arguments in (("check", ""), ("check", ".", ""), ("summary", ""), ("convergence", "")):
        status, text = run(*arguments)
        assert (status, "an argument is empty" in text) == (2, True)
    monkeypatch.setattr("compliance.folders.MAX_ENTRIES", 2)
    status, text = run("check", folder)
    assert (status, "more than 2 entries" in text) == (2, True)


# Derived files


def test_metrics_of_another_run_get_a_finding_and_are_not_reported(tmp_path: Path) -> None:
    folder = write_closed_folder(tmp_path, [16] * 3)
    assert "of another run" not in run("check", folder)[1]
    with (folder / "metrics_2.jsonl").open("a") as file:
        file.write('{"event": "eval", "step": 1, "samples": 150528, "masked_lm_accuracy": 0.5}\n')
    fault = "metrics_2.jsonl is of another run: accuracy 0.50000 at 150528 samples, the log has 0.64800"
    assert run("check", folder)[1].count(fault) == 1
    runs = json.loads(run("report", folder, "--format", "json")[1])["runs"]
    assert [bool(each["seconds_by_part"]) for each in runs] == [True, True, False]


def accuracy(samples: int, value: float) -> EvaluationRecord:
    return EvaluationRecord(1, samples, masked_lm_accuracy=value)


@pytest.mark.parametrize(
    ("records", "fault"),  # the run took 180 s and trained 2,501.3 sequences/s
    [
        ([], ""),
        ([RunRecord()], ""),
        ([RunRecord(global_batch_size=448)], ""),
        ([RunRecord(global_batch_size=449)], "global_batch_size 449, the log has 448"),
        ([accuracy(150_080, 0.648009)], ""),
        ([accuracy(150_080, 0.647989)], "accuracy 0.64799 at 150080 samples, the log has 0.64800"),
        ([accuracy(7, 0.5), accuracy(150_080, 0.648)], ""),
        ([accuracy(7, math.nan)], ""),
        ([accuracy(7, 0.5), accuracy(9, 0.5)], "an evaluation at 7 samples, the log has none there"),
        ([EndRecord("aborted", 180.0)], "status 'aborted', the log has 'success'"),
        ([EndRecord("success")], ""),
        *(([EndRecord("success", seconds)], "") for seconds in (171.0, 189.0)),
        *(([EndRecord("success", s)], f"{s} s, the log has 180.0 s") for s in (3.0, 170.9, 189.1, 180_000.0)),
        ([StepRecord(1, 1, sequences_per_s=rate) for rate in (1.0, 250_133.0, 9e9)], ""),
        (
            [StepRecord(1, 1, sequences_per_s=250_134.0)],
            "250,134 sequences a second, the log has 2,501 with evaluations",
        ),
    ],
)
def test_a_difference_between_metrics_and_log_beyond_the_tolerance_is_a_fault(
    tmp_path: Path, records: list[RunRecord | Record], fault: str
) -> None:
    metrics = Metrics()
    for record in records:
        metrics.add(record)
    assert metrics_fault(metrics, read_log(write_log(tmp_path / "a", 0, evaluations=3, step_ms=10_000)).run) == fault
    short = read_log(write_log(tmp_path / "b", 0, evaluations=3, step_ms=1000)).run  # a run of 18 s
    faults = [metrics_fault(Metrics(end=EndRecord("success", seconds)), short) for seconds in (16.0, 20.0, 20.1)]
    assert faults == ["", "", "20.1 s, the log has 18.0 s"]


ROWS: list[tuple[str, str]] = [
    ("", ""),
    ("1,88,0.7205,2550016", ""),
    ("1,88.00008,0.7205,2550016", ""),
    ("1,88.00009,0.7205,2550016", "run 1 has seconds '88.00009', in the log 88.0"),
    ("1,88,,2550016", "run 1 has accuracy '', in the log 0.7204999999999999"),
    ("1,88,0.7205,1e18", "run 1 has converged_samples '1e18', in the log 2550016"),
    ("2,88,0.648,", ""),
    ("2,88,0.648,0", "run 2 has converged_samples '0', in the log null"),
    ("3,88,0.648,", "there is no log of run '3'"),
    ("x,88,0.648,", "there is no log of run 'x'"),
]
"""Rows of a report about three runs, of which run 2 is aborted, and the fault of each row."""


def test_a_csv_or_json_report_gets_a_finding_if_it_contradicts_the_logs(tmp_path: Path) -> None:
    folder = closed(tmp_path, runs=3)
    failed = in_turn(value("eval_accuracy", 0.648, -1), metadata("run_stop", "status", "aborted"))
    (folder / "result_2.txt").write_text(failed((folder / "result_2.txt").read_text()))

    def said() -> list[str]:
        [verdict] = [verdict for verdict in check_paths([folder]) if verdict.part == "folder"]
        return [f"{each.severity}: {each.found}" for each in verdict.findings if "contradicts" in each.found]

    for form in ("csv", "json"):
        assert run("report", folder, "--format", form, "--out", folder.parent / f"whole.{form}")[0] == 0
    assert said() == []
    report = folder / "runs.csv"
    for row, fault in ROWS:
        report.write_text(f"run,seconds,accuracy,converged_samples\n{row}\n")
        assert said() == ([f"warning: runs.csv contradicts the logs: {fault}"] if fault else [])
    report.write_text("seconds,run,converged_samples\nx,\x1b[2J,1\n")
    assert "\x1b" not in run("check", folder)[1]
    report.unlink()
    for content, fault in (
        ('{"runs": [{"run": {}}, 3]}', []),
        ('{"runs": [{"run": 0, "seconds": 9.5, "converged_samples": 1}]}', ["run 0 has seconds 9.5, in the log 88.0"]),
    ):
        (folder.parent / "runs.json").write_text(content)
        assert said() == [f"warning: runs.json contradicts the logs: {each}" for each in fault]


def test_reports_show_no_time_for_a_log_of_two_attempts_or_with_wrong_times(tmp_path: Path) -> None:
    folder = closed(tmp_path, runs=2)
    text = (folder / "result_0.txt").read_text()
    (folder / "result_0.txt").write_text(text.replace(f'"time_ms": {START_MS // 10**6}', '"time_ms": 1'))
    twice = (folder / "result_1.txt").read_text()
    (folder / "result_1.txt").write_text(twice + twice.replace(f'"time_ms": {START_MS // 10**6}', '"time_ms": 18000'))
    assert run("check", folder)[0] == 1
    runs = json.loads(run("report", folder, "--format", "json")[1])["runs"]
    shown = [(each["seconds"], each["sequences_per_s"], each["seed"], each["outcome"]) for each in runs]
    assert shown == [(None, None, 1000, "invalid"), (None, None, None, "invalid")]
