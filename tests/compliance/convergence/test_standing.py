"""Comparison of a folder of logs with the reference."""

import re
from pathlib import Path

import pytest

from compliance.convergence.standing import standing
from tests.compliance import command
from tests.compliance.run_logs import write_run
from tests.compliance.run_series import write_series


def test_four_runs_of_ten(tmp_path: Path) -> None:
    write_series(tmp_path, [17, 16, 17, 18], failed={3})
    found = standing(tmp_path, "5.0.0")
    assert [(run.samples, run.evaluations, run.status) for run in found.runs] == [
        (2_550_016, 17, "converged"),
        (2_400_384, 16, "converged"),
        (2_550_016, 17, "converged"),
        (None, 18, "not converged"),
    ]
    assert found.outlook.verdict == "unfinished"
    assert found.passed
    said = "\n".join(found.lines())
    assert "4 logs, closed division, global batch size 448, ruleset 5.0.0" in said
    assert "reference: mean 2,414,421, minimum 2,274,732 (reference point at batch size 448)" in said


def test_a_run_in_progress_does_not_count(tmp_path: Path) -> None:
    logs = write_series(tmp_path, [17, 16, 17])
    lines = logs[2].read_text().splitlines(keepends=True)
    stop = next(n for n, line in enumerate(lines) if '"eval_accuracy"' in line)
    logs[2].write_text("".join(lines[: stop + 1]))
    (tmp_path / "result_3.txt").write_text("# recipe: not yet initialised\n")
    found = standing(tmp_path, "5.0.0")
    assert [(run.status, run.evaluations) for run in found.runs[2:]] == [("running", 1), ("running", 0)]
    assert "2 of 10 runs" in found.outlook.sentence


@pytest.mark.parametrize(
    ("evaluations", "failed", "left_out"),
    [
        ([20, 20, 18, 17, 16, 17, 18, 16, 17, 17, 16, 15], set(), ["result_0.txt", "result_11.txt"]),
        ([3, 3, *[17] * 10], {0, 1}, ["result_0.txt", "result_1.txt"]),  # early aborts do not count as fast
    ],
)
def test_of_twelve_runs_the_window_counts_that_a_submission_takes(
    tmp_path: Path, evaluations: list[int], failed: set[int], left_out: list[str]
) -> None:
    write_series(tmp_path, evaluations, failed=failed)
    found = standing(tmp_path, "5.0.0")
    assert [run.path.name for run in found.runs] == [f"result_{number}.txt" for number in range(12)]
    assert [run.path.name for run in found.runs if not run.chosen] == left_out
    assert found.outlook.verdict == "pass"
    assert "\n".join(found.lines()).count("not among the runs that a submission takes") == 2


def test_the_command(tmp_path: Path) -> None:
    write_series(tmp_path, [15, 14, 15, 14, 15, 14, 15, 14, 15, 14])
    status, text = command.run("convergence", tmp_path)
    assert (status, "below the minimum of 2,274,732" in text) == (1, True)
    status, text = command.run("convergence", tmp_path, "--ruleset", "2.0.0")
    assert (status, "batch sizes 256 and 3072" in text) == (1, True)
    assert re.search(r"result_0\.txt +2,250,304 +15\n", text)


def test_open_runs_pass_without_a_reference(tmp_path: Path) -> None:
    write_run(tmp_path / "result_0.txt", division="open")
    found = standing(tmp_path, "5.0.0")
    assert (found.division, found.outlook.verdict, found.passed) == ("open", "no reference", True)


def test_closed_runs_above_the_largest_point_do_not(tmp_path: Path) -> None:
    write_series(tmp_path, [17] * 3, global_batch_size=20_000)
    found = standing(tmp_path, "5.0.0")
    assert (found.outlook.verdict, found.passed) == ("no reference", False)


def test_no_logs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        standing(tmp_path / "nowhere", "5.0.0")
    with pytest.raises(ValueError, match=r"no result_<n>\.txt in it"):
        standing(tmp_path, "5.0.0")
    (tmp_path / "result_0.txt").write_text("")
    with pytest.raises(ValueError, match="no log says submission_division yet"):
        standing(tmp_path, "5.0.0")


def test_an_ended_log_without_a_batch_size(tmp_path: Path) -> None:
    path = write_run(tmp_path / "result_0.txt")
    path.write_text("\n".join(line for line in path.read_text().splitlines() if '"global_batch_size"' not in line))
    with pytest.raises(ValueError, match=r"result_0\.txt: no global_batch_size, expected an integer > 0"):
        standing(tmp_path, "5.0.0")
