import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.mllog import MLLog
from compliance.log import rules
from compliance.watch.running import RunningLog
from tests.compliance import run_logs

BASE = 1_700_000_000_000
MINUTE = 60_000


def line(key: str, value: Any = None, time_ms: int = BASE, kind: str = "POINT_IN_TIME", **metadata: Any) -> bytes:
    fields = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}
    return f":::MLLOG {json.dumps(fields)}".encode()


def begun(division: str = "closed", without: str = "", **settings: Any) -> RunningLog:
    """A run that has just started its clock."""
    run = RunningLog()
    values = (run_logs.CLOSED if division == "closed" else run_logs.OPEN) | {
        "cache_clear": True,
        "submission_division": division,
        "seed": 4711,
        **settings,
    }
    run.take(line("init_start", kind="INTERVAL_START"))
    for key, value in values.items():
        if key != without:
            run.take(line(key, value))
    run.take(line("init_stop", kind="INTERVAL_END"))
    run.take(line("run_start", kind="INTERVAL_START"))
    return run


def evaluate(run: RunningLog, samples: int, accuracy: Any, time_ms: int, announced: bool = True) -> None:
    if announced:
        run.take(line("eval_start", None, time_ms, "INTERVAL_START", epoch_num=samples))
    run.take(line("eval_accuracy", accuracy, time_ms, epoch_num=samples))


def test_a_whole_run_of_the_real_writer_has_nothing_to_complain_about(tmp_path: Path) -> None:
    for division in ("open", "closed"):
        run = RunningLog()
        for text in run_logs.write_run(tmp_path / f"{division}.txt", division).read_bytes().splitlines():
            run.take(text)
            run.watch_the_time(run.last_ms)
        assert run.complaints == {}
        assert (run.phase, run.status, run.division) == ("done", "success", division)
        assert len(run.evaluations) == 3
        assert run.target == pytest.approx(0.3 if division == "open" else 0.72)


