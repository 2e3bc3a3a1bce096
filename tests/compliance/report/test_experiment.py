"""Reports on runs without a target, and on folders whose runs differ in their settings."""

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from compliance.report import summary
from compliance.report.page import render
from compliance.report.results import Results, load_results
from tests.compliance import command
from tests.compliance.report.test_report import FOLDER
from tests.compliance.result_folders import write_experiment, write_experiments, write_log
from tests.compliance.run_logs import write_run
from tests.html_page import Page

ABOUT_RULES = re.compile("mlperf|official|ours|score|target|dropped|division|slowest|valid", re.IGNORECASE)


def test_the_summary_of_experiments_shows_the_settings_that_differ(experiments: Results) -> None:
    done = [command.run("report", experiments.folder, "--format", name) for name in ("csv", "json")]
    *said, document = [text for _, text in [command.run("summary", experiments.folder), *done]]
    assert "".join(said) == (FOLDER / "experiments.txt").read_text()
    assert max(map(len, said[0].splitlines())) <= 80
    assert not [text for text in said if ABOUT_RULES.search(text)]
    found = json.loads(document)
    assert found["differing_settings"] == {"optimizer.base_learning_rate": ["0.005", "0.002", *["0.01"] * 4]}
    assert not summary.RULED_FIELDS & {*found, *found["runs"][0]}


def test_the_report_warns_if_a_later_run_overwrote_the_best_weights(tmp_path: Path) -> None:
    wrote = {"0.3 0.2 0.1 0.1": ("warn", "a.pt, to which run 2 wrote later."), "0.1 0.2 0.3 0.1": ("good", "a.pt.")}
    for accuracies, (kind, text) in wrote.items():
        for number, best in enumerate(map(float, accuracies.split())):
            write_experiment(tmp_path, number, (best,), {"save_checkpoint": "a.pt" if number < 3 else "b.pt"})
        (tmp_path / "metrics_0.jsonl").unlink()
        assert summary.statements(load_results(tmp_path))[1] == (kind, "Best weights", text)
    assert (
        summary.statements(load_results(tmp_path))[0].text
        == "Run 2: 0.3000 ± 0.0449, perplexity 70.0 after 1,024 sequences."
    )
    (tmp_path / "metrics_2.jsonl").unlink()
    assert summary.statements(load_results(tmp_path))[0].text == "Run 2: 0.3000 after 1,024 sequences."


def test_a_report_on_an_experiment_without_evaluations_says_so(tmp_path: Path) -> None:
    write_experiment(tmp_path, 0, (), status="aborted")
    (tmp_path / "result_1.txt").write_text("")
    results = load_results(tmp_path)
    assert results.is_experiment
    assert Page(render(results)).charts == []
    assert summary.statements(results) == [("warn", "Best accuracy", "No run was evaluated yet.")]
    assert [about for about, _ in results.findings] == ["run 1"]
    assert summary.table(results)[1:] == [
        ("0", "interrupted", "-", "-", "300 ms", "0", "7"),
        ("1", "invalid", "-", "-", "-", "-", "-"),
    ]


HOSTILE = ["<script>alert(1)</script>", "=cmd()", "\x1b[2J\u202e", "::error::x", "|", "x" * 10_000]


def test_reports_escape_hostile_settings(tmp_path: Path) -> None:
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


def test_long_settings_are_cut_at_their_beginning_and_a_single_run_has_no_colour(tmp_path: Path) -> None:
    for number, length in enumerate((40, 41)):
        write_experiment(tmp_path, number, (0.1,), {"optimizer.name": f"{'x' * (length - 3)}end"})
        colours = [len(Page(render(load_results(tmp_path))).of("g", colour)) for colour in ("compute", "reduce")]
        assert colours == ([3, 3] if number else [0, 0])
    cells = [row[-1] for row in summary.table(load_results(tmp_path))[1:]]
    assert cells == [f"{'x' * 37}end", f"...{'x' * 34}end"]


def with_settings(folder: Path, division: str, *configured: Mapping[str, object]) -> Results:
    for number, settings in enumerate(configured):
        header = {f"config.{name}": value for name, value in {"log.run": number, **settings}.items()}
        write_log(folder / f"result_{number}.txt", number, evaluations=3, division=division, header=header)
    return load_results(folder)


def test_open_runs_with_different_settings_have_no_score(tmp_path: Path) -> None:
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
    own = [each | {"log.division": "open"} for each in ({"training.seed": 1}, {"save_checkpoint": "a"}, alike)]
    results = with_settings(tmp_path / "alike", "open", *own)  # not meant for a submission
    said = [summary.statements(replace(results, runs=results.runs[:number]))[2].text for number in (2, 3)]
    mean = "Mean of 1 run without the fastest and the slowest: 18.0 s."
    assert said == ["No score yet: it needs at least 3 runs.", mean]
    assert with_settings(tmp_path / "closed", "closed", a, a, b).score_seconds


def test_a_folder_of_runs_with_and_without_a_target_has_no_score(tmp_path: Path) -> None:
    folder = write_experiments(tmp_path)
    for number in (0, 1):
        write_run(folder / f"result_1{number}.txt", "open", header={"config.evaluation.target": 0.3})
    results = load_results(folder)
    assert (results.is_experiment, results.score_seconds) == (False, None)
    assert "evaluation.target" in results.differing
    assert "MLPerf" in command.run("summary", folder)[1]
    assert Page(render(results)).charts
