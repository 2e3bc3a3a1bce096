import json
import subprocess
import sys
from pathlib import Path

import pytest

from compliance.check.matrix import acceptance, table
from compliance.log import rules
from tests.compliance.run_logs import without_chain, write_run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = write_run(tmp_path / "result_0.txt")
    path.write_text(without_chain(path.read_text()))
    return path


def drop(path: Path, *keys: str) -> None:
    kept = [line for line in path.read_text().splitlines(True) if not any(f'"{key}"' in line for key in keys)]
    path.write_text("".join(kept))


def accepted_by(path: Path) -> set[str]:
    return {row.verdict.ruleset for row in acceptance(path) if row.verdict.official == "pass"}


def test_written_log_is_accepted_by_all(path: Path) -> None:
    rows = acceptance(path)
    assert tuple(row.verdict.ruleset for row in rows) == rules.RULESETS
    assert all(row.verdict.official == row.verdict.ours == "pass" for row in rows)
    assert not any(row.reasons for row in rows)


@pytest.mark.parametrize(
    ("keys", "accepting"),
    [
        (["opt_epsilon"], rules.RULESETS[3:]),
        (["opt_lamb_epsilon"], rules.RULESETS[:3]),
        (["weights_initialization"], ["1.0.0", *rules.RULESETS[4:]]),
        (["submission_status"], ["4.1.0", "5.0.0"]),
        (["submission_org"], ["5.0.0"]),
        (["global_batch_size"], []),
        (["seed"], rules.RULESETS),
    ],
)
def test_each_missing_key_keeps_out_the_rulesets_that_ask_for_it(
    path: Path, keys: list[str], accepting: list[str]
) -> None:
    drop(path, *keys)
    assert accepted_by(path) == {*accepting}
    for row in acceptance(path):
        assert [reason.key for reason in row.reasons] == ([] if row.verdict.official == "pass" else keys)


def test_init_of_an_open_log_was_shorter_before_2_0(tmp_path: Path) -> None:
    slow = write_run(tmp_path / "open.txt", "open")
    text = without_chain(slow.read_text())
    line = next(line for line in text.splitlines(True) if '"init_start"' in line)
    time_ms = json.loads(line.partition(" ")[2])["time_ms"]
    slow.write_text(text.replace(line, line.replace(str(time_ms), str(time_ms - 60 * 60_000))))
    rows = {row.verdict.ruleset: row for row in acceptance(slow)}
    assert accepted_by(slow) == {*rules.RULESETS[2:]}
    assert "initialisation took 60.0 min; expected less than 30 min" in rows["1.1.0"].reasons[0].found


def test_samples_count_in_place_of_epochs(path: Path) -> None:
    path.write_text(
        path.read_text().replace('"first_epoch_num": 1, "epoch_count": 1, ', "").replace('"first_epoch_num": 1, ', "")
    )
    assert accepted_by(path) == {"4.0.0", "4.1.0", "5.0.0"}
    keys = {reason.key for row in acceptance(path) for reason in row.reasons}
    assert keys == {"block_start", "block_stop"}


def test_a_line_that_cannot_be_read_is_the_reason(path: Path) -> None:
    path.write_text(path.read_text() + ":::MLLOG {\n")
    for row in acceptance(path):
        assert row.verdict.official == "fail"
        assert [reason.key for reason in row.reasons] == [""]
        assert "broken JSON" in row.reasons[0].found


def test_a_second_run_start_keeps_none_out_but_ours(path: Path) -> None:
    line = next(line for line in path.read_text().splitlines(True) if '"run_start"' in line)
    path.write_text(path.read_text().replace(line, line + line))
    rows = acceptance(path)
    assert {row.verdict.official for row in rows} == {"pass"}
    assert {row.verdict.ours for row in rows} == {"fail"}
    assert not any(row.reasons for row in rows)


def test_only_what_the_official_checker_minds_is_a_reason(path: Path) -> None:
    drop(path, "opt_epsilon")
    line = next(line for line in path.read_text().splitlines(True) if '"run_stop"' in line)
    path.write_text(path.read_text().replace(line, line + line))
    row = acceptance(path)[0]
    assert {finding.key for finding in row.verdict.errors} == {"opt_epsilon", "run_stop"}
    assert [reason.key for reason in row.reasons] == ["opt_epsilon"]


def test_a_crash_of_the_official_checker_is_explained(path: Path) -> None:
    path.write_text(path.read_text().replace('"value": 0.756', '"value": null'))
    for row in acceptance(path):
        assert row.verdict.official == "fail"
        assert [reason.key for reason in row.reasons] == ["eval_accuracy"]


def test_table_has_a_line_a_ruleset_and_a_reason(path: Path) -> None:
    drop(path, "opt_epsilon", "opt_lamb_beta_1")
    lines = table(acceptance(path))
    assert lines[0] == str(path)
    assert lines[1].split()[:3] == ["ruleset", "official", "ours"]
    assert lines[2].split()[:3] == ["1.0.0", "fail", "fail"]
    reason = "no record; expected one record"
    assert lines[2].endswith(f"opt_epsilon: {reason}")
    assert lines[3].strip() == f"opt_lamb_beta_1: {reason}"
    assert lines[3].index("opt_lamb") == lines[2].index("opt_epsilon")
    assert len(lines) == 2 + 3 * 2 + 6


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "compliance", *arguments], capture_output=True, text=True, check=False)


def test_command(path: Path) -> None:
    drop(path, "opt_epsilon")
    shown = command("check", "--matrix", str(path))
    assert (shown.returncode, shown.stdout) == (0, "\n".join(table(acceptance(path))) + "\n")
    entries = json.loads(command("check", "--matrix", "--json", str(path)).stdout)
    assert [entry["ruleset"] for entry in entries] == [*rules.RULESETS]
    assert entries[0] == {
        "file": str(path),
        "ruleset": "1.0.0",
        "official": "fail",
        "ours": "fail",
        "reasons": ["opt_epsilon: no record; expected one record"],
    }
    drop(path, "run_start")
    assert command("check", "--matrix", str(path)).returncode == 1
