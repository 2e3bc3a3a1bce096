"""Commands `plan` and `scale`, the text of a plan, and the forecast of a run before it starts."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.run_plan import RunPlan, settings_of, write_plan
from bert.own_text import FOLLOWING
from cluster.model.memory import memory_of_rank
from cluster.model.step import predict_step
from cluster.model.strategy import strategy_of
from cluster.model.work import work_of
from cluster.plan.scaling import CAUSES, scale, write_page
from cluster.plan.search import RECOMPUTES, USABLE_MEMORY, Candidate, Found, configured, search
from cluster.plan.target import Target, described, device_of, target_of, work_for
from console.files import require_writable
from console.program import say
from console.text import counted, did_you_mean, visible

_MOST_VALUES = 8
"""Maximum number of values of one setting that get a line of their own."""


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


def as_lines(found: Found, world_size: int) -> Iterator[str]:
    """Return the best plans as a table, a line for each other value of a setting, and the infeasible values."""
    table = [_row(place, each, world_size) for place, each in enumerate(found.best, 1)]
    rows = [tuple(table[0]), *(tuple(row.values()) for row in table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
    yield ""
    yield f"time to train compared with the first plan ({_steps(found.best[0])}), at best with"
    yield from _rivals(found, world_size)
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for each in found.refusals:
        value = f"{each.value:,}" if isinstance(each.value, int) else str(each.value)
        reasons.setdefault((each.setting, each.reason), {})[value] = None
    if reasons:
        yield "not feasible"
    for (setting, reason), values in reasons.items():
        yield f"  {setting} {', '.join(values)}: {visible(reason)}"


def summary(candidate: Candidate) -> str:
    """Describe a plan and the source of its hyperparameters in one line."""
    optimizer, run = candidate.schedule.optimizer, candidate.run
    return (
        f"batch {candidate.schedule.global_batch_size:,}: learning rate {optimizer.base_learning_rate:g}, betas "
        f"{optimizer.beta_1:g} and {optimizer.beta_2:g}, decay {optimizer.weight_decay_rate:g}, "
        f"{counted(optimizer.learning_rate_training_steps, 'step')}; {run.samples / 1e6:.3g} million samples; "
        f"{visible(candidate.schedule.source)}"
    )


def _row(place: int, each: Candidate, world_size: int) -> dict[str, str]:
    step = each.step
    # Use enough digits to tell the best plans apart.
    minutes = f"{each.seconds / 60:.3f}" if each.seconds < 600 else f"{each.seconds / 60:,.1f}"
    times = {"step ms": step.total, "fwd+bwd": step.forward_backward, "reduce": step.reduce, "update": step.update}
    return {
        "": str(place),
        "minutes": minutes,
        **_settings(each, world_size),
        **{column: f"{1000 * seconds:.2f}" for column, seconds in times.items()},
        "GB": f"{each.memory / 1e9:.1f}",
    }


def _settings(each: Candidate, world_size: int) -> dict[str, str]:
    strategy = each.strategy
    return {
        "batch": f"{strategy.global_batch_size:,}",
        "pipeline": strategy.stages,
        "tensor": str(strategy.tensor),
        "micro-batches": f"{strategy.gradient_accumulation_steps} x {strategy.sequences(world_size)}",
        "precision": strategy.precision,
        "reduction": strategy.reduction,
        "sums": strategy.reduce_dtype,
        "recompute": strategy.recompute,
    }


def _rivals(found: Found, world_size: int) -> Iterator[str]:
    """Describe the fastest candidate with each value of a setting that the best plan does not have.

    Micro-batches depend on the batch size and the model copies, so only plans that share both with the best plan count.
    """
    best = found.best[0]
    own = _settings(best, world_size)
    rivals: dict[str, dict[str, Candidate]] = {setting: {} for setting in own}
    for each in found.ranked:  # the fastest first
        values = _settings(each, world_size)
        is_comparable = all(values[name] == own[name] for name in ("batch", "pipeline", "tensor"))
        for setting, value in values.items():
            if value != own[setting] and (is_comparable or setting != "micro-batches"):
                rivals[setting].setdefault(value, each)
    for setting, losing in rivals.items():
        for value, rival in [*losing.items()][:_MOST_VALUES]:
            yield f"  {f'{setting} {value}:':<28}{rival.seconds / best.seconds - 1:+7.1%}  {_cause(best, rival)}"
        if rest := [*losing][_MOST_VALUES:]:
            yield f"  {setting} {', '.join(rest)}: more still"


def _cause(best: Candidate, rival: Candidate) -> str:
    # Steps of different batch sizes cannot be compared part by part.
    if rival.strategy.global_batch_size != best.strategy.global_batch_size:
        return _steps(rival)
    longer = {part: rival.step.parts[part] - seconds for part, seconds in best.step.parts.items()}
    part = max(longer, key=lambda part: longer[part])
    before, after = 1000 * best.step.parts[part], 1000 * rival.step.parts[part]
    return f"{part.replace('_', ' ')} {after:.2f} ms a step, not {before:.2f}"


def _steps(each: Candidate) -> str:
    return f"{each.run.samples / 1e6:.2f} million samples in {each.run.steps:,.0f} steps of {1000 * each.step.total:.2f} ms"


def forecast(config: Config, world_size: int, local_size: int = 0) -> Iterator[str]:
    """Return lines about a rank's memory with each recomputation mode, and about the step time if the device is known.

    ``local_size`` is the number of ranks of a node, or 0 if it is unknown. Then nodes have the device's usual size.
    """
    try:
        device, per_node = device_of(config.recipe, None)
    except ValueError:
        device, per_node = None, world_size
    a_node = local_size or min(per_node, world_size)
    nodes = world_size // a_node
    work, strategy = work_of(config), strategy_of(config)

    def memory(mode: str) -> dict[str, float]:
        chosen = replace(strategy, recompute=mode)
        return memory_of_rank(work, chosen, nodes, a_node, config.training.device == "cuda")

    parts = memory(strategy.recompute)
    total = sum(parts.values())
    yield f"a rank holds {_gigabytes(total)} at most: " + ", ".join(
        f"{part} {_gigabytes(size)}" for part, size in parts.items() if size
    )
    yield f"training.recompute is {strategy.recompute}; " + ", ".join(
        f"{mode} would hold {_gigabytes(sum(memory(mode).values()))}"
        for mode in RECOMPUTES
        if mode != strategy.recompute
    )
    if device is None:
        return
    usable = USABLE_MEMORY * device.memory_gb * 1e9
    if total > usable:
        yield f"{device.name} has {_gigabytes(usable)} for it, which is less; `python -m cluster plan` finds what fits"
    # A device may lack the precision, such as FP8 on an A100.
    rates = described(device, world_size, a_node).rates.get(strategy.precision)
    if rates is not None:
        step = predict_step(work, strategy, rates)
        times = ", ".join(
            f"{name.replace('_', ' ')} {1000 * seconds:.0f}" for name, seconds in step.parts.items() if seconds
        )
        yield f"a step is predicted to take {1000 * step.total:.0f} ms on {nodes} x {a_node} {device.name}: {times}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
