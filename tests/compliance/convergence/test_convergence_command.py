"""The command `convergence`: the runs of a folder, compared with the reference."""

import re
from pathlib import Path

from tests.compliance.command import run
from tests.compliance.run_logs import write_run
from tests.compliance.run_series import write_series


def test_an_unfinished_set_with_a_run_in_progress(tmp_path: Path) -> None:
    logs = write_series(tmp_path, [17, 16, 17, 18, 17], failed={3})
    text = logs[4].read_text()
    logs[4].write_text(text[: text.index("\n", text.index("eval_accuracy")) + 1])
    status, said = run("convergence", tmp_path)
    assert status == 0
    assert "4 of 10 runs, 1 of them not converged" in said
    assert re.search(r"pass if the 6 missing runs converge at evaluation 15 \(2,250,304\)", said)


def test_a_set_that_fails(tmp_path: Path) -> None:
    write_series(tmp_path, [15, 14, 15, 14, 15, 14, 15, 14, 15, 14])
    status, said = run("convergence", tmp_path)
    assert (status, "minimum 2,274,732" in said) == (1, True)
    status, said = run("convergence", tmp_path, "--ruleset", "2.0.0")
    assert (status, "batch sizes 256 and 3072" in said) == (1, True)


def test_of_twelve_runs_the_window_counts_that_a_submission_takes(tmp_path: Path) -> None:
    write_series(tmp_path, [3, 3, *[17] * 10], failed={0, 1})  # early aborts do not count as fast
    status, said = run("convergence", tmp_path)
    assert (status, "10 runs, mean 2,550,016 samples" in said) == (0, True)


def test_without_a_reference_only_open_runs_pass(tmp_path: Path) -> None:
    write_run(tmp_path / "open" / "result_0.txt", division="open")
    write_series(tmp_path / "closed", [17] * 3, global_batch_size=20_000)
    assert run("convergence", tmp_path / "open")[0] == 0
    assert run("convergence", tmp_path / "closed")[0] == 1


def test_logs_without_a_common_batch_size_are_refused(tmp_path: Path) -> None:
    logs = write_series(tmp_path, [17, 17])
    logs[1].write_text("\n".join(line for line in logs[1].read_text().split("\n") if "global_batch_size" not in line))
    assert run("convergence", tmp_path)[0] == 0
    logs[1].write_text(logs[0].read_text().replace('"value": 448', '"value": 512'))
    status, said = run("convergence", tmp_path)
    assert (status, "global_batch_size" in said) == (2, True)
    assert run("convergence", tmp_path / "nowhere")[0] == 2
