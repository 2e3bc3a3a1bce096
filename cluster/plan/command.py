"""Commands about plans: choose one for a recipe, show why, and write it for the run."""

from __future__ import annotations

import shlex
from pathlib import Path

from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.run_plan import RunPlan, settings_of, write_plan
from bert.own_text import FOLLOWING
from cluster.plan.lines import as_lines, summary
from cluster.plan.scaling import CAUSES, ScalingPoint, published_on, scale, write_table
from cluster.plan.scaling_page import write_page
from cluster.plan.search import Candidate, configured, search
from cluster.plan.target import Target, device_of, target_of, work_for
from console.files import require_writable
from console.program import say
from console.text import counted, did_you_mean


def recipe_named(name: str) -> Config:
    """Return a recipe. Raises ``ValueError`` where there is none of that name, or its settings follow from its data."""
    if name not in RECIPES:
        raise ValueError(
            f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}{did_you_mean(name, list(RECIPES))}"
        )
    # Its settings are derived from its text when a run starts, so there is nothing fixed to search around.
    if name in FOLLOWING:
        raise ValueError(f"{name} takes its settings from its data when it starts: there is nothing to plan")
    return RECIPES[name]()


def plan(
    recipe: str, cluster: Path | None, gpus: int | None, accelerator: str | None, networking: str, out: Path
) -> None:
    """Print the best plans and why the others lose, and write the best one.

    Raises:
        ValueError: a request that cannot be met, or nothing is feasible.
    """
    require_writable(out)
    config = recipe_named(recipe)
    target = target_of(recipe, cluster, gpus, accelerator, networking)
    found = search(config, work_for(config), target)
    best = found.best[0]
    # Before it prints: a reader such as `head` may go before the end.
    write_plan(run_plan(config, target, best), out)
    where = f"{counted(target.nodes, 'node')} of {target.ranks_per_node} x {target.device}"
    source = f"as {cluster} measured" if cluster else "by its facts"
    say(f"{recipe} on {where}, {source}: {counted(len(found.ranked), 'way')} predicted")
    for line in as_lines(found, target.world_size):
        say(line)
    say()
    say(summary(best))
    say(f"{out}: ./run_and_time.sh {recipe} -- --plan {shlex.quote(str(out))}")


def run_plan(config: Config, target: Target, chosen: Candidate) -> RunPlan:
    """Return the plan of a run for what was chosen."""
    return RunPlan(
        recipe=config.recipe,
        device=target.device,
        nodes=target.nodes,
        ranks_per_node=target.ranks_per_node,
        # A plan has the settings that planning may change, as a command line states them.
        settings=settings_of(configured(config, chosen.schedule, chosen.strategy)),
        hyperparameters=chosen.schedule.source,
        step_seconds={**chosen.step.parts, "other": 0.0},
        train_seconds=chosen.seconds,
    )


def draw_scale(
    recipe: str, accelerator: str | None, gpus_per_node: int, networking: str, out: Path | None, page: Path | None
) -> None:
    """Print the best plan of each number of accelerators, and write table and page where they are asked for.

    Raises:
        ValueError: a request that cannot be met.
    """
    for file in (out, page):
        if file is not None:
            require_writable(file)
    config = recipe_named(recipe)
    device, _ = device_of(recipe, accelerator)
    names = "".join(f"{cause.split()[0]:>11}" for cause in CAUSES)

    def show(point: ScalingPoint) -> None:
        if point.machine.nodes == 1:
            say(
                f"{device.name:>14}{'batch':>8}  {'precision':<10}{'reduction':<14}{'minutes':>8}{'efficiency':>12}{names}"
            )
        strategy = point.plan.strategy
        shares = "".join(f" {point.share(cause):10.1%}" for cause in CAUSES)
        say(
            f"{point.accelerators:14,} {strategy.global_batch_size:7,}  {strategy.precision:<9} {strategy.reduction:<13}"
            f" {point.minutes:8.3g} {point.efficiency:11.0%}{shares}"
        )

    # Each row as soon as it is there: a plan takes seconds.
    points = scale(config, device, gpus_per_node, networking, show)
    if out is not None:
        write_table(points, out)
        say(out)
    if page is not None:
        write_page(recipe, device, points, published_on(device), page)
        say(page)
