import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.mllog import MLLog, RuleViolation, evaluation_interval, evaluation_samples
from compliance.check.checker import check_file
from compliance.log.records import read_log
from tests.compliance.run_logs import CLOSED, OPEN, counting_clock, initialise, train, write_run


@pytest.fixture
def log(tmp_path: Path) -> MLLog:
    return MLLog(tmp_path / "result_0.txt", clock_ms=counting_clock())


def lines_of(log_file: Path) -> list[str]:
    """The lines without the digests, which have a test of their own."""
    chain = ("# chain: ", "# digest: ", "# digest at the end: ")
    return [line for line in log_file.read_text().splitlines() if not line.startswith(chain)]


def test_order_of_the_written_log(tmp_path: Path) -> None:
    records = read_log(write_run(tmp_path / "result_0.txt")).records
    keys = [record.key for record in records if record.key != "weights_initialization"]
    settings = [key for key in CLOSED if key != "opt_lamb_epsilon"]
    assert keys[:2] == ["cache_clear", "init_start"]
    assert set(settings) <= set(keys[2 : keys.index("init_stop")])
    interval = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    assert keys[keys.index("run_start") + 1 :] == [*interval * 3, "train_samples", "eval_samples", "run_stop"]
    assert len([record for record in records if record.key == "weights_initialization"]) == 398


def test_both_names_of_epsilon_are_written(tmp_path: Path) -> None:
    text = read_log(write_run(tmp_path / "result_0.txt"))
    assert [text.all(key)[0].value for key in ("opt_lamb_epsilon", "opt_epsilon")] == [1e-6, 1e-6]


def test_records_name_the_caller_in_this_repository(log: MLLog, tmp_path: Path) -> None:
    frame = inspect.currentframe()
    assert frame
    log.cache_clear(True)
    log.init_start()
    log.event("seed", 1)
    first = frame.f_lineno - 3
    records = read_log(tmp_path / "result_0.txt").records
    assert [record.logged_at for record in records] == [f"tests/bert/test_mllog.py:{first + n}" for n in range(3)]


def test_plain_lines_stand_between_the_records(log: MLLog, tmp_path: Path) -> None:
    log.header({"recipe": "tiny_cpu", "config.optimizer.learning_rate": 0.001})
    log.line("step 1")
    log.cache_clear(True)
    log.line("naïve ✓ \udc80")
    assert lines_of(tmp_path / "result_0.txt")[:3] == [
        "# recipe: tiny_cpu",
        "# config.optimizer.learning_rate: 0.001",
        "step 1",
    ]
    parsed = read_log(tmp_path / "result_0.txt")
    assert parsed.header == {"recipe": "tiny_cpu", "config.optimizer.learning_rate": "0.001"}
    assert [record.line for record in parsed.records] == [5]


@pytest.mark.parametrize("text", [":::MLLOG {}", "a\nb", "a\rb", "0: :::MLLOG"])
def test_plain_lines_that_would_break_the_log_are_refused(log: MLLog, tmp_path: Path, text: str) -> None:
    with pytest.raises(RuleViolation, match="expected one line"):
        log.line(text)
    with pytest.raises(RuleViolation, match="expected one line"):
        log.header({text: "value"})
    assert not lines_of(tmp_path / "result_0.txt")


def test_a_value_of_the_head_is_one_line_whatever_it_holds(log: MLLog, tmp_path: Path) -> None:
    log.header({"data.train": "/data/a\nb\r\x1b[2J\udcff", "recipe": ":::MLLOG {}"})
    written = [line for line in lines_of(tmp_path / "result_0.txt") if not line.startswith(("# chain", "# digest"))]
    assert written == [r"# data.train: /data/a\nb\r\x1b[2J\udcff", r"# recipe: \x3a::MLLOG {}"]


def test_nothing_goes_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "result_0.txt")
    assert capsys.readouterr() == ("", "")


def test_existing_file_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text("precious\n")
    with pytest.raises(ValueError, match=r"already there.*choose another run number"):
        MLLog(path)
    assert path.read_text() == "precious\n"


def test_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be created.*choose another results folder"):
        MLLog(tmp_path / "file" / "result_0.txt")


