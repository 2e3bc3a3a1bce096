"""Metrics records: reading back what was written, invalid lines, and limits against malicious files."""

import json
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from compliance.log import metrics
from compliance.log.follower import MAX_LINE_BYTES
from compliance.log.metrics import (
    EndRecord,
    EvaluationRecord,
    MetricsWriter,
    PlanRecord,
    RunRecord,
    StepRecord,
    Straggler,
    WarningRecord,
    parse_record,
    read_metrics,
)

RUN = RunRecord("tiny_cpu", "node", 0.36, 32, 2, 579_074, "abc", "2024-01-02T03:04:05+00:00")
STEP = StepRecord(20, 640, 2.0, 100.0, 5.0, 80.0, 5.0, 10.0, 5.5, 4.75, 0.75, 1e-3, 2.0, 28_000.0, 320.0)


def test_metrics_records_are_read_back_as_written(tmp_path: Path) -> None:
    path, writer = tmp_path / "metrics_0.jsonl", MetricsWriter(tmp_path / "metrics_0.jsonl", RUN)
    slow = WarningRecord(20, 2.0, "rank 1 is slow", Straggler(1, "node", True, 60.0, 40.0))
    evaluation, plan = EvaluationRecord(20, 640, 2.5, 0.5, 0.25, 25, 100), PlanRecord(*map(float, range(12)))
    end = EndRecord("success", 65.0, 640, 0.375)
    for record in (STEP, evaluation, slow, plan, end):
        writer.write(record)
    found = read_metrics(path)
    assert (found.run, found.steps, found.evaluations) == (RUN, [STEP], [evaluation])
    assert (found.warnings, found.plan, found.end) == ([slow], plan, end)
    # JSON has no NaN, and small numbers keep nine digits.
    writer.write(replace(STEP, loss=math.nan, masked_lm_loss=math.inf, learning_rate=1.23456789e-7))
    writer.close()
    step = json.loads(path.read_text().splitlines()[-1], parse_constant=pytest.fail)
    assert (step["event"], step["loss"], step["masked_lm_loss"]) == ("step", None, None)
    assert step["learning_rate"] == pytest.approx(1.23456789e-7, rel=1e-8)
    read = read_metrics(path).steps[-1]
    assert math.isnan(read.loss) and math.isnan(read.masked_lm_loss)  # noqa: PT018
    with pytest.raises(FileExistsError):
        MetricsWriter(path, RUN)


def test_metrics_lines_without_a_valid_record_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics_0.jsonl"
    good = b'{"event": "eval", "step": 1, "samples": 32}\n'
    path.write_bytes(
        b'\xff\n[1]\n{"event": "other"}\n{"event": []}\n'
        + good
        + good[:-1].ljust(MAX_LINE_BYTES - 1) + b"\n"
        + b"x" * MAX_LINE_BYTES + good  # the end of an overlong line is not a record
        + b'{"event": "end", "status": "' + b"x" * 200_000 + b'"}'
        + b"\n" + b"[" * 60_000 + b"\n" + good + b'{"event": "step", "lo'
    )  # fmt: skip
    found = read_metrics(path)
    assert found == metrics.Metrics(evaluations=[EvaluationRecord(1, 32)] * 3)
    assert read_metrics(tmp_path / "missing") == read_metrics(tmp_path) == metrics.Metrics()


def test_a_metrics_file_is_read_up_to_its_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics_0.jsonl"
    line = json.dumps({"event": "step", "step": 1, "samples": 1}) + "\n"
    path.write_text(10 * line)
    monkeypatch.setattr(metrics, "MAX_BYTES", 3 * len(line))
    assert len(read_metrics(path).steps) == 3


@pytest.mark.parametrize("value", ["-1", "1e300", "1" + 400 * "0", "true", '"1"', "[]", "1.5"])
def test_metrics_lines_with_invalid_numbers_are_rejected(value: str) -> None:
    assert parse_record(f'{{"event": "step", "samples": 1, "step": {value}}}'.encode()) is None


def test_the_error_of_an_accuracy_is_half_of_a_binomial_confidence_interval() -> None:
    found = {
        (share, count): EvaluationRecord(1, 1, masked_lm_accuracy=share, count=count).error
        for share in (-0.01, 0, 0.5, 1, 1.01)
        for count in (0, 1, 100)
    }
    known = {(0, 1): 0, (0, 100): 0, (0.5, 1): 0.98, (0.5, 100): 0.098, (1, 1): 0, (1, 100): 0}
    assert {at: error for at, error in found.items() if not math.isnan(error)} == pytest.approx(known)
