"""A run with a plan takes the plan's settings, rejects contradictions, and compares its step time with the plan's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bert.configuration.recipes import RECIPES
from bert.configuration.run_plan import PLANNED, RunPlan, read_plan, settings_of, write_plan
from bert.execution.phases import PHASES
from bert.reporting.reporter import Reporter, StepLines
from bert.train import main, parse
from compliance.log.metrics import EndRecord, MetricsWriter, RunRecord, StepRecord
from compliance.log.schedule import EvaluationSchedule
from tests.bert.reporting.test_displays import STEP as A_STEP

STEP = {"data_wait": 0.0, "forward_backward": 0.020, "reduce": 0.005, "update": 0.004, "other": 0.001}


def planned(recipe: str = "tiny_cpu", **settings: str) -> RunPlan:
    names = {name.partition(".")[2]: name for name in PLANNED}
    changed = {names[name]: value for name, value in settings.items()}
    return RunPlan(recipe, "CPU", 1, 2, settings_of(RECIPES[recipe]()) | changed, "the recipe's", STEP, 60.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    plan = planned(gradient_accumulation_steps="2", reduction="hierarchical", base_learning_rate="0.004")
    write_plan(plan, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_plan_is_read_back_and_its_settings_are_taken(file: Path, tmp_path: Path) -> None:
    config = parse(["tiny_cpu", "--plan", str(file), "--log.system", "mine"])
    assert settings_of(config) == read_plan(file).settings
    assert (config.training.reduction, config.optimizer.base_learning_rate) == ("hierarchical", 0.004)
    assert (config.plan, config.log.system) == (file, "mine")
    assert parse([f"--plan={file}"]) == parse(["tiny_cpu", "--plan", str(file)]), "the recipe may be left out"
    for recipe in ("tiny_cpu", "h100_8x8"):
        write_plan(planned(recipe), tmp_path / "recipe.json")
        assert replace(parse(["--plan", str(tmp_path / "recipe.json")]), plan=None) == RECIPES[recipe]()


def test_a_plan_of_another_version_is_refused(tmp_path: Path) -> None:
    empty: dict[str, Any] = {"recipe": "", "settings": {}, "step_seconds": {}}
    for name, value in (empty | {"nodes": 0, "ranks_per_node": 0}).items():
        write_plan(replace(planned(), **{name: value}), tmp_path / "plan.json")
        with pytest.raises(ValueError, match=r"plan\.json.*another version of this program made it: its recipe"):
            read_plan(tmp_path / "plan.json")


def test_settings_that_contradict_a_plan_are_refused(file: Path, tmp_path: Path) -> None:
    parse(["tiny_cpu", "--plan", str(file), "--training.reduction", "hierarchical"])
    with pytest.raises(ValueError, match=r"training\.reduction is flat, but .*plan\.json plans hierarchical"):
        parse(["tiny_cpu", "--training.reduction", "flat", "--plan", str(file)])
    (tmp_path / "mine.toml").write_text("[training]\nglobal_batch_size = 64\n")
    with pytest.raises(ValueError, match=r"training\.global_batch_size is 64, but .* plans 32"):
        parse(["tiny_cpu", "--config", str(tmp_path / "mine.toml"), "--plan", str(file)])
    with pytest.raises(ValueError, match="the plan is for the recipe tiny_cpu, expected h100_1x8"):
        parse(["h100_1x8", "--plan", str(file)])


def test_a_plan_with_an_invalid_value_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(planned(reduction="--help"), tmp_path / "plan.json")
    assert main(["--plan", str(tmp_path / "plan.json")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "training.reduction" in line
    assert "plan.json" in line


def interval(step: int, **milliseconds: float) -> StepRecord:
    parts = {f"{part}_ms": milliseconds.get(part, 1000 * STEP[part]) for part in PHASES}
    return msgspec.structs.replace(A_STEP, step=step, step_ms=sum(parts.values()) + 1000 * STEP["other"], **parts)


@pytest.mark.parametrize(
    ("reduce_ms", "forward_backward_ms", "said"),
    [
        (5.0, 20.0, None),
        (11.0, 20.0, None),
        (15.0, 21.0, "41.0 ms, 37% more than the 30.0 ms of p.json: mostly in reduce, 15.0 ms instead of 5.0"),
        (5.0, 9.0, "19.0 ms, 37% less than the 30.0 ms of p.json: mostly in forward backward, 9.0 ms instead of 20.0"),
    ],
)  # fmt: skip
def test_a_run_warns_of_the_phase_that_differs_most_from_its_plan(
    reduce_ms: float, forward_backward_ms: float, said: str | None, tmp_path: Path
) -> None:
    """A difference of 20 % causes no warning. The first interval, in which the loader starts, is an outlier."""
    lines: list[str] = []
    sinks = [
        MetricsWriter(tmp_path / "metrics.jsonl", RunRecord()),
        StepLines(lines.append, 0.36, 1000, EvaluationSchedule(100, 32)),
    ]
    with Reporter(sinks, (planned(), Path("p.json"))) as reporter:
        reporter.write(interval(20, data_wait=500.0))
        for step in (40, 60, 80):
            reporter.write(interval(step, reduce=reduce_ms, forward_backward=forward_backward_ms))
        reporter.end(80, EndRecord("success", 8.0, 2560, 0.4))
    with pytest.raises(ValueError, match="closed file"):
        sinks[0].write(EndRecord("success"))
    parts = {
        "data_wait": 0.0,
        "forward_backward": forward_backward_ms,
        "reduce": reduce_ms,
        "update": 4.0,
        "other": 1.0,
    }
    found = {"step": sum(parts.values())} | parts | {"planned_step": 30.0}
    found |= {f"planned_{name}": 1000 * seconds for name, seconds in STEP.items()}
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    [plan] = [event for event in events if event["event"] == "plan"]
    assert plan == {"event": "plan"} | {f"{name}_ms": value for name, value in found.items()}
    assert events[-1]["event"] == "end"
    assert lines[4] == f"plan: a step took {found['step']:.1f} ms, planned 30.0 ms"
    assert lines[5:-1] == ([f"warning at step 80: a step took {said}"] if said else [])


def test_a_run_without_intervals_prints_no_comparison_with_its_plan() -> None:
    lines: list[str] = []
    sink = StepLines(lines.append, 0.36, 1000, EvaluationSchedule(100, 32))
    Reporter([sink], (planned(), Path("p.json"))).end(0, EndRecord("aborted", 8.0, 0))
    assert lines == ["end: aborted after 0 samples and 8.0 s"]