def test_the_phases_follow_the_log(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    run = RunningLog()
    seen = [run.phase]
    with MLLog(path, clock_ms=run_logs.counting_clock(10)) as log:
        run_logs.initialise(log, "open")
        run_logs.train(log, run_logs.OPEN, [0.1])
        log.abort()
    for text in path.read_bytes().splitlines():
        run.take(text)
        if run.phase != seen[-1]:
            seen.append(run.phase)
    assert seen == ["before", "init", "ready", "run", "done"]
    assert run.status == "aborted"


# Rules about to be broken


@pytest.mark.parametrize(
    ("division", "minutes", "words"),
    [
        ("closed", 24.9, ""),
        ("closed", 25.1, "has taken 25 min of 30"),
        ("closed", 30.0, "has passed its 30 min"),
        ("open", 100, ""),
        ("open", 201, "has taken 201 min of 240"),
        ("open", 240, "has passed its 240 min"),
    ],
)
def test_a_long_initialisation(division: str, minutes: float, words: str) -> None:
    run = RunningLog()
    run.take(line("submission_division", division))
    run.take(line("init_start", kind="INTERVAL_START"))
    for _ in range(3):
        run.watch_the_time(BASE + minutes * MINUTE)
    assert len(run.complaints) == bool(words)
    assert words in " ".join(run.complaints)


def test_a_long_initialisation_is_told_once_a_stage() -> None:
    run = RunningLog()
    run.take(line("init_start", kind="INTERVAL_START"))
    for tenths in range(240, 400):
        run.watch_the_time(BASE + tenths * MINUTE / 10)
    assert len(run.complaints) == 2


def test_the_first_init_start_of_many_ranks_counts() -> None:
    run = RunningLog()
    for rank in range(8):
        run.take(f"{rank}: ".encode() + line("init_start", None, BASE + rank * MINUTE, "INTERVAL_START"))
    assert run.init_start_ms == BASE


@pytest.mark.parametrize(
    ("division", "change", "words"),
    [
        ("closed", {"without": "cache_clear"}, "no cache_clear"),
        ("open", {"without": "cache_clear"}, "no cache_clear"),
        ("closed", {"cache_clear": False}, "caches were not dropped"),
        ("open", {"cache_clear": False}, ""),
        ("closed", {"without": "seed"}, "no seed is logged"),
        ("open", {"without": "seed"}, ""),
        (
            "closed",
            {"eval_interval_samples": 200_000},
            "eval_interval_samples: value 200000 in a closed log, expected 150000 (TR 24.4)",
        ),
        ("open", {"eval_interval_samples": 200_000}, ""),
    ],
)
def test_settings_when_the_clock_starts(division: str, change: dict[str, Any], words: str) -> None:
    run = begun(division, **change)
    assert len(run.complaints) == bool(words)
    assert words in " ".join(run.complaints)


def test_one_rank_that_dropped_its_caches_is_enough_to_know() -> None:
    for values in ((False, True), (True, False)):
        run = RunningLog()
        for value in values:
            run.take(line("cache_clear", value))
        assert run.caches_cleared is True


@pytest.mark.parametrize(
    ("processes", "tensor", "pipeline", "each", "steps", "words"),
    [
        (8, 1, 1, 56, 1, ""),
        (8, 1, 1, 28, 2, ""),
        (8, 1, 1, 28, 1, "8 processes x 28 sequences x 1 steps are 224"),
        (4, 1, 1, 56, 1, "are 224"),
        (16, 2, 1, 56, 1, ""),
        (8, 2, 1, 56, 1, "8 processes / 2 of a copy x 56 sequences x 1 steps are 224"),
        (8, 0, 1, 56, 1, ""),
        (32, 2, 2, 28, 2, ""),
        (16, 2, 4, 56, 2, "16 processes / 8 of a copy x 56 sequences x 2 steps are 224"),
    ],
)
def test_the_batch_against_its_parts(
    processes: int, tensor: int, pipeline: int, each: int, steps: int, words: str
) -> None:
    for source in ("header", "metrics"):
        run = RunningLog()
        run.take(f"# config.parallel.tensor: {tensor}".encode())
        run.take(f"# config.parallel.pipeline: {pipeline}".encode())
        if source == "header":
            run.take(f"# processes: {processes} x 12 threads".encode())
        else:
            run.take_metrics(json.dumps({"event": "run", "world_size": processes}).encode())
        settings = run_logs.CLOSED | {"d_batch_size": each, "gradient_accumulation_steps": steps, "seed": 1}
        for key, value in {**settings, "submission_division": "closed", "cache_clear": True}.items():
            run.take(line(key, value))
        run.take(line("run_start", kind="INTERVAL_START"))
        assert len(run.complaints) == bool(words)
        assert words in " ".join(run.complaints)


def test_a_second_run_start() -> None:
    run = begun()
    run.take(line("run_start", None, BASE + MINUTE, "INTERVAL_START"))
    assert "run_start: logged again, first on line 19, expected exactly one record" in " ".join(run.complaints)
    assert run.run_start_ms == BASE


@pytest.mark.parametrize("announced", [True, False])
def test_an_evaluation_that_is_missed(announced: bool) -> None:
    run = begun()
    schedule = run.schedule
    assert schedule is not None
    evaluate(run, schedule.samples(1), 0.4, BASE + 1000, announced)
    evaluate(run, schedule.samples(3), 0.5, BASE + 3000, announced)
    key = "eval_start" if announced else "eval_accuracy"
    assert list(run.complaints) == [
        f"{key}: evaluation at 450240 samples, expected evaluation 2 at 300160: every 150000 samples, rounded up to a whole "
        "batch (TR 24.4)"
    ]


def test_an_evaluation_that_is_early() -> None:
    run = begun()
    evaluate(run, 100_352, 0.4, BASE + 1000)
    assert "evaluation at 100352 samples, expected evaluation 1 at 150080" in " ".join(run.complaints)


def test_packed_runs_count_real_sequences() -> None:
    run = begun(global_batch_size=768)
    for index, samples in enumerate([150_135, 299_622, 449_539, 599_891], start=1):
        evaluate(run, samples, 0.1 * index, BASE + index * 1000, announced=False)
    assert run.complaints == {}


def test_training_that_goes_on_past_an_evaluation() -> None:
    run = begun("open")  # every 1000, batches of 32: at 1024
    run.take(b"step     32  samples      1024     40.8 ms     784.9 seq/s      70721 tok/s")
    run.take(b"step     34  samples      1088     40.8 ms     784.9 seq/s      70721 tok/s")
    assert run.complaints == {}
    run.take(b"step     37  samples      1184     40.8 ms     784.9 seq/s      70721 tok/s")
    assert "evaluation 1 was missed: due at 1,024 samples, now 1,184" in " ".join(run.complaints)


def test_lines_with_the_label_of_a_launcher() -> None:
    run = RunningLog()
    run.take(b" 0: # recipe: h100_8x8")
    run.take(b"0: step     32  samples      1024     40.8 ms     784.9 seq/s      70721 tok/s")
    run.take(b"12: " + line("seed", 7))
    assert (run.header, run.step_samples, run.seed) == ({"recipe": "h100_8x8"}, 1024, 7)


def test_training_beside_an_evaluation_is_no_miss() -> None:
    run = begun("open")
    run.take(line("eval_start", None, BASE, "INTERVAL_START", epoch_num=1024))
    run.take(b"step     40  samples      1280     40.8 ms     784.9 seq/s      70721 tok/s")
    assert run.complaints == {}
    assert run.evaluating_at == 1024
    assert run.samples == 1280


def test_an_evaluation_that_does_not_come() -> None:
    run = begun()
    for index in (1, 2):
        evaluate(run, 150_080 * index, 0.3 + 0.1 * index, BASE + index * MINUTE)
    run.watch_the_time(BASE + 2 * MINUTE + 1.9 * MINUTE)
    assert run.complaints == {}
    for seconds in range(130, 300, 10):
        run.watch_the_time(BASE + 2 * MINUTE + seconds * 1000)
    assert list(run.complaints) == ["evaluation 3 is late: none for 2 min"]


def test_evaluations_at_uneven_times() -> None:
    run = begun()
    for index, minutes in enumerate([1, 11, 12], start=1):
        evaluate(run, 150_080 * index, 0.1 * index, BASE + minutes * MINUTE)
    run.watch_the_time(BASE + 24 * MINUTE)
    assert run.complaints == {}
    run.watch_the_time(BASE + 28 * MINUTE)
    assert "evaluation 4 is late" in " ".join(run.complaints)


def test_an_evaluation_that_takes_long_has_come() -> None:
    run = begun()
    for index in (1, 2):
        evaluate(run, 150_080 * index, 0.1 * index, BASE + index * MINUTE)
    run.take(line("eval_start", None, BASE + 3 * MINUTE, "INTERVAL_START", epoch_num=450_240))
    run.watch_the_time(BASE + 20 * MINUTE)
    assert run.complaints == {}


def test_an_evaluation_without_a_result_shifts_no_other() -> None:
    run = begun()
    evaluate(run, 150_080, None, BASE + MINUTE)
    evaluate(run, 300_160, 0.4, BASE + 2 * MINUTE)
    assert [text.partition(" (")[0] for text in run.complaints] == [
        "eval_accuracy: value null, expected a fraction from 0 to 1"
    ]


def test_a_resumed_run_has_no_schedule_of_its_own() -> None:
    run = RunningLog()
    run.take(b"# resumed from: step_00000500")
    for key, value in (run_logs.OPEN | {"submission_division": "open", "cache_clear": True}).items():
        run.take(line(key, value))
    run.take(line("run_start", kind="INTERVAL_START"))
    evaluate(run, 9024, 0.2, BASE + 1000)
    assert run.complaints == {}


def test_placeholders_in_place_of_samples() -> None:
    run = begun()
    for index in (1, 2, 3):
        evaluate(run, 1, 0.3 + 0.1 * index, BASE + index * MINUTE, announced=False)
    assert [evaluation.samples for evaluation in run.evaluations] == [150_080, 300_160, 450_240]
    assert list(run.complaints) == [
        "eval_accuracy: epoch_num 1 after 0, expected epoch_num = sequences trained, increasing (TR 24.6)"
    ]


@pytest.mark.parametrize("value", [None, "0.7", 72.1, -0.1, True, [1]])
def test_an_accuracy_that_is_none(value: Any) -> None:
    run = begun()
    evaluate(run, 150_080, value, BASE + 1000)
    assert run.evaluations == []
    assert [text.partition(": value ")[0] for text in run.complaints] == ["eval_accuracy"]


def test_broken_records_are_told() -> None:
    run = begun()
    run.take(b':::MLLOG {"namespace": "", "time_ms": 17')
    run.take(line("eval_samples", 1) + b" and more")
    assert len(run.complaints) == 2
    assert all("a record is broken" in text for text in run.complaints)


def test_warnings_of_the_run_are_passed_on() -> None:
    run = begun()
    run.take(b"warning at step 300: rank 3 on host node0 is slow: 61.2 ms")
    run.take_metrics(
        json.dumps({"event": "warning", "step": 300, "text": "rank 3 on host node0 is slow: 61.2 ms"}).encode()
    )
    assert list(run.complaints) == ["warning at step 300: rank 3 on host node0 is slow: 61.2 ms"]


# Rates and times


def test_rate_and_time_left() -> None:
    run = begun()
    assert run.rate is None
    assert run.seconds_until(150_080, BASE) is None
    run.take_metrics(json.dumps({"event": "step", "samples": 4480, "sequences_per_s": 448.0}).encode())
    assert run.rate == 448.0
    assert run.seconds_until(44_800, BASE + 10_000) == pytest.approx(90)
    evaluate(run, 150_080, 0.4, BASE + 100_000)
    assert run.rate == pytest.approx(1500.8)
    evaluate(run, 300_160, 0.5, BASE + 300_000)  # the second interval took twice as long
    assert run.rate == pytest.approx(750.4)
    assert run.seconds_until(450_240, BASE + 350_000) == pytest.approx(150)
    assert run.seconds_until(450_240, BASE + 999_000) == 0.0


def test_the_rate_is_that_of_the_last_evaluations() -> None:
    run = begun()
    for index in range(1, 9):
        evaluate(run, 150_080 * index, 0.05 * index, BASE + (1000 if index > 4 else 10) * index)
    assert run.rate == pytest.approx(150_080, rel=0.01)


def test_the_most_that_a_run_trains() -> None:
    run = RunningLog()
    assert run.max_samples is None
    run.take(b"# config.training.max_samples: 96000")
    assert run.max_samples == 96_000
    run.take(b"# config.training.max_steps: None")
    assert run.max_samples == 96_000
    run = begun()
    run.take(b"# config.training.max_steps: 10")
    assert run.max_samples == 10 * (run.global_batch_size or 0) > 0


# Untrusted input


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_any_bytes_are_taken(lines: list[bytes]) -> None:
    run = RunningLog()
    for text in lines:
        run.take(text)
        run.take(b":::MLLOG " + text)
        run.take_metrics(text)
    run.watch_the_time(BASE)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*rules.KEYS, "other"]),
            VALUES,
            st.integers(),
            st.dictionaries(st.sampled_from(["epoch_num", "samples_count", "status"]), VALUES),
        ),
        max_size=30,
    )
)
def test_any_records_are_taken(records: list[tuple[str, Any, int, dict[str, Any]]]) -> None:
    run = RunningLog()
    for key, value, time_ms, metadata in records:
        run.take(line(key, value, time_ms, **metadata))
        run.watch_the_time(time_ms)
        assert run.samples >= 0
        assert run.target is None or isinstance(run.target, float)
        assert (run.seconds_until(10, 1e12) or 0.0) >= 0


@given(st.dictionaries(st.sampled_from(["event", "samples", "sequences_per_s", "world_size", "text", "step"]), VALUES))
def test_any_metrics_are_taken(entry: dict[str, Any]) -> None:
    for event in (entry.get("event"), "run", "step", "warning"):
        RunningLog().take_metrics(json.dumps(entry | {"event": event}).encode())
