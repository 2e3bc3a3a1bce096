"""Planner: what it finds is feasible and the fastest of what it predicts, and its file is one that a run takes."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from bert.configuration.recipes import RECIPES
from bert.configuration.run_plan import read_plan, settings_of, write_plan
from bert.train import parse
from cluster.model.memory import memory_of_rank
from cluster.model.step import predict_run, predict_step
from cluster.model.strategy import Strategy
from cluster.model.work import Work, wikipedia_work
from cluster.plan.command import run_plan
from cluster.plan.lines import as_lines
from cluster.plan.schedules import schedules
from cluster.plan.search import RECOMPUTES, REDUCTIONS, USABLE_MEMORY, Found, search
from cluster.plan.target import Target, described, device_of, target_of, work_for
from cluster.view import write_view
from tests.cluster.conftest import Command
from tests.cluster.test_view import made_up

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("h100_1x8", None, None)


@pytest.fixture(scope="module")
def work() -> Work:
    return wikipedia_work()


@pytest.fixture(scope="module")
def found(target: Target, work: Work) -> Found:
    return search(RECIPES["h100_1x8"](), work, target)


def test_every_batch_has_hyperparameters_that_reached_the_target() -> None:
    for recipe in RECIPES.values():
        config = recipe()
        known = {schedule.global_batch_size: schedule for schedule in schedules(config)}
        own = known[config.training.global_batch_size]
        assert own.optimizer == config.optimizer
        assert own.max_samples == config.training.max_samples
        if config.log.division == "open":
            assert len(known) == 1, "nothing is published of another model"
            continue
        assert {448, 768, 1536, 3072, 4608, 12288, 16384} <= set(known)
        for schedule in known.values():
            assert schedule.source
            if schedule is not own:
                assert schedule.samples is not None
                assert schedule.samples <= schedule.max_samples
                assert schedule.optimizer.weight_decay_rate > 0


def test_the_best_is_the_fastest_of_all_ways_to_run_its_batch(found: Found, target: Target, work: Work) -> None:
    """Every other way is predicted one by one, without what the search leaves out."""
    best = found.best[0]
    assert [each.seconds for each in found.best] == sorted(each.seconds for each in found.best)
    work = replace(work, samples=best.run.samples)
    others = []
    for precision, reduction, dtype, accumulation in product(
        ("bf16", "fp8"), ("flat", "sharded_world"), ("fp32", "bf16"), (1, 2)
    ):
        strategy = Strategy(
            best.strategy.global_batch_size,
            accumulation,
            precision,
            reduction,
            reduce_dtype=dtype,
        )
        rates = target.rates[precision]
        if sum(memory_of_rank(work, strategy, 1, 8, on_gpu=True).values()) <= USABLE_MEMORY * rates.memory_bytes:
            step = predict_step(work, strategy, rates)
            others.append((predict_run(work, strategy, rates, step).total, strategy))
    fastest = min(others, key=lambda other: other[0])
    assert found.ranked[0].seconds == pytest.approx(fastest[0])
    assert found.ranked[0].strategy == fastest[1]


def test_what_is_found_fits_and_divides(found: Found, target: Target, work: Work) -> None:
    for each in found.ranked:
        rates = target.rates[each.strategy.precision]
        assert each.memory <= USABLE_MEMORY * rates.memory_bytes
        assert each.strategy.sequences(target.world_size) >= 1
        assert each.strategy.reduction in REDUCTIONS
    assert any("does not fit" in each.reason for each in found.refusals)
    parts = memory_of_rank(work, found.best[0].strategy, target.nodes, target.ranks_per_node, on_gpu=True)
    assert found.best[0].memory == pytest.approx(sum(parts.values()))


def test_smaller_memory_takes_other_ways_or_none(work: Work) -> None:
    config, target = RECIPES["h100_1x8"](), target_of("h100_1x8", None, 2048)

    def searched(memory: float) -> list[Strategy]:
        small = {name: replace(rates, memory_bytes=memory) for name, rates in target.rates.items()}
        found = search(config, work, replace(target, rates=small))
        assert found.best[0].memory <= USABLE_MEMORY * memory
        return [each.strategy for each in (*found.best, *found.ranked)]

    [best, *strategies] = searched(5e9)
    assert best.recompute != "none", "as 8 sequences take more"
    recomputing = [each for each in strategies if each.recompute != "none"]
    for each in recomputing:
        less = RECOMPUTES[: RECOMPUTES.index(each.recompute)]
        assert not {replace(each, recompute=other) for other in less} & set(strategies), (
            "what fits computes nothing again"
        )
    none = {name: replace(rates, memory_bytes=1e8) for name, rates in target.rates.items()}
    with pytest.raises(ValueError, match=r"nothing is feasible on 2,048 x H100-SXM-80GB: .*do not fit in bf16"):
        search(config, work, replace(target, rates=none))


def test_ranks_share_copies_where_memory_or_batch_leave_no_other_way(
    found: Found, target: Target, work: Work, tmp_path: Path
) -> None:
    assert found.best[0].strategy.tensor == 1, "which is predicted faster wherever it fits"
    assert {each.strategy.tensor for each in found.ranked} == {1, 2, 4, 8}, "each is predicted once at least"
    config, work = RECIPES["h100_1x8"](), replace(work, samples=1e6)
    config = replace(config, log=replace(config.log, division="open"))  # with its own batch alone
    small = {name: replace(rates, memory_bytes=3e9) for name, rates in target.rates.items()}
    [best, *_] = search(config, work, replace(target, rates=small)).best
    assert best.strategy.tensor > 1
    path = tmp_path / "plan.json"
    write_plan(run_plan(config, target, best), path)
    assert parse(["h100_1x8", "--plan", str(path)]).parallel.tensor == best.strategy.tensor
    few = replace(config, training=replace(config.training, global_batch_size=4, max_samples=40))
    assert search(few, work, target).best[0].strategy.tensor > 1, "of 4 sequences on 8 ranks"


def test_stages_are_chosen_where_nothing_else_fits_and_not_where_a_whole_copy_is_faster(
    found: Found, work: Work, tmp_path: Path
) -> None:
    assert found.best[0].strategy.pipeline == 1, "which is predicted faster wherever it fits"
    assert {each.strategy.pipeline for each in found.ranked} == {1, 2, 4, 8}, "each is predicted once at least"
    config, work = RECIPES["h100_1x8"](), replace(work, samples=1e6)
    config = replace(config, log=replace(config.log, division="open"))  # with its own batch alone
    target = described(device_of("h100_1x8", None)[0], 4, 1)  # one in a host, so that none shares products
    assert search(config, work, target).best[0].strategy.copy_ranks == 1
    small = {name: replace(rates, memory_bytes=4.2e9) for name, rates in target.rates.items()}
    best = search(config, work, replace(target, rates=small)).best[0]
    assert best.strategy.pipeline > 1
    assert best.strategy.gradient_accumulation_steps >= best.strategy.pipeline
    path = tmp_path / "plan.json"
    write_plan(run_plan(config, target, best), path)
    planned = parse(["h100_1x8", "--plan", str(path)])
    assert planned.parallel == best.strategy.parallel
    assert not planned.training.cuda_graphs, "which stages have not"


def test_a_large_model_is_shared_as_its_memory_asks(tmp_path: Path) -> None:
    config = RECIPES["bert_3_9b_8x8"]()
    target = target_of(config.recipe, None, None)
    assert (target.device, target.nodes, target.ranks_per_node) == ("A100-SXM-40GB", 8, 8)
    found = search(config, work_for(config), target)
    best = found.best[0]
    assert best.strategy.copy_ranks > 1
    assert best.memory <= USABLE_MEMORY * 40e9
    path = tmp_path / "plan.json"
    write_plan(run_plan(config, target, best), path)
    assert parse([config.recipe, "--plan", str(path)]).parallel == best.strategy.parallel


def test_lines_say_why_every_other_value_loses(found: Found) -> None:
    lines = list(as_lines(found, 8))
    assert lines[1].split()[0] == "1"
    text = "\n".join(lines)
    for said in (
        "batch 768:",
        "  micro-batch ",
        "tensor 2:",
        "pipeline 2:",
        "precision bf16:",
        "reduction flat:",
        "sums in fp32:",
    ):
        assert said in text
    assert "precision fp32: the facts of H100-SXM-80GB have no rate of it" in text
    losses = [line.split("%")[0].split()[-1] for line in lines if line.startswith("  batch ") and "%" in line]
    assert losses == sorted(losses, key=float), "the nearest first"
    assert not re.search(r"  -\d+\.\d%", text), "nothing is faster than the first"
    # A plan has one time of a step, wherever it stands.
    rows = {(row[2], row[12]) for row in (line.split() for line in lines[1:6])}
    rivals = re.findall(r"  batch ([\d,]+): .* steps of ([\d.]+) ms", text)
    shown_twice = [rival for rival in rivals if rival[0] in {batch for batch, _ in rows}]
    assert shown_twice
    assert set(shown_twice) <= rows


def test_a_plan_for_4096_ranks_is_one_that_a_run_takes(tmp_path: Path, cluster: Command) -> None:
    path = tmp_path / "plan.json"
    assert cluster("plan", "dgxa100_8x8", "--gpus", 4096, "--out", path).status == 0
    plan = read_plan(path)
    assert (plan.nodes, plan.ranks_per_node, plan.recipe) == (512, 8, "dgxa100_8x8")
    assert plan.hyperparameters
    config = parse(["dgxa100_8x8", "--plan", str(path)])
    assert settings_of(config) == plan.settings
    assert config.training.global_batch_size % 4096 == 0
    assert config.optimizer != RECIPES["h100_8x8"]().optimizer, "those of another batch"
    assert sum(plan.step_seconds.values()) < 0.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["h100_9x9"], "unknown recipe 'h100_9x9': expected one of tiny_cpu"),
        (["own_text_cpu"], "own_text_cpu derives its settings from its data"),
        (["tiny_cpu"], "tiny_cpu names no device: give --cluster"),
        (["h100_1x8", "--accelerator", "H900"], "accelerator 'H900' is unknown; nearest:"),
        (["h100_1x8", "--gpus", "12"], "--gpus is 12, expected whole nodes of 8"),
        (["h100_1x8", "--gpus", "0"], "--gpus is 0, expected at least 1"),
        (["h100_1x8", "--gpus", "16777216"], "nodes: 2,097,152, expected 1 to 1,048,576"),
        (["h100_1x8", "--gpus", "262144"], "global batch size 262,144 on 262,144 accelerators: expected at least one"),
        (["h100_1x8", "--cluster", "none.json"], "none.json: No such file or directory"),
        (["h100_1x8", "--cluster", "x.json", "--accelerator", "H100"], "omit --accelerator and --networking"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert said in refused("plan", *arguments, "--out", tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_a_view_is_planned_for_as_many_ranks_as_it_has(tmp_path: Path, refused: Callable[..., str]) -> None:
    path = tmp_path / "cluster.json"
    write_view(replace(made_up(hosts=1, ranks=2), collectives=(), outliers=()), path)
    said = refused("plan", "tiny_cpu", "--cluster", path, "--gpus", 4)
    assert "cluster.json has 2 ranks, but --gpus is 4" in said


def test_facts_are_those_of_the_recipes_devices() -> None:
    assert device_of("dgxa100_8x8", None)[0].name == "A100-SXM-80GB"
    device, per_node = device_of("h100_64x8", None)
    assert (described(device, 4, per_node).nodes, described(device, 512, per_node).nodes) == (1, 64)
    assert work_for(RECIPES["h100_1x8"]()).model == RECIPES["h100_1x8"]().model
