"""What a run says about itself: every sink gets every record, and the time left is honest."""

import io
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bert.metrics import (
    EndRecord,
    EvaluationRecord,
    JsonLines,
    LivePanel,
    PlainLines,
    Progress,
    Reporter,
    StepRecord,
    Stopwatch,
)

STEP = StepRecord(
    step=20,
    samples=640,
    time_s=2.0,
    step_ms=100.0,
    data_wait_ms=5.0,
    forward_backward_ms=80.0,
    reduce_ms=5.0,
    update_ms=10.0,
    loss=5.5,
    masked_lm_loss=4.8,
    next_sentence_loss=0.7,
    learning_rate=1e-3,
    gradient_norm=2.0,
    tokens_per_s=28_000.0,
    sequences_per_s=320.0,
)
EVALUATION = EvaluationRecord(
    step=20, samples=640, time_s=2.5, eval_s=0.5, masked_lm_accuracy=0.25, correct=25, count=100
)
END = EndRecord(status="success", time_s=65.0, samples=640, masked_lm_accuracy=0.36)


def progress(*records: StepRecord | EvaluationRecord) -> Progress:
    made = Progress(target=0.4, max_samples=6400)
    for record in records:
        made.add(record)
    return made


def test_json_lines_hold_every_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Reporter(progress(), [JsonLines(path, {"recipe": "r"})]) as reporter:
        for record in (STEP, EVALUATION, END):
            reporter.write(record)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["run", "step", "eval", "end"]
    assert lines[0]["recipe"] == "r"
    assert lines[1]["data_wait_ms"] == 5.0
    assert (lines[2]["correct"], lines[2]["count"]) == (25, 100)
    assert lines[3]["status"] == "success"


def test_a_metrics_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("precious")
    with pytest.raises(FileExistsError):
        JsonLines(tmp_path / "metrics.jsonl", {})


def test_plain_lines_are_one_line_a_record() -> None:
    lines: list[str] = []
    sink = PlainLines(progress(STEP, EVALUATION), lines.append)
    for record in (STEP, EVALUATION, END):
        sink.write(record)
    assert len(lines) == 3
    assert not any("\n" in line for line in lines)
    for part in ("320.0 seq/s", "28000 tok/s", "100.0 ms", "wait  5.0 %", "loss 5.5000"):
        assert part in lines[0]
    assert "accuracy 0.2500 (25/100)  target 0.4000" in lines[1]
    assert "success" in lines[2]


def test_the_panel_shows_accuracy_against_the_target() -> None:
    text = io.StringIO()
    shown = progress(STEP, EVALUATION)
    panel = LivePanel(shown, Console(file=text, force_terminal=True, width=100))
    for record in (STEP, EVALUATION, END):
        panel.write(record)
    panel.close()
    assert "0.2500 / 0.4000" in text.getvalue()
    assert "success after 1:05" in text.getvalue()


def test_time_left_is_the_limit_until_accuracy_rises() -> None:
    assert progress().eta == "-"
    assert progress(STEP).eta == "at most 0:18"
    assert progress(STEP, EVALUATION).eta == "at most 0:18"


def test_time_left_follows_the_rise_of_accuracy() -> None:
    second = replace(EVALUATION, time_s=4.5, masked_lm_accuracy=0.30)
    later = replace(STEP, samples=1280, time_s=4.5)
    assert progress(EVALUATION, second, later).eta == "about 0:04, at most 0:18"
    between = replace(EVALUATION, time_s=3.5, masked_lm_accuracy=0.29)
    later = replace(STEP, samples=1280, time_s=4.0)
    assert progress(EVALUATION, between, later).eta == "about 0:02, at most 0:16"  # at the third evaluation, not before
    later = replace(STEP, samples=1280, time_s=4.5)
    falling = replace(second, masked_lm_accuracy=0.2)
    assert progress(EVALUATION, falling, later).eta == "at most 0:18"


def test_the_stopwatch_counts_each_phase_until_taken() -> None:
    stopwatch = Stopwatch()
    for _ in range(2):
        with stopwatch.time("reduce"):
            time.sleep(0.01)
    taken = stopwatch.take()
    assert 0.02 <= taken["reduce"] < 1
    assert taken["update"] == 0
    assert stopwatch.take()["reduce"] == 0
