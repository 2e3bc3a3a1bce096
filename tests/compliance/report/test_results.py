import csv
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from compliance.convergence.selection import select
from compliance.log import rules
from compliance.log.accelerator import family, form
from compliance.report import summary
from compliance.report.page import render
from compliance.report.published import placement, published
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
    write_description(path.parents[1], "my_node", submitter="A & B", **no_gpus)
    return path


@pytest.fixture(scope="module")
def opened(folder: Path) -> Results:
    """The results in `folder`."""
    return load_results(folder)


def test_runs_in_numeric_order_with_their_figures(opened: Results) -> None:
    outcomes = {run.number: run.outcome for run in opened.runs}
    assert list(outcomes.items()) == [(0, "valid"), (1, "valid"), (2, "valid"), (10, "aborted")]
    assert (opened.system, opened.division, opened.global_batch_size) == ("my_node", "open", 32)
    said = opened.runs[0].logged
    assert said.seconds == pytest.approx(0.1 * 18)  # there are 18 records from run_start to run_stop
    assert (said.init_seconds or 0) > 0
    assert said.accuracy == pytest.approx(0.315)
    assert (said.target, said.train_samples, said.converged_samples()) == (0.3, 3008, 3008)
    assert said.sequences_per_s == pytest.approx(3008 / 1.8)
    assert opened.runs[3].logged.converged_samples() is None
    assert opened.shown.number == 2


@pytest.mark.parametrize(
    ("chosen", "kept", "dropped"),
    [
        ((0, 1, 2, 3), (1, 2), {0: "fastest", 10: "slowest"}),  # an aborted run counts as the slowest
        ((0, 1, 2), (1,), {0: "fastest", 2: "slowest"}),
        ((0, 1, 3), (1,), {0: "fastest", 10: "slowest"}),
        *((few, (), {}) for few in ((0, 1), (0,), (0, 1, 2, 3, 3), (3, 3, 3))),
    ],
)
def test_score_is_the_olympic_mean(
    opened: Results, chosen: tuple[int, ...], kept: tuple[int, ...], dropped: dict[int, str]
) -> None:
    results = replace(opened, runs=tuple(opened.runs[n] for n in chosen))
    times = [opened.runs[n].logged.seconds or 0.0 for n in kept]
    assert results.score_seconds == (pytest.approx(sum(times) / len(times)) if times else None)
    assert results.scaled_seconds == results.score_seconds
    assert results.dropped == dropped


def test_a_closed_score_is_scaled_by_convergence(closed: Results, opened: Results) -> None:
    outlook = closed.convergence
    assert outlook is not None
    assert outlook.verdict == "scaled"
    assert closed.score_seconds is not None
    assert closed.scaled_seconds == pytest.approx(closed.score_seconds * 2_443_934 / 2_437_632, rel=1e-6)
    assert [run.logged.converged_samples() for run in closed.runs][:2] == [2_400_000, 2_550_528]
    # Unrelated runs cannot be scored for convergence.
    assert replace(closed, runs=(*closed.runs, *opened.runs)).convergence is None
    assert replace(closed, runs=opened.runs).convergence is None


def test_accelerators_come_from_the_description_or_else_from_a_run(closed: Results, opened: Results) -> None:
    assert (closed.accelerator, closed.accelerators) == ("NVIDIA H100 80GB HBM3", 8)
    described = replace(closed, description={"number_of_nodes": "4", "accelerators_per_node": "8"})
    assert (described.accelerator, described.accelerators) == ("NVIDIA H100 80GB HBM3", 32)  # the name is from the log
    assert replace(closed, description={"number_of_nodes": "four"}).accelerators == 8  # the run's processes
    assert replace(closed, description={"number_of_nodes": "\u0661", "accelerators_per_node": "4"}).accelerators == 8
    assert opened.accelerators == 0
    assert replace(opened, description={}).accelerators is None


def test_time_is_accounted_for(opened: Results) -> None:
    parts = breakdown(opened.runs[1])
    assert parts["forward and backward"] == pytest.approx(60 * 0.020)
    assert parts["waiting for data"] == pytest.approx(60 * 0.001)
    assert parts["evaluation"] == pytest.approx(3 * 0.05)
    assert sum(parts.values()) == pytest.approx(opened.runs[1].logged.seconds)
    assert breakdown(opened.runs[2]) == {}


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


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\xff"], ids=["cut", "deep", "latin-1"])
def test_a_broken_system_description_is_a_finding(one: Path, text: str) -> None:
    write_description(one.parents[1], "node").write_bytes(text.encode("latin-1"))
    results = load_results(one)
    assert results.description == {}
    errors = [about for about, finding in results.findings if finding.severity == "error"]
    assert "node.json" in errors
    said = {item.title: item for item in summary.statements(results)}
    assert said["The folder and its description"].kind == "bad"
    assert json.loads(summary.as_json(results))["beside"]


