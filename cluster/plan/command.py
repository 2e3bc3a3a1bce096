"""Commands `plan` and `scale`."""

import shlex
from pathlib import Path

from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.run_plan import RunPlan, settings_of, write_plan
from bert.own_text import FOLLOWING
from cluster.plan.lines import as_lines, summary
from cluster.plan.scaling import CAUSES, scale, write_page
from cluster.plan.search import Candidate, configured, search
from cluster.plan.target import Target, device_of, target_of, work_for
from console.files import require_writable
from console.program import say
from console.text import counted, did_you_mean


def recipe_named(name: str) -> Config:
    """Return the named recipe. Raises ``ValueError`` if it is unknown or if its settings depend on its data."""
    if name not in RECIPES:
        raise ValueError(
            f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}{did_you_mean(name, list(RECIPES))}"
        )
    if name in FOLLOWING:
        raise ValueError(f"{name} derives its settings from its data when it starts: there is nothing to plan")
    return RECIPES[name]()


def plan(
    recipe: str, cluster: Path | None, gpus: int | None, accelerator: str | None, networking: str, out: Path
) -> None:
    """Print the best plans and why others lose, and write the best plan. Raises ``ValueError`` if no plan is feasible."""
    require_writable(out)
    config = recipe_named(recipe)
    target = target_of(recipe, cluster, gpus, accelerator, networking)
    found = search(config, work_for(config), target)
    best = found.best[0]
    # Write before printing, because a reader such as `head` may close the pipe early.
    write_plan(run_plan(config, target, best), out)
    where = f"{counted(target.nodes, 'node')} of {target.ranks_per_node} x {target.device}"
    source = f"as measured in {cluster}" if cluster else "by its facts"
    say(f"{recipe} on {where}, {source}: {counted(len(found.ranked), 'way')} predicted")
    for line in as_lines(found, target.world_size):
        say(line)
    say()
    say(summary(best))
    say(f"{out}: ./run_and_time.sh {recipe} -- --plan {shlex.quote(str(out))}")


def run_plan(config: Config, target: Target, chosen: Candidate) -> RunPlan:
    return RunPlan(
        recipe=config.recipe,
        device=target.device,
        nodes=target.nodes,
        ranks_per_node=target.ranks_per_node,
        settings=settings_of(configured(config, chosen.schedule, chosen.strategy)),
        hyperparameters=chosen.schedule.source,
        step_seconds={**chosen.step.parts, "other": 0.0},
        train_seconds=chosen.seconds,
    )


def draw_scale(recipe: str, accelerator: str | None, gpus_per_node: int, networking: str, out: Path | None) -> None:
    """Print the best plan for each number of accelerators, and write a page if ``out`` is given."""
    if out is not None:
        require_writable(out)
    config = recipe_named(recipe)
    device, _ = device_of(recipe, accelerator)
    causes = "".join(f"{cause.split()[0]:>11}" for cause in CAUSES)
    points = []
    for point in scale(config, device, gpus_per_node, networking):
        if not points:
            say(
                f"{device.name:>14}{'batch':>8}  {'precision':<10}{'reduction':<14}{'minutes':>8}{'efficiency':>12}{causes}"
            )
        strategy = point.plan.strategy
        shares = "".join(f" {point.share(cause):10.1%}" for cause in CAUSES)
        say(
            f"{point.accelerators:14,} {strategy.global_batch_size:7,}  {strategy.precision:<9} {strategy.reduction:<13}"
            f" {point.minutes:8.3g} {point.efficiency:11.0%}{shares}"
        )
        points.append(point)
    if out is not None:
        write_page(recipe, device, points, out)
        say(out)
