"""The shared description of the order of records in a log, as its three readers use it."""

from pathlib import Path

import pytest

from bert.log.mllog import MLLog, RuleViolation
from compliance.check.checker import check_file
from compliance.log.order import left_open, own_settings, unearned_success, violations
from compliance.log.reader import read_log
from compliance.log.record import Record
from compliance.log.run import LoggedRun
from tests.compliance.log_edits import epoch_nums, in_turn, move_before, without_metadata
from tests.compliance.run_logs import CLOSED, counting_clock, initialise


@pytest.fixture
def path(tmp_path: Path, closed_log: str) -> Path:
    path = tmp_path / "result_0.txt"
    path.write_text(closed_log)
    return path


def kinds(path: Path, ruleset: str | None) -> list[tuple[str, str]]:
    run, found = LoggedRun(), []
    for record in read_log(path).records:
        found += [(violation.kind, violation.key) for violation in violations(run, record, ruleset)]
        run.add(record)
    return found


@pytest.mark.parametrize("ruleset", [None, "1.0.0", "5.0.0"])
def test_a_written_log_breaks_nothing_and_says_all_of_its_run(path: Path, ruleset: str | None) -> None:
    assert kinds(path, ruleset) == []
    run = read_log(path).run
    assert [*left_open(run), *own_settings(run), *unearned_success(run, run.train_samples)] == []
    assert (run.phase, run.status, run.division, run.target) == ("done", "success", "closed", 0.72)
    assert (run.global_batch_size, run.seed, run.train_samples, run.number_of_evaluations) == (448, 1234, 450_240, 3)
    assert [samples for samples, _ in run.curve] == [150_080, 300_160, 450_240]
    assert run.schedule is not None
    assert run.schedule.interval == 150_000


def test_settings_that_stand_below_the_evaluations_are_checked_all_the_same(path: Path) -> None:
    late = in_turn(epoch_nums(150_080, 170_000), move_before("global_batch_size", "run_stop"))
    path.write_text(late(path.read_text()))
    assert "TR 24.4" in {finding.rule for finding in check_file(path).errors}


def test_a_closed_run_of_its_own_settings_is_refused_before_its_clock_starts(tmp_path: Path) -> None:
    log = MLLog(tmp_path / "written.txt", clock_ms=counting_clock(10))
    with pytest.raises(RuleViolation, match="max_sequence_length: value 128 in a closed log"):
        initialise(log, "closed", CLOSED | {"max_sequence_length": 128})
    assert "run_start" not in read_log(tmp_path / "written.txt").run.first


def test_many_processes_may_start_the_initialisation() -> None:
    run = LoggedRun()
    for time_ms in (3000, 1000, 2000):
        run.add(Record(1, time_ms, "INTERVAL_START", "init_start", None, {}))
    assert (run.init_start_ms, run.start_ms, run.phase) == (1000, 1000, "init")


@pytest.mark.parametrize(("ruleset", "expected"), [("5.0.0", []), ("3.0.0", [("metadata", "block_start")] * 3)])
def test_a_count_of_samples_may_replace_epochs_in_later_rulesets(
    path: Path, ruleset: str, expected: list[tuple[str, str]]
) -> None:
    edits = [without_metadata("block_start", "first_epoch_num", nth) for nth in range(3)]
    path.write_text(in_turn(*edits)(path.read_text()))
    assert kinds(path, ruleset) == expected
