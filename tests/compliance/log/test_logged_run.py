"""State of a run by the records of its log: unit of its counts, sequences trained, convergence, and times."""

import math
from typing import Any

import pytest

from compliance.log.logged_run import LoggedRun
from compliance.log.record import Record
from compliance.log.rules import FIRST_MS, LAST_MS
from tests.compliance.run_logs import START_MS

ACCURACY = 0.5
"""Default accuracy of every evaluation but the last; below the target."""


def run_of(
    *counts: Any,
    accuracies: tuple[Any, ...] = (),
    blocks: tuple[int, ...] = (),
    status: str = "success",
    **settings: Any,
) -> LoggedRun:
    """Return a run of 100 s with an evaluation at each count. Its batch size of 448 has the interval 150,000."""
    run, settings = LoggedRun(), {"global_batch_size": 448, "submission_division": "closed"} | settings
    keys = [("init_start", None, {}), *((key, value, {}) for key, value in settings.items()), ("init_stop", None, {})]
    keys += [("run_start", None, {}), *(("block_stop", None, {"samples_count": count}) for count in blocks)]
    accuracies = accuracies or (*[ACCURACY] * (len(counts) - 1), 0.72)
    for count, accuracy in zip(counts, accuracies, strict=False):
        keys.append(("eval_accuracy", accuracy, {} if count is None else {"epoch_num": count}))
    times = {"run_start": START_MS + 50_000, "run_stop": START_MS + 150_000}
    for line, (key, value, metadata) in enumerate([*keys, ("run_stop", None, {"status": status})], start=1):
        run.add(Record(line, times.get(key, START_MS + 60_000), "", key, value, metadata))
    return run


@pytest.mark.parametrize(
    ("counts", "unit"),
    [
        ((), ""),
        ((448,), ""),
        ((447,), "epoch_num 447 at 1 evaluation"),
        ((5000, 5000), "epoch_num 5000 at 2 evaluations"),
        ((5000, 5001), "epoch_num 5000 to 5001 at 2 evaluations"),
        ((5000, 5002), ""),
        # An interval has 150,000 / 448 = 334.8 steps. A fifth more or less is accepted.
        ((267, 534), ""),
        ((268, 536), "epoch_num 268 to 536 at 2 evaluations, which counts optimizer steps"),
        ((401, 802), "epoch_num 401 to 802 at 2 evaluations, which counts optimizer steps"),
        ((402, 804), ""),
        # An interval has 150,000 x 512 = 76,800,000 tokens. A fifth more or less is accepted.
        ((61_439_999,), ""),
        ((61_440_000,), "epoch_num 61440000 at 1 evaluation, which counts tokens"),
        ((92_160_000,), "epoch_num 92160000 at 1 evaluation, which counts tokens"),
        ((92_160_001,), ""),
        ((100_000_000,), ""),
        ((100_000_001,), "epoch_num 100000001 at 1 evaluation, the size of a data set"),
    ],
)
def test_the_unit_of_epoch_num_is_recognised(counts: tuple[int, ...], unit: str) -> None:
    assert run_of(*counts).other_unit == unit
    is_open = run_of(*counts, submission_division="open", eval_interval_samples=150_000)
    assert is_open.other_unit == ("" if "data set" in unit else unit)


def test_an_epoch_num_far_above_the_samples_count_of_the_last_block_is_doubted() -> None:
    counts = (150_080, 300_160)
    assert run_of(*counts, blocks=(149_712,)).doubt == ""  # just an interval and a batch (150,448) less than epoch_num
    words = "epoch_num 300160 at the last evaluation, and samples_count 149711 at the last block_stop"
    assert run_of(*counts, blocks=(149_711,)).doubt == run_of(*counts, blocks=(9, 149_711)).doubt == words
    assert run_of(*counts, blocks=(149_711, 149_711)).doubt == ""  # samples_count counts each block by itself
    assert run_of(150_080, None).doubt == "an evaluation has no epoch_num"
    assert run_of().doubt == ""


@pytest.mark.parametrize(
    ("counts", "settings", "low", "high", "otherwise"),
    [
        # train_samples may lie between the last evaluation and the next one.
        ((150_080, 300_160), {}, 300_160, 450_160, 300_160),
        ((150_080, 300_160), {"global_batch_size": None}, 300_160, 450_240, 300_160),
        ((150_080, 300_160), {"submission_division": "open"}, 300_160, 450_240, 300_160),
        # Without a valid epoch_num, train_samples may differ from the schedule by an interval, or by -20 % to +10 %.
        ((1, 2), {}, 150_000, 450_000, None),
        ((*range(1, 21),), {}, 2_400_000, 3_300_000, None),
        ((*range(21),), {}, 2_400_000, 3_300_000, None),  # the untrained model is evaluated first
        ((1, 1), {"global_batch_size": None}, 0, 100_000_000, None),
        ((1, 1), {"submission_division": "open"}, 0, 100_000_000, None),
    ],
)
def test_train_samples_is_used_only_within_the_range_of_the_evaluations(
    counts: tuple[int, ...], settings: dict[str, Any], low: int, high: int, otherwise: int | None
) -> None:
    trained = [run_of(*counts, train_samples=each, **settings).trained for each in (low - 1, low, high, high + 1)]
    assert trained == [otherwise, low, high, otherwise]
    assert run_of(*counts, **settings).trained == otherwise


