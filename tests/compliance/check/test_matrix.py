import json
from pathlib import Path

import pytest

from compliance.check.matrix import Acceptance, acceptance, table
from compliance.log import rules
from tests.compliance.command import run
from tests.compliance.log_edits import Edit, delete, in_turn, later, repeat, value


@pytest.fixture
def path(tmp_path: Path, closed_log: str) -> Path:
    path = tmp_path / "result_0.txt"
    path.write_text(closed_log)
    return path


def accepted_by(rows: list[Acceptance]) -> list[str]:
    return [row.verdict.ruleset for row in rows if row.verdict.official == "pass"]


def test_written_log_is_accepted_by_all(path: Path) -> None:
    rows = acceptance(path)
    assert tuple(row.verdict.ruleset for row in rows) == rules.RULESETS
    assert all(row.verdict.official == row.verdict.ours == "pass" for row in rows)
    assert not any(row.reasons for row in rows)


def samples_instead_of_epochs(text: str) -> str:
    return text.replace('"first_epoch_num": 1, "epoch_count": 1, ', "").replace('"first_epoch_num": 1, ', "")


@pytest.mark.parametrize(
    ("change", "accepting", "keys"),
    [
        (delete("opt_epsilon"), rules.RULESETS[3:], ["opt_epsilon"]),
        (delete("opt_lamb_epsilon"), rules.RULESETS[:3], ["opt_lamb_epsilon"]),
        (delete("weights_initialization"), ("1.0.0", *rules.RULESETS[4:]), ["weights_initialization"]),
        (delete("submission_status"), ("4.1.0", "5.0.0"), ["submission_status"]),
        (delete("submission_org"), ("5.0.0",), ["submission_org"]),
        (delete("global_batch_size"), (), ["global_batch_size"]),
        (delete("seed"), rules.RULESETS, []),
        (samples_instead_of_epochs, ("4.0.0", "4.1.0", "5.0.0"), ["block_start", "block_stop"]),
        (value("eval_accuracy", None, -1), (), ["eval_accuracy"]),  # the official checker crashes
        (in_turn(delete("opt_epsilon"), repeat("run_stop")), rules.RULESETS[3:], ["opt_epsilon"]),  # it minds only one
    ],
)
def test_each_fault_keeps_out_the_rulesets_that_mind_it(
    path: Path, change: Edit, accepting: tuple[str, ...], keys: list[str]
) -> None:
    path.write_text(change(path.read_text()))
    rows = acceptance(path)
    assert tuple(accepted_by(rows)) == accepting
    for row in rows:
        assert {reason.key for reason in row.reasons} == (set() if row.verdict.official == "pass" else {*keys})


def test_init_of_an_open_log_was_shorter_before_2_0(path: Path, open_log: str) -> None:
    path.write_text(later("init_start", -60 * 60_000)(open_log))
    rows = acceptance(path)
    assert accepted_by(rows) == [*rules.RULESETS[2:]]
    assert "initialisation took 60.0 min; expected less than 30 min" in rows[1].reasons[0].found


def test_a_line_that_cannot_be_read_is_the_reason(path: Path) -> None:
    path.write_text(path.read_text() + ":::MLLOG {\n")
    for row in acceptance(path):
        assert row.verdict.official == "fail"
        assert ["broken JSON" in reason.found for reason in row.reasons] == [True]


def test_a_second_run_start_keeps_none_out_but_ours(path: Path) -> None:
    path.write_text(repeat("run_start")(path.read_text()))
    rows = acceptance(path)
    assert {(row.verdict.official, row.verdict.ours, row.reasons) for row in rows} == {("pass", "fail", ())}


def test_command(path: Path) -> None:
    path.write_text(delete("opt_epsilon", "opt_lamb_beta_1", "weights_initialization")(path.read_text()))
    status, said = run("check", "--matrix", path)
    lines = said.splitlines()
    assert (status, lines) == (1, table(acceptance(path)))
    assert lines[0] == str(path)
    assert lines[1].split()[:3] == ["ruleset", "official", "ours"]
    assert lines[2].split()[:3] == ["1.0.0", "fail", "fail"]
    reason = "no record; expected one record"
    assert lines[2].endswith(f"opt_epsilon: {reason}")
    assert lines[3].strip() == f"opt_lamb_beta_1: {reason}"
    assert lines[3].index("opt_lamb") == lines[2].index("opt_epsilon")
    status, said = run("check", "--matrix", "--json", path)
    entries = json.loads(said)
    assert (status, [entry["ruleset"] for entry in entries]) == (1, [*rules.RULESETS])
    reasons = [f"opt_epsilon: {reason}", f"opt_lamb_beta_1: {reason}"]
    head = {"file": str(path), "ruleset": "1.0.0", "official": "fail", "ours": "fail"}
    assert entries[0] == head | {"reasons": reasons}
