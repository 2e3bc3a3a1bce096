"""Time saved by removing parts or stragglers, computed from the records of a run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bert.reporting.intervals import SLOW_INTERVALS, Stragglers
from cluster.whatif import Account, read_run, report, savings
from compliance.log.metrics import Straggler

STEP = {"event": "step", "data_wait_ms": 1.0, "forward_backward_ms": 40.0, "reduce_ms": 7.0, "update_ms": 2.0}


def read(folder: Path, records: list[dict[str, Any]]) -> Account:
    path = folder / "metrics_0.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_run(path)


def steps(count: int, every: int = 10) -> list[dict[str, Any]]:
    return [STEP | {"step": every * n, "samples": 32 * every * n, "time_s": 0.5 * n} for n in range(1, count + 1)]


def warning(step: int, straggler: Straggler | None) -> dict[str, Any]:
    return {"event": "warning", "step": step, "straggler": straggler and asdict(straggler)}


def test_parts_add_up_to_the_seconds_of_the_run(tmp_path: Path) -> None:
    """Steps that a restart at step 50 repeats count once. Time outside steps and evaluations is "start and other"."""
    evaluation = {"event": "eval", "time_s": 5.5, "eval_s": 0.4, "step": 100, "samples": 3200}
    run = read(tmp_path, [*steps(10), STEP | {"step": 50, "samples": 1600, "time_s": 5.2}, evaluation])
    assert (run.seconds, run.steps) == (5.5, 100)
    assert savings(run) == pytest.approx(
        {"waiting for the reduction (perfect overlap)": 0.7, "evaluations": 0.4, "waiting for data": 0.1}
    )
    assert list(savings(run).values()) == sorted(savings(run).values(), reverse=True)
    names = ("data_wait_ms", "forward_backward_ms", "reduce_ms", "update_ms", "evaluations", "start and other")
    assert run.parts == pytest.approx(dict(zip(names, (0.1, 4.0, 0.7, 0.2, 0.4, 0.1), strict=True)))
    assert report(run)[-1] == "the run named no rank as a straggler"


def test_stragglers_cost_the_time_that_other_ranks_waited(tmp_path: Path) -> None:
    """Rank 2 (slower) and rank 3 of a host are slow, and rank 2 recovers halfway."""
    hosts = ["h0", "h0", "h1", "h1", "h2"]
    names = [f"rank {rank} on host {host} (data {rank}, tensor 0)" for rank, host in enumerate(hosts)]
    stragglers, records = Stragglers(hosts, [0] * 5, names), []
    for number, record in enumerate(steps(20), 1):
        times = [0.04, 0.04, 0.08 if number <= 10 else 0.04, 0.06, 0.04]
        records += [record, *(warning(record["step"], slow) for _, slow in stragglers.add(times))]
    run = read(tmp_path, records)
    found = savings(run)
    both = 10 * (10 - SLOW_INTERVALS + SLOW_INTERVALS)
    assert found["rank 2 on host h1"] == pytest.approx(both * 0.02)
    alone = 10 * (20 - SLOW_INTERVALS) - both
    assert found["host h1"] == pytest.approx(both * 0.04 + alone * 0.02)
    assert found["rank 3 on host h1"] == pytest.approx(alone * 0.02)
    assert "the run named no rank as a straggler" not in report(run)


def test_a_rank_on_two_hosts_counts_as_two_stragglers(tmp_path: Path) -> None:
    records = steps(20)
    for host, step in (("h2", 50), ("h1", 0)):
        records.insert(step // 10, warning(step, Straggler(1, host, True, own_ms=60.0, median_ms=40.0)))
    found = savings(read(tmp_path, records))
    slow = {name: seconds for name, seconds in found.items() if "host" in name}
    assert slow == pytest.approx({"rank 1 on host h1": 50 * 0.02, "rank 1 on host h2": 150 * 0.02})


def test_a_file_without_steps_is_refused(tmp_path: Path) -> None:
    end = {"event": "end", "status": "success", "time_s": 1}
    for records in ([], [{}], [end], [STEP | {"step": 0, "samples": 0, "time_s": 1.0}, end]):
        with pytest.raises(ValueError, match="no record of steps"):
            read(tmp_path, records)
    with pytest.raises(ValueError, match="no record of steps"):
        read_run(tmp_path / "missing.jsonl")
