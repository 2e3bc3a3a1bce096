"""The command of the GPU benchmark: wrong input, time limits, and saved results of parts that fail."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch

import kernels
from benchmarks import gpu
from benchmarks.gpu_parts import part as gpu_part
from benchmarks.gpu_parts import scale
from benchmarks.gpu_parts.page import page
from benchmarks.gpu_parts.report import Figure, NotUsableError, PartReport
from benchmarks.gpu_parts.scale import Context
from tests.conftest import REPOSITORY
from tests.programs import PATIENCE_S

TINY = ["--device", "cpu", "--tiny", "--out", "unused"]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device", "cpu"], "--device cpu only tests the program"),
        (["--tiny"], "--tiny only tests the program, so its figures have no default folder"),
        (["--part", "step,speed"], "--part: there is no part 'speed'; use all, or some of correctness, step"),
        (["--seconds", "nan"], "--seconds is nan; use a finite number above 0"),
        (["--seconds", "inf"], "--seconds is inf; use a finite number above 0"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--part", "step", "fp8"], "unrecognized arguments: fp8"),
        ([*TINY, "--", "--training.seed", "1"], "settings after -- need --part end-to-end"),
        (
            [*TINY, "--without", "gelu"],
            "--without: there is no op 'gelu'; use some of varlen_attention, ",
        ),
        (
            [*TINY, "--without", "lamb_step,bias_gelu=apex"],
            "--without bias_gelu=apex: 'apex' is not available; use one of reference",
        ),
        pytest.param(["--part", "step"], "PyTorch finds no CUDA device; to test the program", marks=no_gpu),
    ],
)
def test_invalid_arguments_give_status_2_and_a_one_line_error(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {complaint}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_an_unknown_commit_is_an_error_except_for_tiny_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "commit", lambda: "unknown")
    assert gpu.main(["--part", "step"]) == 2
    complaint = "error: figures must name the commit, which is unknown without .git: set MLPERF_BERT_COMMIT to it\n"
    assert capsys.readouterr().err == complaint
    assert gpu.parse(TINY).parts == [part for part in gpu.PARTS if part != "end-to-end"]


def test_a_replaced_op_gets_its_next_installed_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, an implementation that a CUDA graph can capture comes first."""
    here: set[str | None] = {"triton"}
    monkeypatch.setattr(gpu, "find_spec", lambda name: name if name in here else None)
    asked = ["varlen_attention", "dropout_add_layer_norm", "lamb_step", "bias_gelu=triton"]
    without = gpu.replacements(asked, "cuda")
    assert list(without.values()) == ["pytorch", "pytorch", "reference", "triton"]
    here.add("flash_attn")
    assert gpu.replacements(asked[:1], "cuda") == {"varlen_attention": "flash_attn"}
    here.clear()
    with pytest.raises(ValueError, match="--without bias_gelu: no other implementation is installed"):
        gpu.replacements(["bias_gelu"], "cpu")


def test_a_replacement_that_cannot_be_captured_prevents_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Context, "on_gpu", True)
    report = PartReport(tmp_path / "x.json", {})
    for without, captures in (({}, True), ({"lamb_step": "reference"}, True), ({"varlen_attention": "pytorch"}, False)):
        assert Context(torch.device("cpu"), scale.TINY, report, without).captures == captures


def test_an_op_is_replaced_only_while_the_part_runs(tmp_path: Path) -> None:
    """The part runs with the replacement. Afterwards, the op chooses its implementation automatically again."""
    file, without = tmp_path / "asked.json", {"bias_gelu": "reference"}
    assert gpu_part.run("tests.benchmarks.gpu_parts:asked", file, "cpu", tiny=True, without=without) == 0
    report = PartReport.load(file)
    assert report.about["without"] == without
    assert [row.note for row in report.rows] == ["reference"]
    assert kernels.OPS["bias_gelu"].asked == "auto"


