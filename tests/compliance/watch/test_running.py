import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from compliance.watch.running import RunningLog
from tests.compliance import run_logs

BASE = 1_700_000_000_000
MINUTE = 60_000


def line(key: str, value: Any = None, time_ms: int = BASE, kind: str = "POINT_IN_TIME", **metadata: Any) -> bytes:
    fields = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}
    return f":::MLLOG {json.dumps(fields)}".encode()


def begun(division: str = "closed", without: str = "", head: Sequence[bytes] = (), **changes: Any) -> RunningLog:
    """Return a run that has just logged run_start."""
    run = RunningLog()
    for text in head:
        run.take(text)
    values = (run_logs.CLOSED if division == "closed" else run_logs.OPEN) | {
        "cache_clear": True,
        "submission_division": division,
        "seed": 4711,
        **changes,
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


INVALID = "the run is not a valid result (TR 11)"


@pytest.mark.parametrize(
    ("division", "minutes", "expected"),
    [
        ("closed", [24.99], []),
        ("closed", range(24, 40), ["has taken 25 min of 30 (TR 11)", f"takes 30 min or more: {INVALID}"]),
        ("open", [199.99, 200, 240], ["has taken 200 min of 240 (TR 11)", f"takes 240 min or more: {INVALID}"]),
    ],
)
def test_the_watch_warns_once_before_and_once_after_the_limit_of_the_initialisation(
    division: str, minutes: Sequence[float], expected: list[str]
) -> None:
    run = RunningLog()
    run.take(line("submission_division", division))
    for rank in (1, 0, 2):  # only the earliest init_start counts
        run.take(f"{rank}: ".encode() + line("init_start", None, BASE + rank * MINUTE, "INTERVAL_START"))
    for now in minutes:
        run.check_initialisation(BASE + now * MINUTE)
    assert list(run.complaints) == [f"initialisation {words}" for words in expected]


Event = Callable[[RunningLog], object]
"""Function that adds records to a running log. Times are minutes after `BASE`."""


def evaluated(samples: int, minutes: float = 1, accuracy: Any = 0.4, announced: bool = True) -> Event:
    return lambda run: evaluate(run, samples, accuracy, BASE + int(minutes * MINUTE), announced)


def wrote(*lines: bytes) -> Event:
    return lambda run: [run.take(text) for text in lines]


FIRST, SECOND, THIRD = 150_080, 300_160, 450_240
TWO = [evaluated(FIRST, 1), evaluated(SECOND, 2)]
AGAIN = line("init_start", None, BASE + MINUTE, "INTERVAL_START")
ONCE_MORE = line("run_start", None, BASE + MINUTE, "INTERVAL_START")
SLOW = "warning at step 300: rank 3 on host node0 is slow: 61.2 ms"
SLOW_ENTRY = {"event": "warning", "step": 300, "text": SLOW.partition(": ")[2]}
RESUMED = [b"# resumed from: step_00000266"]
AT_8512 = line("block_start", None, BASE, "INTERVAL_START", first_epoch_num=1, epoch_count=1, samples_count=8512)


EVENTS: list[tuple[dict[str, Any], list[Event]]] = [
    # Settings that are missing or invalid at run_start
    ({"without": "cache_clear"}, []),
    ({"cache_clear": False}, []),
    ({"cache_clear": False, "head": [line("cache_clear", True)]}, []),  # it is enough if one rank dropped its caches
    ({"division": "open", "cache_clear": False}, []),
    ({"without": "seed"}, []),
    ({"division": "open", "without": "seed"}, []),
    ({"eval_interval_samples": 200_000}, []),
    # Records and warnings of the run
    ({}, [wrote(ONCE_MORE)]),
    ({}, [*TWO, wrote(AGAIN, AGAIN)]),
    ({}, [evaluated(FIRST), evaluated(THIRD)]),
    ({}, [evaluated(FIRST, 1, 0.4, False), evaluated(THIRD, 2, 0.4, False)]),
    # A run with packed sequences logs the number of original sequences.
    ({"global_batch_size": 768}, [evaluated(n, n, 0.4, False) for n in (150_135, 299_622, 449_539, 599_891)]),
    ({}, [evaluated(FIRST, 1, None), evaluated(SECOND, 2)]),
    *(({}, [evaluated(FIRST, 1, value)]) for value in ("0.7", 72.1, -0.1, True, [1])),
    ({"division": "open", "head": RESUMED}, [wrote(AT_8512), evaluated(9024, 1, 0.2)]),
    ({}, [evaluated(1, minutes, 0.4, False) for minutes in (1, 2, 3)]),
    ({}, [wrote(b':::MLLOG {"namespace": "", "time_ms": 17')]),
    ({}, [wrote(SLOW.encode()), lambda run: run.take_metrics(json.dumps(SLOW_ENTRY).encode())]),
]


def test_each_series_of_events_gets_the_recorded_complaints() -> None:
    said = ""
    for settings, events in EVENTS:
        run = begun(**settings)
        for event in events:
            event(run)
        said += f"{'; '.join(run.complaints)}\n"
        assert run.run_start_ms == BASE
    assert said == Path(__file__).with_name("warnings.txt").read_text()


def test_samples_come_from_the_schedule_if_epoch_num_is_a_placeholder() -> None:
    run = begun()
    evaluated(1, 1, None, False)(run)
    evaluated(1, 2, None, False)(run)
    assert (run.curve, run.samples) == ([], 0)
    run = begun()
    for minutes in (1, 2, 3):  # epoch_num is a constant placeholder, as in some logs
        evaluated(1, minutes, 0.4, False)(run)
    assert [samples for samples, _ in run.curve] == [FIRST, SECOND, THIRD]
    assert run.samples == THIRD


def took_steps(run: RunningLog, samples: int, rate: float) -> None:
    run.take_metrics(json.dumps({"event": "step", "step": 1, "samples": samples, "sequences_per_s": rate}).encode())


def test_the_watch_computes_the_rate_from_the_last_four_evaluations() -> None:
    run = begun()
    assert (run.rate, run.trained_by(BASE + 1000), run.samples) == (None, None, 0)
    took_steps(run, 4480, 448.0)
    assert (run.rate, run.trained_by(BASE + 1000), run.samples) == (448.0, 448, 4480)
    evaluate(run, FIRST, 0.4, BASE + 100_000)
    took_steps(run, 4480, 440.0)  # a restart repeats these samples
    assert (run.rate, run.samples) == (pytest.approx(1500.8), FIRST)
    assert [run.trained_by(BASE + 100_000 + after) for after in (-1, 0, 1000)] == [FIRST, FIRST, FIRST + 1501]
    evaluate(run, SECOND, 0.5, BASE + 300_000)  # the second interval took twice as long, which halves the rate
    assert run.rate == pytest.approx(750.4)
    for index in range(3, 9):  # the rate covers only the last four evaluations
        evaluate(run, FIRST * index, 0.05 * index, BASE + 300_000 + 1000 * index**2)
    assert run.rate == pytest.approx(3 * FIRST / (64 - 25))


def test_the_rate_excludes_sequences_trained_before_the_run_resumed() -> None:
    run = begun("open", head=RESUMED)
    run.take(AT_8512)
    took_steps(run, 8640, 5.0)
    evaluate(run, 8512, 0.2, BASE + 1000)
    assert run.rate == 5.0  # nothing was trained before the first evaluation
    evaluate(run, 9024, 0.2, BASE + 1000)
    assert run.rate == 5.0  # no time has passed
    evaluate(run, 9536, 0.2, BASE + 5000)
    assert run.rate == pytest.approx(1024 / 4)


def test_the_sample_limit_is_the_smaller_of_max_samples_and_max_steps() -> None:
    limits = {"max_samples: 640": 640, "max_steps: 10": 320, "max_samples: 1e9": None, "max_steps: 0": None}
    for line_of_head, limit in limits.items():
        assert begun("open", head=[f"# config.training.{line_of_head}".encode()]).sample_limit == limit
    both = [b"# config.training.max_samples: 640", b"# config.training.max_steps: %d"]
    assert [begun("open", head=[both[0], both[1] % steps]).sample_limit for steps in (19, 21)] == [608, 640]
