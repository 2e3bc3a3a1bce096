"""The planner's plans are feasible, its best plan is the fastest, and a run accepts the plan file."""

import math
import re
from dataclasses import replace
from itertools import product, takewhile
from pathlib import Path

import pytest

from bert.configuration.recipes import RECIPES
from bert.configuration.run_plan import read_plan, settings_of, write_plan
from bert.train import parse
from cluster.model.memory import USABLE_MEMORY, memory_of_rank
from cluster.model.rates import Target, device_of, target_of, target_of_devices
from cluster.model.step import least_step, predict_run, predict_step
from cluster.model.work import REPEATED, Strategy, Work, wikipedia_work
from cluster.plan.search import Found, as_lines, run_plan, search
from cluster.view import write_view
from tests.cluster.conftest import Command, Refused
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


def with_memory(target: Target, size: float) -> Target:
    return replace(target, rates={name: replace(rates, memory_bytes=size) for name, rates in target.rates.items()})


def test_the_best_plan_is_the_fastest_data_parallel_way_to_run_its_batch(
    found: Found, target: Target, work: Work
) -> None:
    """Predict ways to run the best plan's batch that the search may skip. None may be faster than the best plan."""
    best = found.best[0]
    assert [each.seconds for each in found.best] == sorted(each.seconds for each in found.best)
    work = replace(work, samples=best.run.samples)
    others, batch = [], best.strategy.global_batch_size
    ways = product((1, 2), ("bf16", "fp8"), ("flat", "sharded_world"), ("fp32", "bf16"))
    for strategy in (Strategy(batch, *way) for way in ways):
        precision = strategy.precision
        rates = target.rates[precision]
        if sum(memory_of_rank(work, strategy, 1, 8, on_gpu=True).values()) <= USABLE_MEMORY * rates.memory_bytes:
            step = predict_step(work, strategy, rates)
            others.append((predict_run(work, strategy, rates, step).total, strategy))
    fastest = min(others, key=lambda other: other[0])
    assert (found.ranked[0].seconds, found.ranked[0].strategy) == (pytest.approx(fastest[0]), fastest[1])