def test_parts_share_the_remaining_time_by_weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If a part ends early, the later parts share the time that it leaves."""
    clock, given = [0.0], {}

    def run_part(part: str, _function: str, _settings: gpu.Settings, seconds: float) -> PartReport:
        given[part] = seconds
        clock[0] += min(seconds, 10.0)
        return PartReport(tmp_path / "x.json", {}, error=None)

    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
    settings = gpu.Settings(["memory", "step", "peers"], tmp_path, "cpu", True, 480)
    assert gpu.measure(settings)
    assert given == {
        "memory": pytest.approx(480 * 60 / 280),
        "step": pytest.approx(470 * 100 / 220),
        "peers": pytest.approx(460),
    }


@pytest.mark.usefixtures("forked_python")
def test_a_part_continues_after_a_row_that_kills_its_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = gpu.Settings([], tmp_path, "cpu", True, 600)
    report = gpu.run_part("unlucky", "tests.benchmarks.gpu_parts:unlucky", settings, 600)
    found = [(row.name, row.figure, row.note) for row in PartReport.load(tmp_path / "unlucky.json").rows]
    assert found == [
        ("first", 1.0, ""),
        ("killed", None, "failed: the process ended with SIGKILL"),
        ("second", 2.0, ""),
        ("lost", None, "failed: RuntimeError: an illegal memory access was encountered"),
        ("third", 3.0, ""),
    ]
    assert report.complete
    assert len(report.failures) == 2
    assert "unlucky: third" in capfd.readouterr().out
    assert " failed: the process ended with SIGKILL" in page(tmp_path, ["unlucky"])
    assert "complete: 5 rows, 2 FAILED" in page(tmp_path, ["unlucky"])


@pytest.mark.usefixtures("forked_python")
def test_a_part_is_cut_off_at_its_limit_and_keeps_its_rows(tmp_path: Path) -> None:
    settings = gpu.Settings([], tmp_path, "cpu", True, 600)
    for seconds in (4, 16, 64):  # a busy machine may need longer
        report = gpu.run_part("endless", "tests.benchmarks.gpu_parts:endless", settings, seconds)
        if report.rows:
            break
    assert [row.name for row in PartReport.load(tmp_path / "endless.json").rows] == ["first"]
    assert report.error == f"cut off at its limit of {seconds} s while measuring endless"
    assert report.took >= seconds
    assert "NOT COMPLETE: 1 rows" in page(tmp_path, ["endless"])


@pytest.mark.usefixtures("forked_python")
def test_a_row_that_hangs_is_ended_and_later_rows_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "endless.json"

    def patience(_left: float) -> float:
        return 0.0 if PartReport.load(file).measuring == "endless" else 600.0

    monkeypatch.setattr(gpu, "_patience", patience)
    settings = gpu.Settings([], tmp_path, "cpu", True, 600)
    report = gpu.run_part("endless", "tests.benchmarks.gpu_parts:endless", settings, 600)
    assert [row.name for row in report.rows] == ["first", "endless", "last"]
    assert re.fullmatch(r"failed: ended after \d+ s", report.rows[1].note)
    assert report.complete


def test_a_row_may_take_half_of_the_remaining_time_but_at_least_90_s() -> None:
    assert [gpu._patience(left) for left in (10, 100, 400)] == [90, 90, 200]


def test_sigterm_keeps_the_rows_ends_the_part_and_prints_the_page(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--tiny", "--part", "kernels,memory", "--out"]
    line = [sys.executable, str(REPOSITORY / "benchmarks/gpu.py"), *options, str(tmp_path)]
    process = subprocess.Popen(line, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        next(text for text in process.stdout if text.startswith("kernels: varlen"))
        [part] = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    part.wait(PATIENCE_S)
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert not found["complete"]
    assert found["error"].startswith("cut off by SIGTERM")
    assert len(found["rows"]) >= 4
    assert not (tmp_path / "memory.json").exists()
    assert " NOT COMPLETE: " in printed


def test_a_failed_row_records_its_reason_and_later_rows_run(tmp_path: Path) -> None:
    report = PartReport(tmp_path / "part.json", {})
    errors = {
        "a": RuntimeError("no such kernel\nand more"),
        "b": NotUsableError("too old"),
        "c": ModuleNotFoundError("No module named 'x'", name="x"),
        "d": ImportError("cannot import name 'y'", name="kernels.registry"),
    }
    for name, error in errors.items():
        report.attempt(name, Mock(side_effect=error))
    report.attempt("e", lambda: Figure("e", figure=float("inf")))
    assert [row.note for row in report.rows] == [
        "failed: RuntimeError: no such kernel",
        "not usable here: too old",
        "not usable here: ModuleNotFoundError: No module named 'x'",
        "failed: ImportError: cannot import name 'y'",
        "",
    ]
    assert [row.name for row in report.failures] == ["a", "d"]
    loaded = PartReport.load(report.path)
    assert loaded.rows[-1].figure is None  # JSON has no infinity
    assert not loaded.complete, "if the process is killed now, the file says that it was cut off"


def test_a_failed_row_sets_the_exit_status_and_is_on_the_page(tmp_path: Path) -> None:
    why = "AttributeError: module 'tests.benchmarks.gpu_parts' has no attribute 'missing'"
    for function, status, error in (("right", 0, None), ("wrong", 1, None), ("missing", 1, why)):
        file = tmp_path / f"{function}.json"
        assert gpu_part.run(f"tests.benchmarks.gpu_parts:{function}", file, "cpu", tiny=True) == status
        assert json.loads(file.read_text())["error"] == error
    printed = page(tmp_path, ["right", "wrong"])
    assert "| WRONG: 3 " in printed
    assert "complete: 2 rows, 1 FAILED" in printed
    assert "not on the page" not in printed
