"""Results of a folder: runs, score, accelerators and time by part, and their summary in each format."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from compliance.log import rules
from compliance.log.metrics import EvaluationRecord, Metrics, StepRecord
from compliance.report import summary
from compliance.report.page import render
from compliance.report.results import ReportedRun, Results, breakdown, load_results
from tests.compliance import command
from tests.compliance.report.test_report import outline
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


def test_the_number_of_accelerators_comes_from_the_description_or_else_the_metrics(
    closed: Results, opened: Results
) -> None:
    assert (closed.accelerator, closed.accelerators) == ("NVIDIA H100 80GB HBM3", 8)
    described = replace(closed, description={"number_of_nodes": "4", "accelerators_per_node": "8"})
    # The name comes from the log, or the number from the metrics, if the description lacks it.
    assert (described.accelerator, described.accelerators) == ("NVIDIA H100 80GB HBM3", 32)
    assert replace(closed, description={"number_of_nodes": "four"}).accelerators == 8
    assert replace(closed, description={"number_of_nodes": "\u0661", "accelerators_per_node": "4"}).accelerators == 8
    assert opened.accelerators == 0
    assert replace(opened, description={}).accelerators is None


def test_a_run_has_no_time_if_its_stop_precedes_its_start(one: Path) -> None:
    log = one / "result_0.txt"
    log.write_text(re.sub(r'"time_ms": 17(.*"run_stop")', r'"time_ms": 16\1', log.read_text()))
    write_metrics(one / "metrics_0.jsonl")
    run = load_results(one).runs[0]
    assert (run.logged.seconds, run.logged.sequences_per_s, run.outcome) == (None, None, "invalid")
    assert run.logged.init_seconds is not None
    assert breakdown(run) == {}


def test_a_report_requires_logs_and_shows_both_logs_of_the_same_run_number(one: Path) -> None:
    with pytest.raises(ValueError, match=r"no result_<n>\.txt in it"):
        load_results(one.parent)
    with pytest.raises(ValueError, match="no such folder"):
        load_results(one / "none")
    write_run(one / "result_00.txt", "open")
    write_run(one.parent / "result_0.txt", "open")
    with pytest.raises(ValueError, match="its logs lie beside a folder with results"):
        load_results(one.parent)
    assert sorted(run.log.path.name for run in load_results(one).runs) == ["result_0.txt", "result_00.txt"]


def test_reports_on_logs_of_other_software_say_that_they_are_unofficial(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "node" / "bert"
    logs = write_series(folder, [17, 17, 17])
    for log in logs:
        log.write_text(without_chain(log.read_text()))
    uncounted = logs[1].read_text().replace('"epoch_num": ', '"epoch_num": -5, "was": ')
    logs[1].write_text(uncounted.replace('"value": 2550016', '"value": 9'))
    write_description(tmp_path / "results", "node", division="Closed")
    results = load_results(folder)
    shown = [command.run("summary", folder)[1], summary.as_markdown(results), render(results), summary.as_json(results)]
    for text in shown:
        assert rules.UNOFFICIAL in text
        assert rules.NOT_A_RESULT not in text
    said = "".join(f"{kind} {title}: {text}\n" for kind, title, text in summary.statements(results))
    assert said == Path(__file__).with_name("foreign.txt").read_text()


STEPS = [
    StepRecord(
        step, 32 * step, forward_backward_ms=4.0, reduce_ms=3.0, update_ms=2.0, data_wait_ms=1.0, site_wait_ms=wait
    )
    for step, wait in ((50, 8.0), (60, 6.0), (20, 9.0), (80, 5.0))  # the run restarts after step 60
]


def test_the_time_by_part_of_a_resumed_run_counts_only_its_own_steps(experiments: Results) -> None:
    """The fourth run resumes after step 40, so its records stand for 10, 10, 0 and 20 steps."""
    run = experiments.runs[3]
    assert run.logged.seconds == 1.3
    assert run.logged.sequences_per_s == pytest.approx((3008 - 1280) / 1.3)
    parts = {"forward and backward": 0.16, "exposed communication": 0.12, "update": 0.08, "waiting for data": 0.04}
    evaluations = [EvaluationRecord(60, 1920, eval_s=0.25), EvaluationRecord(80, 2560, eval_s=0.25)]

    def seconds(steps: Sequence[StepRecord]) -> dict[str, float]:
        return breakdown(replace(run, metrics=Metrics(steps=[*steps], evaluations=evaluations)))

    assert seconds(STEPS) == pytest.approx(parts | {"evaluation": 0.5, "other": 0.4})
    sites = [*STEPS[:3], msgspec.structs.replace(STEPS[3], site_bytes=1)]
    assert seconds(sites) == pytest.approx(parts | {"waiting for other sites": 0.24, "evaluation": 0.5, "other": 0.16})
    assert seconds([StepRecord(45, 1440, update_ms=1e6)])["other"] == 0.0
    assert breakdown(replace(run, metrics=Metrics(steps=[StepRecord(1, 32)]))) == {}
    assert breakdown(replace(run, metrics=Metrics(evaluations=evaluations))) == {}
    # The run's evaluations are on schedule, although it resumed.
    assert not [finding for finding in run.verdict.findings if "TR 24.4" in finding.rule]


def test_summary_and_report_print_the_recorded_output_about_open_runs(folder: Path) -> None:
    formats = ("markdown", "csv", "json")
    done = [command.run("summary", folder), *(command.run("report", folder, "--format", name) for name in formats)]
    assert {status for status, _ in done} == {0}
    *said, text = (re.sub(r"\.py:\d+", ".py", text) for _, text in done)
    assert "".join(said) == Path(__file__).with_name("open.txt").read_text()
    document = json.loads(text, parse_constant=pytest.fail)
    known = {"system": "my_node", "ruleset": "5.0.0", "division": "open", "accelerator": None, "accelerators": 0}
    known |= {"global_batch_size": 32, "differing_settings": {}, "convergence": None, "note": rules.NOT_A_RESULT}
    assert document == document | known
    assert (document["score_seconds"], document["scaled_score_seconds"]) == pytest.approx((4.5, 4.5))
    first, *_, last = document["runs"]
    assert first["evaluations"][-1] == {"samples": 3008, "accuracy": pytest.approx(0.315)}
    parts = {"forward and backward": 1.2, "exposed communication": 0.18, "update": 0.12, "waiting for data": 0.06}
    # The parts add up to 1.8 s, the time to train.
    assert first["seconds_by_part"] == pytest.approx(parts | {"evaluation": 0.15, "other": 0.09})
    assert (first["configuration"]["recipe"], last["seconds_by_part"]) == ("tiny_cpu", {})
    assert last["verdict"]["findings"]


def test_rates_are_rounded_and_the_score_of_an_early_converging_set_is_scaled(closed: Results) -> None:
    assert [*map(summary.rate, (None, 0.0, 999.94, 1000.0, 12345.6))] == ["-", "0.0", "999.9", "1,000", "12,346"]
    document = json.loads(summary.as_json(closed))
    assert closed.score_seconds
    assert (document["accelerator"], document["convergence"]["verdict"]) == ("NVIDIA H100 80GB HBM3", "scaled")
    assert document["scaled_score_seconds"] == pytest.approx(closed.score_seconds * 2_443_934 / 2_437_632)


def test_each_set_of_runs_gets_the_recorded_statements(closed: Results, failing: Results, opened: Results) -> None:
    runs = closed.runs
    lost = [replace(failing.runs[index], number=number) for index, number in ((1, 20), (3, 21))]
    later = [replace(run, number=run.number + 10) for run in runs[:2]]
    sets: dict[str, Sequence[ReportedRun]] = {
        "two": runs[:2],
        "one of two lost": (runs[0], lost[0]),
        "one of three lost": (*runs[:2], lost[0]),
        "nine, and one lost": (*runs[:9], lost[0]),
        "eight, and two lost": (*runs[:8], *lost),
        "ten slow ones": [replace(runs[1], number=number) for number in range(10)],
        "twelve": (*runs, *later),
        "open": opened.runs,
        "closed and open": (*runs[:2], opened.runs[2]),
    }
    said = ""
    for name, chosen in sets.items():
        results = replace(closed, runs=tuple(chosen))
        lines = [f"dropped {results.dropped}", *re.split("\n|# In short: ", outline(render(results)))]
        kept = [
            line
            for line in lines
            if re.match(r"dropped|Time to train \||\[\w+\] .*(Our checks|Score|Convergence.*) \|", line)
        ]
        said += f"{name} => {'; '.join(kept)}\n"
    assert said == Path(__file__).with_name("sets.txt").read_text()
