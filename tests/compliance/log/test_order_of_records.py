"""The one description of a log's order, as its three readers use it."""

from pathlib import Path
from typing import Any

import pytest

from bert.mllog import MLLog, RuleViolation
from compliance.check.checker import check_file
from compliance.log.order import left_open, own_settings, unearned_success, violations
from compliance.log.record import Record
from compliance.log.records import read_log
from compliance.log.run import LoggedRun
from compliance.watch.running import RunningLog
from tests.compliance.log_edits import Edit, delete, edit, epoch_nums, log_after, move_before, repeat
from tests.compliance.run_logs import CLOSED, counting_clock, initialise, without_chain, write_run


@pytest.fixture(scope="module")
def closed_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    return without_chain(write_run(tmp_path_factory.mktemp("closed") / "result_0.txt").read_text())


def kinds(text: str, path: Path, ruleset: str | None) -> list[tuple[str, str]]:
    path.write_text(text)
    run, found = LoggedRun(), []
    for record in read_log(path).records:
        found += [(violation.kind, violation.key) for violation in violations(run, record, ruleset)]
        run.add(record)
    return found


@pytest.mark.parametrize("ruleset", [None, "1.0.0", "5.0.0"])
def test_a_written_log_breaks_nothing_and_says_all_of_its_run(
    tmp_path: Path, closed_log: str, ruleset: str | None
) -> None:
    path = tmp_path / "result_0.txt"
    assert kinds(closed_log, path, ruleset) == []
    run = read_log(path).run
    assert [*left_open(run), *own_settings(run), *unearned_success(run, run.train_samples)] == []
    assert (run.phase, run.status, run.division, run.target) == ("done", "success", "closed", 0.72)
    assert (run.global_batch_size, run.seed, run.train_samples, run.number_of_evaluations) == (448, 1234, 450_240, 3)
    assert [samples for samples, _ in run.curve] == [150_080, 300_160, 450_240]
    assert run.schedule is not None
    assert run.schedule.interval == 150_000


BROKEN: dict[str, tuple[Edit, str, str]] = {
    "second run_start": (repeat("run_start"), "repeat", "run_start"),
    "second evaluation off schedule": (epoch_nums(150_080, 170_000), "schedule", "eval_accuracy"),
    "placeholders": (epoch_nums(1, 1, 1), "count", "eval_accuracy"),
    "percent": (edit("eval_accuracy", lambda f: f.update(value=40.0)), "value", "eval_accuracy"),
    "slow start": (edit("init_start", lambda f: f.update(time_ms=f["time_ms"] - 1_800_000)), "init time", "init_stop"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_and_the_watch_say_the_same_of_what_costs_the_result(
    tmp_path: Path, closed_log: str, name: str
) -> None:
    change, kind, key = BROKEN[name]
    text, path = change(closed_log), tmp_path / "result_0.txt"
    assert (kind, key) in kinds(text, path, "5.0.0")
    watched = RunningLog()
    for line in text.encode().splitlines():
        watched.take(line)
    assert any(complaint.startswith(f"{key}: ") for complaint in watched.complaints)
    assert any(finding.key == key for finding in check_file(path).findings)


def test_settings_that_stand_below_the_evaluations_are_checked_all_the_same(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(move_before("global_batch_size", "run_stop")(epoch_nums(150_080, 170_000)(closed_log)))
    assert "TR 24.4" in {finding.rule for finding in check_file(path).errors}


@pytest.mark.parametrize(("key", "value"), [("max_sequence_length", 128), ("opt_gradient_clip_norm", 5.0)])
def test_a_closed_run_of_its_own_settings_is_refused_before_its_clock_starts(
    tmp_path: Path, closed_log: str, key: str, value: Any
) -> None:
    log = MLLog(tmp_path / "written.txt", clock_ms=counting_clock(10))
    with pytest.raises(RuleViolation, match=f"{key}: value {value} in a closed log") as refused:
        initialise(log, "closed", CLOSED | {key: value})
    assert "run_start" not in read_log(tmp_path / "written.txt").run.first
    path = tmp_path / "result_0.txt"
    path.write_text(log_after("seed", key, value)(closed_log))
    (finding,) = check_file(path).errors
    assert finding.remedy in str(refused.value)


def test_what_is_left_open_is_told(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(delete("block_stop", -1)(closed_log))
    assert [violation.key for violation in left_open(read_log(path).run)] == ["block_start"]


def test_many_processes_may_start_the_initialisation() -> None:
    run = LoggedRun()
    for time_ms in (3000, 1000, 2000):
        run.add(Record(1, time_ms, "INTERVAL_START", "init_start", None, {}))
    assert (run.init_start_ms, run.start_ms, run.phase) == (1000, 1000, "init")
