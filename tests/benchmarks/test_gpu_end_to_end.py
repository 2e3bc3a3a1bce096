"""The GPU benchmark's part ``end-to-end``: the packages it needs, the length of its run, and what it leaves behind."""

import importlib.metadata
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from packaging.requirements import Requirement

from benchmarks import gpu
from benchmarks.gpu_parts import end_to_end
from benchmarks.gpu_parts.report import Figure, NotUsableError, PartReport
from benchmarks.gpu_parts.scale import TINY, Context
from benchmarks.gpu_parts.step import rate_name, recipe
from compliance.log.metrics import Metrics, StepRecord
from tests.benchmarks.bare_environment import BareEnvironment
from tests.programs import REPOSITORY

FILES = {"end-to-end.json", "metrics_0.jsonl", "report.md", "result_0.txt", "train.txt"}


@pytest.fixture
def context(tmp_path: Path) -> Context:
    report = PartReport(tmp_path / "out/end-to-end.json", {"device": "cpu", "without": {}})
    report.write()
    return Context(torch.device("cpu"), TINY, report)


def test_end_to_end_raises_with_all_missing_packages(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    required = {"tyro": ["docstring-parser>=0.16", "attrs; extra == 'dev'"], "google-crc32c": None}

    def requires(name: str) -> list[str]:
        if name in ("docstring-parser", "google-crc32c"):
            raise importlib.metadata.PackageNotFoundError(name)
        return required.get(name) or []

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    with pytest.raises(NotUsableError, match=r"are not installed: google-crc32c, docstring-parser$"):
        end_to_end.end_to_end(context)
    monkeypatch.undo()
    assert end_to_end.missing_packages() == []


def test_end_to_end_raises_an_error_for_an_unknown_setting(context: Context) -> None:
    wrong = replace(context, settings=["--training.presision", "fp8"])
    with pytest.raises(
        ValueError, match=r"there is no setting --training.presision; did you mean --training.precision\?"
    ):
        end_to_end.end_to_end(wrong)


def test_the_number_of_samples_fits_the_remaining_time(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that the part ``step`` measured on the same device with the same ops is used, not measured again."""
    monkeypatch.setattr(end_to_end.time, "monotonic", lambda: 1000.0)
    config = recipe("h100_1x1", precision="fp8")
    name = rate_name(config, 2)
    measured = Figure(name, figure=50.0, unit="sequences/s")
    monkeypatch.setattr(end_to_end, "rate", Mock(return_value=measured))
    path = context.report.path.with_name("step.json")
    for about, rate in (({"device": "cpu", "without": {}}, 700), ({"device": "cpu", "without": {"a": "b"}}, 50)):
        PartReport(path, about, rows=[Figure("other", figure=9.0), replace(measured, figure=700.0)]).write()
        for left, seconds in ((float("inf"), 300), (260, 100), (5, 10)):
            assert end_to_end._samples(replace(context, end=1000.0 + left), config) == rate * seconds
    monkeypatch.setattr(end_to_end, "rate", Mock(side_effect=RuntimeError("no such kernel")))
    context.report.rows.clear()
    with pytest.raises(RuntimeError, match=r"add -- --evaluation\.interval-samples N"):
        end_to_end._samples(context, config)


def test_replacements_of_ops_become_settings_of_the_run(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "on_gpu", True)
    without = {"varlen_attention": "pytorch", "lamb_step": "reference"}
    arguments = end_to_end._arguments(replace(context, without=without), Path("folder"), 8)
    at = arguments.index("--training.implementations")
    expected = ["varlen_attention", "pytorch", "lamb_step", "reference", "--training.no-cuda-graphs"]
    assert arguments[at + 1 : at + 6] == expected
    assert "--training.implementations" not in end_to_end._arguments(context, Path("folder"), 8)


def test_a_loss_that_is_not_finite_fails_the_row() -> None:
    """Only this row can report the problem: the run may reach its target, and its log may pass the check."""
    for last, failed in ((7.5, False), (float("nan"), True)):
        steps = [StepRecord(1, 8, step_ms=1.0, loss=10.25), StepRecord(2, 16, step_ms=1.0, loss=last, skipped_steps=1)]
        (row,) = (row for row in end_to_end.rows_of(Metrics(None, steps)) if row.name == "loss")
        assert row.failed == failed
        assert row.note.endswith("from 10.2500, 1 steps skipped")


@pytest.mark.oldest_torch
def test_packages_named_in_pyproject_suffice_for_end_to_end(tmp_path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["train"], "triton"]
    bare = BareEnvironment.of(tmp_path, [Requirement(line).name for line in required])
    options = ["--part", "end-to-end", "--tiny", "--device", "cpu", "--out", str(tmp_path / "out")]
    done = bare.run("benchmarks/gpu.py", *options, "--", "--evaluation.interval-samples", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end-to-end: log  PASS result_0.txt: " in done.stdout


@pytest.mark.usefixtures("forked_python")
def test_log_metrics_and_output_are_kept_beside_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = ["--part", "end-to-end", "--tiny", "--device", "cpu", "--out", str(folder)]
    arguments += ["--without", "varlen_attention=reference", "--", "--evaluation.interval-samples", "64"]
    arguments += ["--training.seed", "3", "--log.interval-steps", "1"]
    assert gpu.main(arguments) == 0
    assert {path.name for path in folder.iterdir()} == FILES
    found = json.loads((folder / "end-to-end.json").read_text())
    assert found["without"] == {"varlen_attention": "reference"}
    assert found["rows"][-1]["note"].startswith("PASS result_0.txt: ")
    assert "end: success" in (folder / "train.txt").read_text()
    log = (folder / "result_0.txt").read_text()
    assert '"key": "seed", "value": 3,' in log
    assert "# config.training.implementations: {'varlen_attention': 'reference'}" in log


@pytest.mark.usefixtures("forked_python")
def test_at_its_time_limit_a_run_is_stopped_and_checked(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = context.report.path.with_name("metrics_0.jsonl")

    def monotonic() -> float:
        """Return 0 until a step has been recorded, and then a time shortly before the part's end."""
        trains = metrics.exists() and '"event":"step"' in metrics.read_text().replace(" ", "")
        return 1000.0 - 0.75 * end_to_end._STOP_S if trains else 0.0

    monkeypatch.setattr(end_to_end.time, "monotonic", monotonic)
    settings = ["--log.interval-steps", "1", "--evaluation.interval-samples", "40000"]
    long = replace(context, end=1000.0, settings=settings)
    with pytest.raises(RuntimeError, match=r"bert\.train was stopped 40 s before the part's limit: use more --seconds"):
        end_to_end.end_to_end(long)
    row = context.report.row("log")
    assert row is not None
    assert "WRONG: FAIL result_0.txt: " in row.note
    assert "run_stop: status aborted" in row.note