def test_folders_are_created(tmp_path: Path) -> None:
    MLLog(tmp_path / "a" / "b" / "result_0.txt").close()
    assert (tmp_path / "a" / "b" / "result_0.txt").exists()


def test_other_ranks_write_nothing_and_check_nothing() -> None:
    with MLLog(None) as log:
        log.header({"a": 1})
        log.line("x")
        initialise(log, "open", {"unknown": 1})
        log.eval_accuracy(2.0, -1)
        log.run_stop("success", samples=0, eval_samples=0)
        log.abort()


def test_two_logs_do_not_mix(tmp_path: Path) -> None:
    with MLLog(tmp_path / "result_0.txt") as first, MLLog(tmp_path / "result_1.txt") as second:
        first.cache_clear(True)
        second.cache_clear(False)
    assert [read_log(tmp_path / f"result_{n}.txt").records[0].value for n in (0, 1)] == [True, False]
    assert len(lines_of(tmp_path / "result_0.txt")) == 1


# Every refusal: what the run does, and words of the message.


def closed_run(log: MLLog, **changes: Any) -> None:
    initialise(log, "closed", CLOSED | changes)


def started(log: MLLog) -> None:
    initialise(log, "open")


def in_evaluation(log: MLLog) -> None:
    started(log)
    log.eval_start(1024)


def finish(log: MLLog, accuracies: list[float], samples: int | None = None) -> None:
    started(log)
    trained = train(log, OPEN, accuracies)
    log.run_stop("success", samples=trained if samples is None else samples, eval_samples=500)


VIOLATIONS: dict[str, tuple[Callable[[MLLog], object], str]] = {
    "unknown key": (lambda log: log.event("global_batchsize", 4), "did you mean global_batch_size"),
    "wrong event type": (lambda log: log.event("init_start"), "expected INTERVAL_START"),
    "too early": (lambda log: log.seed(1), "seed: logged before init_start, expected between init_start and init_stop"),
    "run_start too early": (lambda log: log.run_start(), "expected between init_stop and run_start"),
    "second run_start": (lambda log: (started(log), log.run_start()), "expected between init_stop and run_start"),
    "second init_start": (lambda log: (log.init_start(), log.init_start()), "still open, expected init_stop first"),
    "second seed": (lambda log: (log.init_start(), log.seed(1), log.seed(1)), "seed: logged again"),
    "seed no integer": (lambda log: (log.init_start(), log.event("seed", "1")), "expected an integer"),
    "value where none belongs": (lambda log: log.start("init_start", 3), "value 3, expected none"),
    "not a number": (
        lambda log: (log.init_start(), log.hyperparameters({"opt_lamb_epsilon": float("nan")})),
        "a number > 0",
    ),
    "unknown division": (lambda log: initialise(log, "Closed", dict(CLOSED)), "'Closed', expected 'closed' or 'open'"),
    "empty organisation": (
        lambda log: (log.init_start(), log.submission(division="open", org=" ", platform="x")),
        "submission_org: value ' ', expected text",
    ),
    "hyperparameter missing": (
        lambda log: initialise(log, "open", {k: v for k, v in OPEN.items() if k != "start_warmup_step"}),
        "not logged yet: start_warmup_step",
    ),
    "closed with another target": (
        lambda log: closed_run(log, quality_target=0.7),
        "expected 0.72 .*set the division to open",
    ),
    "interval shorter than a batch": (
        lambda log: initialise(log, "open", OPEN | {"eval_interval_samples": 31}),
        "expected at least global_batch_size 32",
    ),
    "closed off schedule": (lambda log: closed_run(log, eval_interval_samples=1000), "expected 150000"),
    "closed with a small model": (
        lambda log: (initialise_small(log), log.init_stop()),
        "46 tensors in a closed run, expected the 398 of BERT-Large",
    ),
    "own file and line": (lambda log: log.start("init_start", file="x"), "filled in by the log itself"),
    "metadata that is no JSON": (
        lambda log: log.start("init_start", clock=object()),
        "expected text or a finite number",
    ),
    "block without samples": (lambda log: (started(log), log.start("block_start")), "no metadata first_epoch_num"),
    "second block": (lambda log: (started(log), log.block_start(0), log.block_start(0)), "expected block_stop first"),
    "block_stop alone": (lambda log: (started(log), log.block_stop(5)), "expected block_start first"),
    "samples decrease": (lambda log: (started(log), log.block_start(9), log.block_stop(8)), "expected at least 9"),
    "early evaluation": (
        lambda log: (started(log), log.eval_start(992)),
        "at 992 samples, expected evaluation 1 at 1024",
    ),
    "skipped evaluation": (lambda log: (started(log), log.eval_start(2016)), "at 2016 .*evaluation 1 at 1024"),
    "accuracy outside an evaluation": (
        lambda log: (started(log), log.eval_accuracy(0.5, 1024)),
        "no evaluation is open",
    ),
    "accuracy in percent": (lambda log: (in_evaluation(log), log.eval_accuracy(72.0, 1024)), "expected a fraction"),
    "accuracy of other samples": (lambda log: (in_evaluation(log), log.eval_accuracy(0.5, 1000)), "expected 1024"),
    "two accuracies": (
        lambda log: (in_evaluation(log), log.eval_accuracy(0.5, 1024), log.eval_accuracy(0.5, 1024)),
        "a second time for one evaluation",
    ),
    "evaluation without result": (
        lambda log: (in_evaluation(log), log.eval_stop(1024)),
        "expected eval_accuracy first",
    ),
    "end in a block": (
        lambda log: (started(log), log.block_start(0), log.run_stop("aborted", samples=0, eval_samples=5)),
        "block_start: never closed, expected block_stop",
    ),
    "success below target": (lambda log: finish(log, [0.1, 0.2999]), "0.29990, expected at least the target 0.3"),
    "success without evaluation": (lambda log: finish(log, []), "no evaluation, expected at least the target 0.3"),
    "success after a lapse": (lambda log: finish(log, [0.4, 0.1]), "accuracy 0.10000"),
    "other train_samples": (lambda log: finish(log, [0.4], samples=4096), "train_samples: value 4096, expected 1024"),
    "unknown status": (
        lambda log: (started(log), log.run_stop("done", samples=0, eval_samples=0)),  # type: ignore[arg-type]
        "status is 'done'",
    ),
    "after the end": (lambda log: (finish(log, [0.4]), log.block_start(0)), "logged after run_stop"),
}


