"""Writing a run's log: the number of its file, the order of its records, and calls that would break the rules."""

import importlib.metadata
import inspect
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from mlperf_logging.mllog.mllog import MLLogger

from bert.configuration.recipes import tiny_cpu
from bert.log.mllog import MLLog, RuleViolation
from bert.log.result_files import choose_files, create_log, provenance
from bert.parallel.mesh import Mesh
from compliance.log.reader import read_log
from tests.compliance.run_logs import OPEN, counting_clock, initialise, train
from tests.conftest import at_most


@pytest.fixture
def log(tmp_path: Path) -> MLLog:
    return MLLog(tmp_path / "result_0.txt", clock_ms=counting_clock())


def lines_of(log_file: Path) -> list[str]:
    """Return a log's lines without digests, which have their own test."""
    chain = ("# chain: ", "# digest: ", "# digest at the end: ")
    return [line for line in log_file.read_text().splitlines() if not line.startswith(chain)]


def test_a_record_states_the_callers_file_and_line_and_the_time(tmp_path: Path) -> None:
    frame = inspect.currentframe()
    assert frame
    MLLog(tmp_path / "result_0.txt").event("cache_clear", True)
    line = frame.f_lineno - 1
    [record] = read_log(tmp_path / "result_0.txt").records
    assert record.logged_at == f"tests/bert/log/test_mllog.py:{line}"
    assert abs(record.time_ms / 1000 - time.time()) < 600


@pytest.mark.parametrize(
    ("key", "value", "metadata", "write"),
    [
        ("cache_clear", True, {}, MLLogger.event),
        ("init_start", None, {"a": [1.5, "\u00e9\n"]}, MLLogger.start),
        ("cache_clear", False, {"b": "\ud800"}, MLLogger.event),
    ],
)
def test_a_line_equals_the_official_loggers_line(
    key: str, value: object, metadata: dict[str, object], write: Callable[..., None], log: MLLog, tmp_path: Path
) -> None:
    official: list[str] = []
    logger = logging.Logger("official")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: official.append(record.getMessage())
    log.event(key, value, **metadata)
    [ours] = lines_of(tmp_path / "result_0.txt")
    [record] = read_log(tmp_path / "result_0.txt").records
    write(MLLogger(logger), key, value, metadata=record.metadata, time_ms=record.time_ms)
    assert official[-1] == ours  # a warning may precede the official line


def test_a_log_without_lines_is_empty_and_may_be_closed_twice(tmp_path: Path) -> None:
    with MLLog(tmp_path / "empty.txt") as log:
        log.close()
    assert (tmp_path / "empty.txt").read_bytes() == b""


def test_records_are_read_although_plain_lines_stand_between_them(log: MLLog, tmp_path: Path) -> None:
    log.header({"recipe": "tiny_cpu", "config.optimizer.learning_rate": 0.001})
    log.line("step 1")
    log.event("cache_clear", True)
    log.line("naïve ✓ \udc80")
    assert lines_of(tmp_path / "result_0.txt")[2] == "step 1"
    parsed = read_log(tmp_path / "result_0.txt")
    assert parsed.header == {"recipe": "tiny_cpu", "config.optimizer.learning_rate": "0.001"}
    assert [record.line for record in parsed.records] == [5]


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "0: :::MLLOG"])
def test_plain_lines_that_would_break_the_log_are_refused(log: MLLog, tmp_path: Path, text: str) -> None:
    with pytest.raises(RuleViolation, match="expected one line"):
        log.line(text)
    with pytest.raises(RuleViolation, match="expected one line"):
        log.header({text: "value"})
    assert not lines_of(tmp_path / "result_0.txt")


def test_a_log_without_a_file_writes_and_checks_nothing() -> None:
    with MLLog(None) as log:
        log.header({"a": 1})
        log.line("x")
        initialise(log, "open", {"unknown": 1})
        log.eval_accuracy(2.0, -1)
        log.run_stop("success", samples=0, eval_samples=0)
        log.abort()


