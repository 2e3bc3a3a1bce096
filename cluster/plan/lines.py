"""Result of a search as lines of text: the best plans, and why the others lose."""

from collections.abc import Iterator

from cluster.plan.search import Candidate, Found
from console.text import counted, visible

_MOST_VALUES = 8
"""Maximum number of values of one setting that get a line of their own."""


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