def initialise_small(log: MLLog) -> None:
    log.cache_clear(True)
    log.init_start()
    log.submission(division="closed", org="a", platform="b")
    log.seed(1)
    log.hyperparameters(CLOSED)
    log.weights_initialization(2)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violations_raise_at_once_and_write_nothing(tmp_path: Path, name: str) -> None:
    act, message = VIOLATIONS[name]
    path = tmp_path / "result_0.txt"
    log = MLLog(path, clock_ms=counting_clock())
    with pytest.raises(RuleViolation, match=message):
        act(log)
    assert not read_log(path).problems
    written = len(lines_of(path))
    log.abort()  # whatever went wrong, the log can still be completed
    log.close()
    keys = [record.key for record in read_log(path).records]
    assert keys[-1] == "run_stop" if "init_start" in keys else len(keys) == written


def test_refused_end_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    log = MLLog(path, clock_ms=counting_clock())
    with pytest.raises(RuleViolation):
        finish(log, [0.1])
    assert read_log(path).first("train_samples") is None
    log.run_stop("aborted", samples=1024, eval_samples=500)
    assert read_log(path).all("eval_samples")[0].value == 500


def test_init_limit_of_both_divisions(tmp_path: Path) -> None:
    minute = 60_000 // 18  # 18 records from init_start to init_stop in the open log, without the tensors
    for name, division, step_ms, fails in (("a", "open", minute, False), ("b", "closed", 5 * minute, True)):
        log = MLLog(tmp_path / name, clock_ms=counting_clock(step_ms))
        if fails:
            with pytest.raises(RuleViolation, match=r"initialisation took .* expected less than 30"):
                initialise(log, division)
        else:
            initialise(log, division)


def test_clock_that_goes_back_is_held(tmp_path: Path) -> None:
    times = iter([100, 50, 200])
    log = MLLog(tmp_path / "result_0.txt", clock_ms=lambda: next(times))
    log.cache_clear(True)
    log.init_start()
    log.seed(1)
    assert [record.time_ms for record in read_log(tmp_path / "result_0.txt").records] == [100, 100, 200]


