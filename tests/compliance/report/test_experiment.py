"""Reports on runs without a target, and on folders whose runs differ in their settings."""

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from compliance.log.records import Metrics, StepRecord
from compliance.report import summary
from compliance.report.page import render
from compliance.report.results import Results, breakdown, load_results
from tests.compliance import command
from tests.compliance.report.test_report import FOLDER, outline
from tests.compliance.result_folders import write_experiment, write_experiments, write_log
from tests.compliance.run_logs import write_run
from tests.html_page import Page

ABOUT_RULES = re.compile("mlperf|official|ours|score|target|dropped|division|slowest|valid", re.IGNORECASE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experiments(tmp_path_factory.mktemp("experiments"))


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return load_results(folder)


def test_the_runs_stand_beside_each_other_with_the_settings_that_differ(folder: Path, results: Results) -> None:
    status, said = command.run("summary", folder)
    assert status == 0
    assert said == (FOLDER / "experiments.txt").read_text()
    assert max(map(len, said.splitlines())) <= 80
    rows = summary.table(results)
    assert rows[0][-2:] == ("optimizer.base_learning_rate", "seed")
    assert [row[1] for row in rows[1:]] == ["finished", "finished", "interrupted", "resumed"]
    page = Page(render(results)).text.rpartition("BERT on")[2].partition("Environment and configuration")[0]
    for text in (said, summary.as_markdown(results), page):
        assert "Run 3: 0.3000 ± 0.0449 after 2,016 sequences." in text
        assert "data/trained.safetensors" in text
        assert not ABOUT_RULES.search(text)


def test_the_page_of_an_experiment(results: Results) -> None:
    page = Page(render(results))
    assert page.charts == [
        "Masked-LM accuracy over sequences trained, 4 runs",
        "Sequences per second over sequences trained, 4 runs",
        "Training loss over sequences trained, 4 runs",
    ]
    assert outline(render(results)) == (FOLDER / "experiments_page.txt").read_text()
    assert results.findings == []


def test_documents_about_an_experiment(folder: Path, results: Results) -> None:
    document = json.loads(command.run("report", folder, "--format", "json")[1])
    assert document["differing_settings"] == {"optimizer.base_learning_rate": ["0.005", "0.002", "0.01", "0.01"]}
    assert not summary.RULED_FIELDS & {*document, *document["runs"][0]}
    rows = [*csv.DictReader(io.StringIO(summary.as_csv(results)))]
    assert [row["optimizer.base_learning_rate"] for row in rows] == ["0.005", "0.002", "0.01", "0.01"]
    assert (rows[3]["outcome"], rows[3]["best_accuracy"], rows[3]["best_samples"]) == ("resumed", "0.3", "2016")


def test_the_time_of_a_resumed_run_is_that_of_its_own_steps(results: Results) -> None:
    run = results.runs[3]
    assert run.logged.seconds
    assert run.logged.sequences_per_s == pytest.approx((3008 - 1280) / run.logged.seconds)
    assert breakdown(run)["forward and backward"] == pytest.approx((94 - 40) * 0.004)
    longer = [msgspec.structs.replace(step, update_ms=1e6) for step in run.metrics.steps]
    assert breakdown(replace(run, metrics=replace(run.metrics, steps=longer)))["other"] == 0.0
    assert breakdown(replace(run, metrics=Metrics(steps=[StepRecord(1, 32)]))) == {}
    assert not [finding for finding in run.verdict.findings if "TR 24.4" in finding.rule]  # it evaluates on schedule


def test_a_file_of_weights_that_a_later_run_has_written(tmp_path: Path) -> None:
    for number, best in enumerate((0.3, 0.2)):
        write_experiment(tmp_path, number, (best,), {"save_checkpoint": "a.safetensors"})
    kind, title, text = summary.statements(load_results(tmp_path))[1]
    assert (kind, title) == ("warn", "Best weights")
    assert "a.safetensors" in text
    assert "run 1" in text


def test_a_single_run_without_an_evaluation_beside_a_file_without_records(tmp_path: Path) -> None:
    write_experiment(tmp_path, 0, (), status="aborted")
    (tmp_path / "result_1.txt").write_text("")
    results = load_results(tmp_path)
    assert results.is_experiment
    assert Page(render(results)).charts == []
    assert "No run was evaluated" in command.run("summary", tmp_path)[1]
    assert [about for about, _ in results.findings] == ["run 1"]


HOSTILE = ["<script>alert(1)</script>", "=cmd()", "\x1b[2J\u202e", "::error::x", "|", "x" * 10_000]


def test_hostile_settings_are_only_ever_text(tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE):
        write_experiment(tmp_path, number, (0.1,), {"=a": text, "optimizer.name": text, "save_checkpoint": text})
    results = load_results(tmp_path)
    assert len(render(results)) < 1_000_000
    assert "optimizer.name" in summary.table(results)[0]
    for text in (command.run("summary", tmp_path)[1], summary.as_markdown(results), summary.as_csv(results)):
        assert all(character.isprintable() or character == "\n" for character in text)
        assert not re.search(r"^::", text, re.MULTILINE)
    cells = [cell for row in csv.reader(io.StringIO(summary.as_csv(results))) for cell in row]
    assert not [cell for cell in cells if cell.startswith("=")]


def with_settings(folder: Path, division: str, *configured: Mapping[str, object]) -> Results:
    for number, settings in enumerate(configured):
        header = {f"config.{name}": value for name, value in {"log.run": number, **settings}.items()}
        write_log(folder / f"result_{number}.txt", number, evaluations=3, division=division, header=header)
    return load_results(folder)


def test_runs_of_different_settings_have_no_mean(tmp_path: Path) -> None:
    a, b = {"model.hidden_size": 128, "training.seed": 1}, {"model.hidden_size": 256, "training.seed": 2}
    for number, named in ((2, "a0 and a1"), (3, "a0, a1 and a2"), (5, "a0, a1, a2 and 2 more")):
        names = [{f"a{index}": each for index in range(number)} for each in (1, 2)]
        kind, title, text = summary.statements(with_settings(tmp_path / str(number), "open", *names))[2]
        assert (kind, title, text) == ("plain", "Score", f"No score: the runs differ in {named}.")
    results = with_settings(tmp_path / "mixed", "open", a, a, b)
    assert results.score_seconds is None
    said = [command.run("summary", tmp_path / "mixed")[1], summary.as_markdown(results), render(results)]
    assert all("the runs differ in model.hidden_size" in text.replace("\\", "") for text in said)
    assert "mean" not in Page(said[2]).text.rpartition("BERT on")[2]
    assert json.loads(summary.as_json(results))["score_seconds"] is None
    alike = {"training.seed": 3, "checkpoint.folder": "there", "save_checkpoint": "b", "log.system": "x"}
    assert with_settings(
        tmp_path / "alike", "open", {"training.seed": 1}, {"save_checkpoint": "a"}, alike
    ).score_seconds
    assert with_settings(tmp_path / "closed", "closed", a, a, b).score_seconds


def test_runs_with_and_without_a_target_have_the_usual_report_without_a_mean(tmp_path: Path) -> None:
    folder = write_experiments(tmp_path)
    for number in (0, 1):
        write_run(folder / f"result_1{number}.txt", "open", header={"config.evaluation.target": 0.3})
    results = load_results(folder)
    assert (results.is_experiment, results.score_seconds) == (False, None)
    assert "evaluation.target" in results.differing
    assert "MLPerf" in command.run("summary", folder)[1]
    assert Page(render(results)).charts
