"""Time saved by removing parts or stragglers, computed from the records of a run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bert.reporting.intervals import SLOW_INTERVALS, Stragglers
from cluster.whatif import read_run, savings
from compliance.log.records import Straggler

STEP = {"event": "step", "data_wait_ms": 1.0, "forward_backward_ms": 40.0, "reduce_ms": 7.0, "update_ms": 2.0}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def steps(count: int, every: int = 10) -> list[dict[str, Any]]:
    return [STEP | {"step": every * n, "samples": 32 * every * n, "time_s": 0.5 * n} for n in range(1, count + 1)]


def test_parts_are_seconds_of_the_result(tmp_path: Path) -> None:
    evaluation = {"event": "eval", "time_s": 5.5, "eval_s": 0.4, "step": 100, "samples": 3200}
    run = read_run(write(tmp_path / "metrics_0.jsonl", [*steps(10), evaluation]))
    assert run.seconds == 5.5
    assert savings(run) == pytest.approx(
        {"waiting for the reduction (perfect overlap)": 0.7, "evaluations": 0.4, "waiting for data": 0.1}
    )
    assert sum(run.parts.values()) == pytest.approx(5.5)


def test_stragglers_cost_what_others_waited_for_them(tmp_path: Path) -> None:
    """Rank 2 (slower) and rank 3 of a host are slow, and rank 2 recovers halfway."""
    hosts, places = ["h0", "h0", "h1", "h1", "h2"], [f" (data {rank}, tensor 0)" for rank in range(5)]
    stragglers, records = Stragglers(hosts, [0] * 5, places), []
    for number, record in enumerate(steps(20), 1):
        times = [0.04, 0.04, 0.08 if number <= 10 else 0.04, 0.06, 0.04]
        records += [record]
        records += [
            {"event": "warning", "step": record["step"], "text": text, "straggler": slow and asdict(slow)}
            for text, slow in stragglers.add(times)
        ]
    run = read_run(write(tmp_path / "metrics_0.jsonl", records))
    found = savings(run)
    both = 10 * (10 - SLOW_INTERVALS + SLOW_INTERVALS)
    assert found["rank 2 on host h1"] == pytest.approx(both * 0.02)
    alone = 10 * (20 - SLOW_INTERVALS) - both
    assert found["host h1"] == pytest.approx(both * 0.04 + alone * 0.02)
    assert found["rank 3 on host h1"] == pytest.approx(alone * 0.02)


def test_a_rank_that_came_back_on_another_host_is_two(tmp_path: Path) -> None:
    records = steps(20)
    for host, step in (("h2", 50), ("h1", 0)):
        slow = asdict(Straggler(1, host, True, own_ms=60.0, median_ms=40.0))
        records.insert(step // 10, {"event": "warning", "step": step, "straggler": slow})
    found = savings(read_run(write(tmp_path / "metrics_0.jsonl", records)))
    assert found["rank 1 on host h1"] == pytest.approx(50 * 0.02)
    assert found["rank 1 on host h2"] == pytest.approx(150 * 0.02)


@pytest.mark.parametrize("content", ["", "{}\n", '{"event": "end", "status": "success", "time_s": 1}\n'])
def test_a_file_without_steps_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "metrics_0.jsonl"
    file.write_text(content)
    for path in (file, tmp_path / "missing.jsonl"):
        with pytest.raises(ValueError, match="no record of steps"):
            read_run(path)
