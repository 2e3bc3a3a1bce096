"""Probe this machine, make a plan for it, and train by the plan, comparing planned and measured step times."""

import re
from dataclasses import replace
from pathlib import Path

from bert.configuration.run_plan import read_plan
from cluster.view import read_view, write_view
from compliance.report.page import render
from compliance.report.results import load_results
from tests.distributed.ranks import records, torchrun
from tests.e2e.test_scripts import NEVER_REACHED, SHORT, one_error, start
from tests.programs import PATIENCE_S

STEPS = 20


def make_sums_slow(path: Path) -> None:
    """Add a second to every collective but all-gather. Two pipeline stages, which use no other, are then fastest."""
    view = read_view(path)
    collectives = (
        replace(each, points=tuple((size, seconds + 1, busy) for size, seconds, busy in each.points))
        if each.operation != "all-gather"
        else each
        for each in view.collectives
    )
    write_view(replace(view, collectives=tuple(collectives)), path)


def test_a_run_follows_the_plan_made_from_a_probe(checkout: Path, tmp_path: Path) -> None:
    python, view, plan = checkout / ".venv/bin/python", tmp_path / "cluster.json", tmp_path / "plan.json"
    probed, _ = torchrun(2, ["probe", "--out", str(view), "--seconds", "1"], module="cluster").communicate(PATIENCE_S)
    assert view.exists(), probed
    make_sums_slow(view)
    done = start(python, "-m", "cluster", "plan", "tiny_cpu", "--cluster", str(view), "--out", str(plan), cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"./run_and_time.sh tiny_cpu -- --plan {plan}" in done.stdout
    assert "no micro-batch fits" not in done.stdout, "bf16 is refused for another reason"

    results = tmp_path / "results"
    settings = ("--", "--plan", str(plan), *SHORT, NEVER_REACHED, "--log.results", str(results))
    short = ("--training.max-steps", str(STEPS), "--training.seed", "1")
    done = start(checkout / "run_and_time.sh", "tiny_cpu", "1", *settings, *short, cwd=tmp_path)
    assert "tiny_cpu, run 1 of 1: 2 processes" in done.stdout, done.stdout + done.stderr
    assert "data 1 x pipeline 2 x tensor 1" in done.stdout
    log = (results / "tiny_cpu/bert/result_0.txt").read_text()
    for name, value in read_plan(plan).settings.items():
        assert f"# config.{name}: {value}\n" in log
    [compared] = records(results, "plan")
    planned_ms = 1000 * sum(read_plan(plan).step_seconds.values())
    assert abs(compared["planned_step_ms"] - planned_ms) < 1e-3 * planned_ms
    assert compared["step_ms"] > compared["forward_backward_ms"] > 0
    said = [warning["text"] for warning in records(results, "warning")]
    is_far = abs(compared["step_ms"] / planned_ms - 1) > 0.2
    assert any(re.search(r"of .*plan\.json: mostly in \w+", text) for text in said) == is_far
    assert "Step of run 0 as planned and as measured" in render(load_results(results / "tiny_cpu/bert"))

    refused = start(checkout / "run_and_time.sh", "tiny_cpu", "1", *settings, cwd=tmp_path, NPROC="1")
    assert "is a plan for 1 node of 2 ranks, but the run has 1 rank" in one_error(refused)
