"""Commands about plans: choose one for a recipe, show why, and write it for the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bert.configuration.config import Config
from bert.configuration.config_file import did_you_mean
from bert.configuration.recipes import RECIPES
from bert.configuration.run_plan import RunPlan, settings_of, write_plan
from bert.own_text import FOLLOWING
from cluster.plan.lines import as_lines, summary
from cluster.plan.scaling import CAUSES, published_on, scale, write_table
from cluster.plan.scaling_page import write_page
from cluster.plan.search import Candidate, configured, search
from cluster.plan.target import Target, device_of, target_of, work_for
from console.program import say
from console.text import counted


@dataclass(frozen=True)
class PlanRequest:
    """Recipe and the ranks to plan it for."""

    recipe: str
    cluster: Path | None
    gpus: int | None
    accelerator: str | None
    networking: str
    out: Path


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


def plan(request: PlanRequest) -> None:
    """Print the best plans and why the others lose, and write the best one.

    Raises:
        ValueError: a request that cannot be met, or nothing is feasible.
    """
    config = recipe_named(request.recipe)
    target = target_of(request.recipe, request.cluster, request.gpus, request.accelerator, request.networking)
    found = search(config, work_for(config), target)
    where = f"{counted(target.nodes, 'node')} of {target.ranks_per_node} x {target.device}"
    source = f"as {request.cluster} measured" if request.cluster else "by its facts"
    say(f"{request.recipe} on {where}, {source}: {counted(len(found.ranked), 'way')} predicted")
    for line in as_lines(found, target.world_size):
        say(line)
    # `best`, not `ranked`: the few were predicted again by several steps, which may have changed their order.
    best = found.best[0]
    write_plan(run_plan(config, target, best), request.out)
    say()
    say(summary(best))
    say(f"{request.out}: ./run_and_time.sh {request.recipe} -- --plan {request.out}")


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


@dataclass(frozen=True)
class ScaleRequest:
    """Recipe, devices in nodes to scale it over, and files to write."""

    recipe: str
    accelerator: str | None
    gpus_per_node: int
    networking: str
    out: Path | None
    page: Path | None


def draw_scale(request: ScaleRequest) -> None:
    """Print the best plan of each number of accelerators, and write table and page where they are asked for.

    Raises:
        ValueError: a request that cannot be met.
    """
    config = recipe_named(request.recipe)
    device, _ = device_of(request.recipe, request.accelerator)
    # All points before any output: a plan that fails leaves no half table.
    points = scale(config, device, request.gpus_per_node, request.networking)
    names = "".join(f"{cause.split()[0]:>11}" for cause in CAUSES)
    say(f"{device.name:>14}{'batch':>8}  {'precision':<10}{'reduction':<14}{'minutes':>8}{'efficiency':>12}{names}")
    for point in points:
        strategy = point.plan.strategy
        shares = "".join(f"{point.share(cause):11.1%}" for cause in CAUSES)
        say(
            f"{point.accelerators:14,}{strategy.global_batch_size:8,}  {strategy.precision:<10}{strategy.reduction:<14}"
            f"{point.minutes:8.3g}{point.efficiency:12.0%}{shares}"
        )
    if request.out is not None:
        write_table(points, request.out)
        say(request.out)
    if request.page is not None:
        write_page(request.recipe, device, points, published_on(device), request.page)
        say(request.page)