@pytest.mark.parametrize(("nodes", "per_node", "memory"), [(2, 2, 80e9), (1, 4, 8e9)])
def test_the_search_skips_none_of_the_best_ways(
    nodes: int, per_node: int, memory: float, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, work = RECIPES["h100_1x8"](), replace(work, samples=1e6)
    config = replace(config, log=replace(config.log, division="open"))  # an open recipe gets only its own batch size
    target = target_of_devices(device_of("h100_1x8", None), nodes * per_node, per_node)
    found = search(config, work, with_memory(target, memory))
    monkeypatch.setattr("cluster.plan.search._may_be_among_best", lambda *_: True)
    monkeypatch.setattr("cluster.plan.search._REACH", math.inf)
    every = search(config, work, with_memory(target, memory))
    assert len(every.ranked) > len(found.ranked)
    assert every.best == found.best
    copies = [each.strategy.reduction for each in every.ranked if each.strategy.copy_ranks == nodes * per_node]
    assert {*copies} == {"sharded_world"}, "a single copy has nothing to sum"


def test_every_plan_fits_the_memory_and_divides_the_batch(found: Found, target: Target, work: Work) -> None:
    for each in found.ranked:
        rates = target.rates[each.strategy.precision]
        assert each.memory <= USABLE_MEMORY * rates.memory_bytes
        assert each.strategy.sequences(target.world_size) >= 1
        assert least_step(work, each.strategy, rates).total <= 1.01 * each.step.total, "of a mean batch"
    assert any("does not fit" in each.reason for each in found.refusals)
    assert found.best[0].strategy.copy_ranks == 1
    assert {each.strategy.tensor for each in found.ranked} == {1, 2, 4, 8}, "each is predicted at least once"
    assert {each.strategy.pipeline for each in found.ranked} == {1, 2, 4, 8}
    parts = memory_of_rank(work, found.best[0].strategy, target.nodes, target.ranks_per_node, on_gpu=True)
    assert found.best[0].memory == pytest.approx(sum(parts.values()))


def test_small_memory_needs_recomputation_and_too_small_memory_is_refused(work: Work) -> None:
    config, target = RECIPES["h100_1x8"](), target_of("h100_1x8", None, 2048)
    found = search(config, work, with_memory(target, 5e9))
    assert found.best[0].memory <= USABLE_MEMORY * 5e9
    assert found.best[0].strategy.recompute != "none", "as 8 sequences take more"
    strategies = {each.strategy for each in found.ranked}
    for each in strategies:
        less = takewhile(lambda mode, each=each: mode != each.recompute, REPEATED)
        assert not {replace(each, recompute=other) for other in less} & strategies, "what fits recomputes nothing"
    with pytest.raises(ValueError, match=r"nothing is feasible on 2,048 x H100-SXM-80GB: .*do not fit in bf16"):
        search(config, work, with_memory(target, 1e8))


@pytest.mark.parametrize(("ranks", "per_host", "memory"), [(8, 8, 3e9), (4, 1, 4.2e9)], ids=["tensor", "pipeline"])
def test_ranks_share_copies_only_if_needed(
    ranks: int, per_host: int, memory: float, work: Work, tmp_path: Path
) -> None:
    """The planner must use pipeline parallelism if hosts have one rank, because tensor parallelism needs several."""
    config, work = RECIPES["h100_1x8"](), replace(work, samples=1e6)
    config = replace(config, log=replace(config.log, division="open"))  # an open recipe gets only its own batch size
    target = target_of_devices(device_of("h100_1x8", None), ranks, per_host)
    assert search(config, work, target).best[0].strategy.copy_ranks == 1
    best = search(config, work, with_memory(target, memory)).best[0]
    strategy = best.strategy
    assert strategy.tensor > 1 if per_host > 1 else strategy.gradient_accumulation_steps >= strategy.pipeline > 1
    write_plan(run_plan(config, target, best), tmp_path / "plan.json")
    planned = parse([config.recipe, "--plan", str(tmp_path / "plan.json")])
    assert (planned.parallel, planned.training.cuda_graphs) == (strategy.parallel, strategy.pipeline == 1)
    if per_host > 1:
        few = replace(config, training=replace(config.training, global_batch_size=4, max_samples=40))
        assert search(few, work, target).best[0].strategy.tensor > 1, "4 sequences on 8 ranks"


def test_printed_alternatives_are_sorted_and_agree_with_the_table(found: Found) -> None:
    lines = list(as_lines(found, 8))
    text = "\n".join(lines)
    losses = [float(line.split("%")[0].split()[-1]) for line in lines if line.startswith("  batch ") and "%" in line]
    assert losses == sorted(losses), "the nearest first"
    assert not re.search(r"  -\d+\.\d%", text), "nothing is faster than the first"
    # The table and the list of slower batches print the same step time for a batch.
    rows = {(row[2], row[12]) for row in (line.split() for line in lines[1:6])}
    rivals = re.findall(r"  batch ([\d,]+): .* steps of ([\d.]+) ms", text)
    assert {rival for rival in rivals if rival[0] in {batch for batch, _ in rows}} <= rows


@pytest.mark.parametrize(("recipe", "nodes", "per_node"), [("dgxa100_8x8", 512, 8), ("gb200_18x4", 18, 4)])
def test_a_run_accepts_the_plan_file(recipe: str, nodes: int, per_node: int, tmp_path: Path, cluster: Command) -> None:
    path = tmp_path / "plan.json"
    done = cluster("plan", recipe, "--gpus", nodes * per_node, "--out", path)
    assert ("tensor 8" in done.stdout) == (per_node == 8), "a group of 8 would need two trays"
    plan, config = read_plan(path), parse([recipe, "--plan", str(path)])
    assert (plan.nodes, plan.ranks_per_node, plan.recipe) == (nodes, per_node, recipe)
    assert settings_of(config) == plan.settings
    assert config.training.global_batch_size % (nodes * per_node) == 0
    is_own = config.optimizer == RECIPES[recipe]().optimizer
    assert is_own == (recipe == "gb200_18x4"), "4,096 ranks need another batch"
    assert 0 < sum(plan.step_seconds.values()) < 0.1


def test_plan_refuses_another_number_of_gpus_than_the_probe_has(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "cluster.json"
    write_view(replace(made_up(hosts=1, ranks=2), collectives=(), outliers=()), path)
    assert "has 2 ranks, but --gpus is 4" in refused("plan", "tiny_cpu", "--cluster", path, "--gpus", 4)