# Calls that the writer must reject: a function that makes them, and words of the error message.


def finish(log: MLLog, accuracies: list[float], samples: int | None = None) -> None:
    initialise(log, "open")
    trained = train(log, OPEN, accuracies)
    log.run_stop("success", samples=trained if samples is None else samples, eval_samples=500)


VIOLATIONS: dict[str, tuple[Callable[[MLLog], object], str]] = {
    "too early": (lambda log: log.event("seed", 1), "seed: logged before init_start, expected between init_start and"),
    "hyperparameter missing": (
        lambda log: initialise(log, "open", {k: v for k, v in OPEN.items() if k != "start_warmup_step"}),
        "not logged yet: start_warmup_step",
    ),
    "end in a block": (
        lambda log: (initialise(log, "open"), log.block_start(0), log.run_stop("aborted", samples=0, eval_samples=5)),
        "block_start: never closed, expected block_stop",
    ),
    "success below target": (lambda log: finish(log, [0.1, 0.2999]), "0.29990, expected at least the target 0.3"),
    "success without evaluation": (lambda log: finish(log, []), "no evaluation, expected at least the target 0.3"),
    "after the end": (lambda log: (finish(log, [0.4]), log.block_start(0)), "logged after run_stop"),
}


@pytest.mark.parametrize(("act", "message"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_records_that_break_a_rule_are_not_written(
    log: MLLog, tmp_path: Path, act: Callable[[MLLog], object], message: str
) -> None:
    path = tmp_path / "result_0.txt"
    with pytest.raises(RuleViolation, match=message):
        act(log)
    before = read_log(path)
    assert not before.problems
    assert "eval_samples" not in [record.key for record in before.records[-1:]], "a refused run_stop writes no counts"
    written = len(lines_of(path))
    log.abort()  # must complete the log in spite of the rejected call
    log.close()
    keys = [record.key for record in read_log(path).records]
    assert keys[-1] == "run_stop" if "init_start" in keys else len(keys) == written


def test_times_in_the_log_do_not_decrease_if_the_clock_goes_back(tmp_path: Path) -> None:
    times = iter([100, 50, 200])
    log = MLLog(tmp_path / "result_0.txt", clock_ms=lambda: next(times))
    log.event("cache_clear", True)
    log.event("init_start")
    log.event("seed", 1)
    assert [record.time_ms for record in read_log(tmp_path / "result_0.txt").records] == [100, 100, 200]


def test_abort_closes_every_interval(tmp_path: Path) -> None:
    """Before init_start, there is nothing to close. An error in ``with log`` may follow a call of ``abort``."""
    acts: dict[str, Callable[[MLLog], object]] = {
        "cache_clear": lambda _: None,
        "init_stop run_start": lambda log: log.event("init_start"),
        "block_stop": lambda log: log.block_start(0),
        "eval_stop block_stop": lambda log: (
            log.block_start(train(log, OPEN, [0.1])),
            log.eval_start(2016),
            log.abort(),
        ),
    }

    def fail(log: MLLog, closed: str) -> None:
        with log:
            if closed.endswith("block_stop"):
                initialise(log, "open")
            else:
                log.event("cache_clear", True)
            acts[closed](log)
            raise ZeroDivisionError

    for number, closed in enumerate(acts):
        path = tmp_path / f"result_{number}.txt"
        with pytest.raises(ZeroDivisionError):
            fail(MLLog(path), closed)
        records = read_log(path).records
        end = [] if closed == "cache_clear" else ["train_samples", "eval_samples", "run_stop"]
        expected = [*closed.split(), *end]
        assert [record.key for record in records[-len(expected) :]] == expected
        if end:
            trained = 2016 if closed.startswith("eval") else 0
            assert [record.value for record in records[-3:-1]] == [trained, 0]
            assert records[-1].metadata["status"] == "aborted"
            assert records[-4].metadata.get("samples_count", 0) == trained


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_raises_an_os_error_with_the_logs_path(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"

    def write() -> None:
        with MLLog(path) as log:
            log.event("cache_clear", True)
            assert log._file  # a private attribute, as there is no public one
            with Path("/dev/full").open("wb") as full:
                os.dup2(full.fileno(), log._file._file.fileno())
            log.event("init_start")

    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write()
    assert [record.key for record in read_log(path).records] == ["cache_clear"]


@at_most(30)
@given(st.integers(1, 5000), st.integers(1, 3000), st.lists(st.floats(0, 0.59), max_size=6), st.text(min_size=1))
def test_any_valid_run_of_the_open_division_is_read_back_without_problems(
    tmp_path_factory: pytest.TempPathFactory, interval: int, batch: int, accuracies: list[float], org: str
) -> None:
    assume(org.strip())
    values = OPEN | {
        "global_batch_size": min(batch, interval),
        "eval_interval_samples": interval,
        "quality_target": 0.6,
    }
    values |= {"opt_base_learning_rate": interval / 7e6}
    path = tmp_path_factory.mktemp("log") / "result_0.txt"
    with MLLog(path, clock_ms=counting_clock(1)) as log:
        initialise(log, "open", values, 2**63 - interval, org)
        samples = train(log, values, [*accuracies, 0.6])
        log.run_stop("success", samples=samples, eval_samples=1)
    parsed = read_log(path)
    assert not parsed.problems
    assert [record.value for record in parsed.all("eval_accuracy")] == [*accuracies, 0.6]
    for key, value in (values | {"seed": 2**63 - interval, "submission_org": org}).items():
        assert parsed.all(key)[0].value == value
    for line in lines_of(path):
        assert json.loads(line.removeprefix(":::MLLOG "))["namespace"] == ""


def made(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("earlier\n")
    return folder


def test_the_lowest_free_number_is_chosen_without_creating_a_file(tmp_path: Path) -> None:
    folder = made(tmp_path / "bert", "result_0.txt", "metrics_1.jsonl", "result_3.txt")
    (folder / "result_2.txt").symlink_to("nowhere")
    for _ in range(2):
        assert choose_files(folder, None) == (folder / "result_4.txt", folder / "metrics_4.jsonl")
    assert choose_files(tmp_path / "absent", None).result.name == "result_0.txt"
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("there", ["result_5.txt", "metrics_5.jsonl"])
def test_a_taken_run_number_is_refused(tmp_path: Path, there: str) -> None:
    made(tmp_path, there)
    for take in (choose_files, create_log):
        with pytest.raises(ValueError, match=f"{there} exists already"):
            take(tmp_path, 5)
    assert (tmp_path / there).read_text() == "earlier\n"


def test_runs_that_start_simultaneously_get_different_numbers(tmp_path: Path) -> None:
    """In every round, all runs look at the folder before any of them creates its log."""
    folder = made(tmp_path, "result_0.txt", "result_2.txt")
    runs, rounds = 8, 5
    barrier, numbers = threading.Barrier(runs), []

    def run() -> None:
        for _ in range(rounds):
            barrier.wait()
            log, files = create_log(folder, None)
            log.close()
            numbers.append(int(files.result.stem.removeprefix("result_")))

    threads = [threading.Thread(target=run) for _ in range(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, *range(3, 2 + runs * rounds)]
    assert (folder / "result_0.txt").read_text() == (folder / "result_2.txt").read_text() == "earlier\n"


def test_the_header_describes_the_run_and_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's settings matter only on GPUs, so a CPU run's header omits them."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    mesh = Mesh(0, 4, 0, torch.device("cpu"), ((0, 1), (2, 3)), tensor=2)
    head = provenance(tiny_cpu(), mesh, 11)
    assert head["note"] == "not an MLPerf result: unverified, not reviewed by MLCommons"
    assert (head["recipe"], head["seed"], head["accelerator"], "nccl" in head) == ("tiny_cpu", 11, "none", False)
    assert head["processes"] == f"4 x {torch.get_num_threads()} threads, data 2 x tensor 2"
    assert (head["torch"], head["config.training.global_batch_size"]) == (importlib.metadata.version("torch"), 32)
