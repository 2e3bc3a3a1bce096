"""Automatic choice of the ruleset: the newest one that accepts the logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from compliance.check.checker import check_log
from compliance.log.reader import read_log
from compliance.log.rules import AUTO
from tests.compliance.command import run
from tests.compliance.log_edits import Edit, delete, in_turn, value
from tests.compliance.run_logs import without_chain
from tests.compliance.run_series import write_log, write_series
from tests.compliance.submission.submission_trees import SYSTEM, benchmark_folder, write_submission

OF_2_1 = delete("opt_lamb_epsilon")
"""Edit that resembles published logs of round 2.1, whose rule file was changed later."""
LATE = in_turn(OF_2_1, value("eval_accuracy", 0.7, -1))


def chosen(path: Path, text: str, edit: Edit) -> tuple[str, str]:
    path.write_text(edit(text))
    verdict = check_log(read_log(path), AUTO)
    return verdict.ruleset, verdict.ours


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda text: text, ("5.0.0", "pass")),
        (OF_2_1, ("2.0.0", "pass")),
        (delete("seed"), ("4.0.0", "pass")),
        (LATE, ("2.0.0", "fail")),  # one error under this ruleset, two under later ones
        (value("submission_division", "Closed"), ("5.0.0", "fail")),
    ],
)
def test_the_newest_ruleset_that_accepts_a_log_is_taken(
    tmp_path: Path, closed_log: str, edit: Edit, expected: tuple[str, str]
) -> None:
    assert chosen(tmp_path / "result_0.txt", without_chain(closed_log), edit) == expected


def test_logs_of_this_repository_are_held_to_the_newest(tmp_path: Path) -> None:
    log = write_log(tmp_path / "result_0.txt", 0).read_text()
    assert chosen(tmp_path / "result_0.txt", log, delete("seed")) == ("5.0.0", "fail")


def test_a_folder_is_checked_under_one_ruleset_and_the_total_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "results" / SYSTEM / "bert"
    for number, path in enumerate(write_series(folder, [17] * 3)):
        text = without_chain(path.read_text())
        path.write_text(delete("seed")(text) if number == 1 else text)
    status, said = run("check", folder)
    assert status == 0
    verdicts = [line for line in said.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert all("ruleset 4.0.0" in line for line in verdicts)
    assert said.splitlines()[-1].endswith("; checked under ruleset 4.0.0")
    status, said = run("check", folder, "--ruleset", "5.0.0")
    assert (status, "FAIL" in said) == (1, True)
    assert run("summary", folder)[0] == 0
    assert '"ruleset": "4.0.0"' in run("report", folder, "--format", "json")[1]


def test_a_round_is_a_folder_of_submissions(tmp_path: Path) -> None:
    for org in ("Example", "Other"):
        write_submission(tmp_path / org, runs=2, org=org)
    (tmp_path / "NoBert" / "results" / "node" / "resnet").mkdir(parents=True)
    (tmp_path / "NoBert" / "systems").mkdir()
    (tmp_path / "again").symlink_to("Example")
    status, said = run("check", tmp_path, "--json")
    assert status == 1  # each organization has two of the required ten logs
    for org in ("Example", "Other"):
        assert f'"file": "{benchmark_folder(tmp_path / org)}"' in said
    assert "again" not in said
    (tmp_path / "empty" / "NoBert" / "results").mkdir(parents=True)
    (tmp_path / "empty" / "NoBert" / "systems").mkdir()
    status, said = run("check", tmp_path / "empty")
    assert (status, "no logs" in said) == (2, True)