def test_abort_keeps_the_count_of_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    with MLLog(path) as log:
        started(log)
        log.block_start(0)
        log.abort(samples=640)
        log.abort()  # a second signal
    parsed = read_log(path)
    assert parsed.all("train_samples")[0].value == 640
    assert parsed.all("block_stop")[0].metadata["samples_count"] == 640
    assert len(parsed.all("run_stop")) == 1


def fail_in_evaluation(path: Path) -> None:
    with MLLog(path) as log:
        started(log)
        log.start("epoch_start", epoch_num=0)
        log.block_start(0)
        log.eval_start(1024)
        raise ZeroDivisionError


def test_abort_closes_every_interval(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    with pytest.raises(ZeroDivisionError):
        fail_in_evaluation(path)
    records = read_log(path).records
    tail = ["eval_stop", "block_stop", "epoch_stop", "train_samples", "eval_samples", "run_stop"]
    assert [record.key for record in records[-6:]] == tail
    assert records[-1].metadata["status"] == "aborted"


def test_abort_before_the_start_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    with MLLog(path) as log:
        log.abort()
    assert path.read_text() == ""


def test_overlapped_evaluation_is_allowed(log: MLLog, tmp_path: Path) -> None:
    started(log)
    log.block_start(0)
    log.eval_start(1024)
    log.eval_accuracy(0.5, 1024)
    log.eval_stop(1024)
    log.block_stop(1100)
    log.run_stop("success", samples=1024, eval_samples=500)
    assert check_file(tmp_path / "result_0.txt").passed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_full_disk_is_reported_as_such(tmp_path: Path) -> None:
    script = (
        "import os; from pathlib import Path; from bert.mllog import MLLog\n"
        "try:\n"
        f"    with MLLog(Path({str(tmp_path / 'r.txt')!r})) as log:\n"
        "        log.cache_clear(True); log.init_start()\n"
        "        os.dup2(os.open('/dev/full', os.O_WRONLY), log._file._file.fileno())\n"
        "        log.seed(1)\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "No space left on device\n"), run.stderr
    assert [record.key for record in read_log(tmp_path / "r.txt").records] == ["cache_clear", "init_start"]


@given(
    interval=st.integers(1, 5000),
    batch=st.integers(1, 3000),
    accuracies=st.lists(st.floats(0, 0.99), max_size=6),
    last=st.floats(0.6, 0.99),
    seed=st.integers(0, 2**63 - 1),
    rate=st.floats(1e-8, 1.0),
    org=st.text(min_size=1).filter(str.strip),
)
def test_any_open_run_comes_back_and_passes(
    tmp_path_factory: pytest.TempPathFactory,
    interval: int,
    batch: int,
    accuracies: list[float],
    last: float,
    seed: int,
    rate: float,
    org: str,
) -> None:
    settings = OPEN | {
        "global_batch_size": min(batch, interval),
        "eval_interval_samples": interval,
        "quality_target": 0.6,
    }
    settings["opt_base_learning_rate"] = rate
    path = tmp_path_factory.mktemp("log") / "result_0.txt"
    with MLLog(path, clock_ms=counting_clock(1)) as log:
        log.cache_clear(False)
        log.init_start()
        log.submission(division="open", org=org, platform="p")
        log.seed(seed)
        log.hyperparameters(settings)
        log.weights_initialization(1)
        log.init_stop()
        log.run_start()
        samples = train(log, settings, [*accuracies, last])
        log.run_stop("success", samples=samples, eval_samples=1)
    parsed = read_log(path)
    assert not parsed.problems
    assert [record.value for record in parsed.all("eval_accuracy")] == [*accuracies, last]
    assert parsed.all("seed")[0].value == seed
    assert parsed.all("opt_base_learning_rate")[0].value == rate
    assert parsed.all("submission_org")[0].value == org
    for line in lines_of(path):
        assert json.loads(line.removeprefix(":::MLLOG "))["namespace"] == ""


def test_schedule_is_offered_to_the_trainer() -> None:
    assert evaluation_interval(3072) == 175_000
    assert evaluation_samples(1, 175_000, 3072) == 175_104
