"""Files that are not the log of one complete run: a single finding says so and hides the errors that follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from compliance.check.checker import check_file
from tests.compliance.log_edits import delete, repeat_before, value
from tests.compliance.run_logs import log_of, without_chain


@pytest.fixture(params=["chain", "no chain"])
def log(request: pytest.FixtureRequest) -> str:
    text = log_of((0.5, 0.6, 0.73)).decode()
    return text if request.param == "chain" else without_chain(text)


def errors(tmp_path: Path, text: str) -> list[tuple[int | None, str]]:
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    verdict = check_file(path)
    assert verdict.official == "fail" or verdict.errors
    return [(finding.line, finding.key) for finding in verdict.errors]


@pytest.mark.parametrize("left", [0.05, 0.3, 0.9, 0.97, 0.985])
def test_a_log_that_was_cut_off_is_one_finding(tmp_path: Path, log: str, left: float) -> None:
    lines = log.splitlines(keepends=True)
    assert errors(tmp_path, "".join(lines[: int(left * len(lines))])) == [(None, "run_stop")]


def test_other_faults_in_what_is_left_are_found(tmp_path: Path, log: str) -> None:
    text = without_chain(log)
    text = value("global_batch_size", 0)("".join(text.splitlines(keepends=True)[:-6]))
    first, second = errors(tmp_path, text)
    assert (first, second[1]) == ((None, "run_stop"), "global_batch_size")


def test_the_end_of_a_log_alone_is_one_finding(tmp_path: Path, log: str) -> None:
    lines = without_chain(log).splitlines(keepends=True)
    assert errors(tmp_path, "".join(lines[-8:])) == [(None, "run_start")]


@pytest.mark.parametrize("kept", [1.0, 0.98])
def test_joined_logs_are_one_finding(tmp_path: Path, log: str, kept: float) -> None:
    other = log_of((0.5, 0.6, 0.7, 0.73), seed=77, start_ms=1_800_000_000_000).decode()
    lines = log.splitlines(keepends=True)
    text = "".join(lines[: int(kept * len(lines))])
    assert errors(tmp_path, text + other) == [(None, "run_start")]
    assert errors(tmp_path, text + "".join(other.splitlines(keepends=True)[:200])) == [(None, "run_start")]


def test_a_record_too_many_or_too_few_joins_nothing(tmp_path: Path, log: str) -> None:
    text = without_chain(log)
    late = repeat_before("init_start", "block_start")(text)
    assert [key for _, key in errors(tmp_path, late)] == ["init_start"]
    assert [key for _, key in errors(tmp_path, delete("train_samples")(text))] == ["train_samples"]
