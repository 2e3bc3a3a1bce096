import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from compliance.convergence.selection import select
from compliance.log import rules
from compliance.log.accelerator import form
from compliance.report import summary
from compliance.report.page import render
from compliance.report.results import ReportedRun, Results, breakdown, load_results
from tests.compliance import command
from tests.compliance.result_folders import write_description, write_series
from tests.compliance.run_logs import log_of, without_chain, write_metrics, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three valid open runs of different lengths and an aborted run; the last two runs have no metrics."""
    path = tmp_path_factory.mktemp("open") / "results" / "my_node" / "bert"
    for number in range(3):
        header = {"recipe": "tiny_cpu", "seed": number}
        write_run(path / f"result_{number}.txt", "open", header=header, step_ms=100 * (number + 1))
    (path / "result_10.txt").write_bytes(log_of((0.1,), "open", status="aborted"))
    for number in range(2):
        write_metrics(path / f"metrics_{number}.jsonl")
    no_gpus = {"accelerators_per_node": "0", "accelerator_model_name": "N/A"}
    write_description(path.parents[1], "my_node", division="open", **no_gpus)
    return path


@pytest.fixture(scope="module")
def opened(folder: Path) -> Results:
    """The results in `folder`."""
    return load_results(folder)


def test_accelerators_come_from_the_description_or_else_from_a_run(closed: Results, opened: Results) -> None:
    assert (closed.accelerator, closed.accelerators) == ("NVIDIA H100 80GB HBM3", 8)
    described = replace(closed, description={"number_of_nodes": "4", "accelerators_per_node": "8"})
    assert (described.accelerator, described.accelerators) == ("NVIDIA H100 80GB HBM3", 32)  # name from the log
    assert replace(closed, description={"number_of_nodes": "four"}).accelerators == 8  # number of the run's processes
    assert replace(closed, description={"number_of_nodes": "\u0661", "accelerators_per_node": "4"}).accelerators == 8
    assert opened.accelerators == 0
    assert replace(opened, description={}).accelerators is None


def test_a_run_that_ends_before_it_starts_has_no_time(one: Path) -> None:
    log = one / "result_0.txt"
    log.write_text(re.sub(r'"time_ms": 17(.*"run_stop")', r'"time_ms": 16\1', log.read_text()))
    write_metrics(one / "metrics_0.jsonl")
    run = load_results(one).runs[0]
    assert (run.logged.seconds, run.logged.sequences_per_s, run.outcome) == (None, None, "invalid")
    assert run.logged.init_seconds is not None
    assert breakdown(run) == {}


def test_folder_without_runs_is_refused_and_two_logs_of_one_number_are_two_runs(one: Path) -> None:
    with pytest.raises(ValueError, match=r"no result_<n>\.txt in it"):
        load_results(one.parent)
    with pytest.raises(ValueError, match="no such folder"):
        load_results(one / "none")
    write_run(one / "result_00.txt", "open")
    assert sorted(run.log.path.name for run in load_results(one).runs) == ["result_0.txt", "result_00.txt"]


def test_forms_of_accelerators() -> None:
    forms = {"NVIDIA H100 80GB HBM3": "SXM", "NVIDIA A100-SXM4-80GB": "SXM", "NVIDIA H100 NVL": "NVL"}
    forms |= {"NVIDIA H100 PCIe": "PCIe", "NVIDIA A100 - PCIe - 80 GB": "PCIe", "NVIDIA GH200 480GB": None, "N/A": None}
    assert {name: form(name) for name in forms} == forms


def test_a_summary_of_logs_of_other_software_calls_itself_unofficial_and_not_them(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "node" / "bert"
    for log in write_series(folder, [17, 17, 17]):
        log.write_text(without_chain(log.read_text()))
    results = load_results(folder)
    shown = [command.run("summary", folder)[1], summary.as_markdown(results), render(results), summary.as_json(results)]
    for text in shown:
        assert rules.UNOFFICIAL in text
        assert rules.NOT_A_RESULT not in text


@pytest.mark.parametrize("name", ["closed", "failing"])
def test_the_whole_summary_of_a_folder(name: str, request: pytest.FixtureRequest) -> None:
    results: Results = request.getfixturevalue(name)
    said = summary.as_markdown(results).partition("\n## Findings")[0]
    assert said == Path(__file__).with_name(f"{name}.txt").read_text()
    document = json.loads(summary.as_json(results), parse_constant=pytest.fail)
    assert document["accelerator"] == "NVIDIA H100 80GB HBM3"
    assert document["convergence"]["verdict"] == {"closed": "scaled", "failing": "fail"}[name]


def test_the_whole_output_of_each_command_about_open_runs(folder: Path) -> None:
    formats = ("markdown", "csv", "json")
    done = [command.run("summary", folder), *(command.run("report", folder, "--format", name) for name in formats)]
    assert {status for status, _ in done} == {0}
    *said, document = (text.partition("\n## Findings")[0] for _, text in done)
    assert "\n".join(said) == Path(__file__).with_name("open.txt").read_text()
    first, *_, last = json.loads(document)["runs"]
    assert first["evaluations"][-1] == {"samples": 3008, "accuracy": pytest.approx(0.315)}
    parts = {"forward and backward": 1.2, "exposed communication": 0.18, "update": 0.12, "waiting for data": 0.06}
    assert first["seconds_by_part"] == pytest.approx(parts | {"evaluation": 0.15, "other": 0.09})  # 1.8 s in all
    assert (first["configuration"]["recipe"], last["seconds_by_part"]) == ("tiny_cpu", {})
    assert last["verdict"]["findings"]


def test_unrelated_runs_are_not_compared_with_the_reference(closed: Results, opened: Results) -> None:
    assert replace(closed, runs=(*closed.runs, *opened.runs)).convergence is None
    assert replace(closed, runs=opened.runs).convergence is None


def score_of(results: Results, runs: Iterable[ReportedRun]) -> tuple[str, str]:
    """Return the kind and the text of the statement about the score of these runs."""
    [said] = [said for said in summary.statements(replace(results, runs=tuple(runs))) if said.title == "Score"]
    return said.kind, said.text


def test_the_score_of_few_runs_and_of_a_lost_one(closed: Results, opened: Results) -> None:
    for number, words in ((5, "A submission has 10 runs, here are 5."), (3, "Mean of 1 run"), (2, "No score yet")):
        kind, text = score_of(closed, closed.runs[:number])
        assert (kind, words in text) == ("plain", True)
    kind, text = score_of(closed, (*closed.runs[:9], opened.runs[-1]))
    assert (kind, "Run 10 is no valid result and counts as the slowest" in text) == ("good", True)


def test_of_twelve_runs_ten_count_as_in_a_submission(closed: Results) -> None:
    later = tuple(replace(run, number=run.number + 10) for run in closed.runs[:2])
    results = replace(closed, runs=closed.runs + later)
    starts, times = [run.logged.start_ms or 0 for run in results.runs], [run.counted_seconds for run in results.runs]
    chosen = select(starts, times)
    assert [results.runs.index(run) for run in results.submitted] == sorted(chosen.chosen)
    assert results.score_seconds == pytest.approx(chosen.score)
    assert sorted(results.dropped.values()) == ["fastest", "not submitted", "not submitted", "slowest"]
    assert results.convergence
    assert results.convergence.sentence.startswith("10 runs, ")
    kind, text = score_of(results, results.runs)
    assert (kind, "here are 12: these are the consecutive ones of median score" in text) == ("good", True)