@pytest.mark.parametrize(
    ("name", "model", "built"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", "SXM"),
        ("NVIDIA H100 PCIe", "H100", "PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100", "SXM"),
        ("NVIDIA H100 NVL", "H100", "NVL"),
        ("NVIDIA A100 - PCIe - 80 GB", "A100", "PCIe"),
        ("NVIDIA GH200 480GB", "GH200", None),
        ("NVIDIA L40S", "L40S", None),
        ("AMD Instinct MI300X OAM", "MI300X", None),
        ("Habana Gaudi2", "GAUDI 2", None),
        ("TPU-v4", "TPU 4", None),
        ("Graphcore Bow IPU", "BOW", None),
        ("N/A", None, None),
    ],
)
def test_families_of_accelerators(name: str, model: str | None, built: str | None) -> None:
    assert (family(name), form(name)) == (model, built)


def test_every_published_accelerator_has_a_family_but_processors() -> None:
    unknown = {result.accelerator for result in published() if family(result.accelerator) is None}
    assert unknown == {"N/A"}
    assert len(published()) == 150
    assert [result.minutes for result in published()] == sorted(result.minutes for result in published())


def test_a_time_stands_between_its_neighbours() -> None:
    found = placement(5.30, "NVIDIA H100 80GB HBM3", 8)
    for fact in (
        "8 H100 (SXM)",
        "between the 5.26 min of Dell",
        "the 5.32 min of Supermicro",
        "Of 15 published",
        "4 are",
    ):
        assert fact in found.sentence
    minutes = [result.minutes for result in (*found.faster, *found.slower)]
    assert minutes == [5.1569, 5.1757, 5.2642, 5.3175, 5.3646, 5.3715]
    assert "before the 5.13 min" in placement(1, "NVIDIA H100 80GB HBM3", 8).sentence
    assert "after the 6.38 min" in placement(60, "NVIDIA H100 80GB HBM3", 8).sentence


def test_without_a_score_on_the_same_scale_there_is_no_place(opened: Results, closed: Results) -> None:
    assert "Only closed runs" in opened.placement.sentence
    assert "Without a score" in replace(closed, runs=closed.runs[:2]).placement.sentence
    found = placement(5.3, "NVIDIA H100 80GB HBM3", 12)
    assert (found.compared, found.faster, found.slower) == (0, (), ())
    assert "12 H100 (SXM), only on 4, 8, 16, 32, " in found.sentence
    for name, number, fact in (("NVIDIA B200", 8, "B200"), ("a thing", 8, "a thing"), ("N/A", 0, "no accelerator")):
        assert fact in placement(5.3, name, number).sentence


def test_summary_is_plain_text_when_not_on_a_terminal(folder: Path) -> None:
    status, text = command.run("summary", folder)
    lines = text.splitlines()
    assert (status, lines[0], lines[-1]) == (0, "BERT on my_node", rules.NOT_A_RESULT)
    assert lines[1].split("  ")[-1].strip() == "sequences/s"
    assert lines[2].split() == ["0", "pass", "valid", "1.8", "s", "0.3150", "0.3000", "3,008", "1,671"]
    assert lines[5].split()[:3] == ["10", "pass", "aborted"]  # the official checker accepts open logs without status
    assert lines[-2] == "3 of 4 runs valid; mean time to train without the fastest and the slowest: 4.5 s"
    assert "\x1b" not in text


def test_formats_of_the_report_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    rows = list(csv.DictReader(command.run("report", folder, "--format", "csv")[1].splitlines()))
    assert [tuple(row[name] for name in ("run", "dropped", "official", "ours")) for row in rows] == [
        ("0", "fastest", "pass", "pass"),
        ("1", "", "pass", "pass"),
        ("2", "", "pass", "pass"),
        ("10", "slowest", "pass", "fail"),
    ]
    assert float(rows[0]["seconds"]) == pytest.approx(1.8)
    out = tmp_path / "sub" / "report.json"
    assert command.run("report", folder, "--format", "json", "--out", out) == (0, f"{out}\n")
    document = json.loads(out.read_text())
    assert document["note"] == rules.NOT_A_RESULT
    assert document["score_seconds"] == pytest.approx((3.6 + 5.4) / 2)
    first, *_, last = document["runs"]
    assert (first["outcome"], last["outcome"], first["configuration"]["recipe"]) == ("valid", "aborted", "tiny_cpu")
    assert first["evaluations"][-1] == {"samples": 3008, "accuracy": pytest.approx(0.315)}
    assert last["verdict"]["findings"]


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
    assert document["convergence"]["verdict"] == {"closed": "scaled", "failing": "fail"}[name]
    assert document["published"]["compared"] == {"closed": 15, "failing": 0}[name]


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
    chosen = select(starts, times, 10)
    assert [results.runs.index(run) for run in results.submitted] == sorted(chosen.chosen)
    assert results.score_seconds == pytest.approx(chosen.score)
    assert sorted(results.dropped.values()) == ["fastest", "not submitted", "not submitted", "slowest"]
    assert results.convergence
    assert results.convergence.sentence.startswith("10 runs, ")
    kind, text = score_of(results, results.runs)
    assert (kind, "here are 12: these are the consecutive ones of median score" in text) == ("good", True)