def test_the_samples_to_the_target_are_those_of_the_first_evaluation_at_the_target() -> None:
    went_on = run_of(150_080, 300_160, 450_240, accuracies=(0.7199, 0.72, 0.71), train_samples=450_240)
    assert (went_on.reached, went_on.went_on) == (1, True)
    assert (went_on.converged_samples(), went_on.trained) == (300_160, 450_240)
    doubted = run_of(1, 2, 3, accuracies=(0.5, 0.73, 0.73), train_samples=450_240)
    assert (doubted.converged_samples(), doubted.is_unknown, doubted.trained) == (None, True, 450_240)
    assert [samples for samples, _ in doubted.curve] == [150_080, 300_160, 450_240]  # counts from the schedule
    stopped = run_of(1, 2, 3, accuracies=(0.5, 0.6, 0.73), train_samples=450_240)
    assert (stopped.converged_samples(), stopped.is_unknown, stopped.went_on) == (450_240, False, False)
    for run in (run_of(150_080, accuracies=(0.7199,)), run_of(150_080, status="aborted"), run_of()):
        assert (run.converged_samples(), run.is_unknown, run.went_on) == (None, False, False)
    # An open run without a target has converged at its end.
    assert run_of(150_080, accuracies=(0.1,), submission_division="open").converged_samples() == 150_080
    odd = run_of(150_080, 300_160, accuracies=(72.0, 0.73))  # 72.0 is not a fraction
    assert (odd.reached, odd.curve, odd.accuracy) == (1, [(300_160, 0.73)], 0.73)


def test_the_rate_counts_sequences_per_second_of_the_time_to_train() -> None:
    run = run_of(150_080, 300_160)
    assert (run.seconds, run.sequences_per_s) == (100.0, 3001.6)
    assert run_of().sequences_per_s is None


def test_settings_of_an_invalid_type_are_treated_as_missing() -> None:
    run = run_of(
        global_batch_size=448.0, seed="1", train_samples=math.nan, submission_division="OPEN", quality_target=True
    )
    assert (run.division, run.target, run.global_batch_size, run.seed, run.train_samples) == ("open", *[None] * 4)
    assert run.schedule is None
    assert run_of(submission_division="other").division == "closed"


def test_each_record_updates_the_state_of_the_run() -> None:
    run, samples = LoggedRun({"config.evaluation.target": "None"}), {"samples_count": 448}
    for line, (key, ms, value, metadata, *expected) in enumerate(
        [
            ("init_start", 500, None, {}, "init", 500, 500, 500, 0, False, "init_start"),
            ("init_start", 300, None, {}, "init", 300, 500, 300, 0, False, "init_start"),
            ("tracked_stats", 100, None, samples, "init", 100, 500, 300, 0, False, "init_start"),
            ("submission_division", 600, "open", {}, "init", 100, 600, 300, 0, False, "init_start"),
            ("init_stop", 2300, None, {}, "ready", 100, 2300, 300, 0, False, ""),
            ("run_start", 3000, None, {}, "run", 100, 3000, 300, 0, False, "run_start"),
            ("init_start", 3100, None, samples, "run", 100, 3100, 300, 0, False, "run_start init_start"),
            ("init_stop", 3100, None, {}, "run", 100, 3100, 300, 0, False, "run_start"),
            ("block_start", 3200, None, samples, "run", 100, 3200, 300, 448, False, "run_start block_start"),
            ("block_stop", 3300, None, {"samples_count": 7}, "run", 100, 3300, 300, 448, False, "run_start"),
            ("eval_start", 3300, None, {"epoch_num": 896}, "run", 100, 3300, 300, 896, False, "run_start eval_start"),
            ("eval_accuracy", 3300, 0.5, {"epoch_num": 896}, "run", 100, 3300, 300, 896, True, "run_start eval_start"),
            ("eval_stop", 3300, None, {"epoch_num": 896}, "run", 100, 3300, 300, 896, True, "run_start"),
            ("eval_start", 3300, None, {"epoch_num": -1}, "run", 100, 3300, 300, 896, False, "run_start eval_start"),
            ("run_stop", 63_000, None, {"status": "success"}, "done", 100, 63_000, 300, 896, False, "eval_start"),
            ("eval_accuracy", 63_000, 0.9, {"epoch_num": 999}, "done", 100, 63_000, 300, 896, False, "eval_start"),
        ],
        start=1,
    ):
        assert (run.is_ended, run.status) == ((False, None) if line < 16 else (True, "success"))
        run.add(Record(line, START_MS + ms, "", key, value, metadata))
        times = [(time or 0) - START_MS for time in (run.start_ms, run.last_ms, run.init_start_ms)]
        assert [run.phase, *times, run.counted_samples, run.is_evaluated, " ".join(run.open)] == expected, line
    # The last init_stop and the last run_stop end their intervals.
    assert (run.init_seconds, run.seconds, run.accuracy, run.trains_to_end) == (2.8, 60.0, 0.5, True)
    assert (run.epoch_nums, run.number_of_evaluations, run.resumed_samples) == ([896], 1, 0)


@pytest.mark.parametrize(
    ("start_ms", "stop_ms", "seconds"),
    [
        (START_MS, START_MS, 0.0),
        (START_MS, START_MS - 1, None),
        (FIRST_MS, FIRST_MS + 1, 0.001),
        (FIRST_MS - 1, FIRST_MS, None),
        (LAST_MS - 1, LAST_MS, None),
    ],
)
def test_decreasing_or_misdated_times_give_no_duration(start_ms: int, stop_ms: int, seconds: float | None) -> None:
    run = LoggedRun()
    run.add(Record(1, start_ms, "", "run_start", None, {}))
    assert run.seconds is None
    run.add(Record(2, stop_ms, "", "run_stop", None, {}))
    assert run.seconds == seconds
