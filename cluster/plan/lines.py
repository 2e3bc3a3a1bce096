"""Result of a search in lines for people: the best plans with the parts of their steps, and why the others lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.plan.search import Candidate, Found, Refusal
from console.text import counted, visible

_MOST_VALUES = 8
"""Lines about one setting; the rest of its values share one."""

_HEAD = (
    f"{'':>2}{'minutes':>10}{'batch':>8}{'pipeline':>10}{'tensor':>8}{'micro-batches':>15}  {'precision':<10}"
    f"{'reduction':<15}{'sums':<6}{'MiB':>5}{'step ms':>10}{'fwd+bwd':>10}{'reduce':>9}{'update':>9}{'GB':>7}  recompute"
)


def as_lines(found: Found, world_size: int) -> Iterator[str]:
    """Return the best plans as a table, then a line for each other value of a setting and for what is not feasible."""
    yield _HEAD
    for place, each in enumerate(found.best, 1):
        yield _row(place, each, world_size)
    yield ""
    yield f"time to train against the first ({_steps(found.best[0])}), at best with"
    yield from _rivals(found, world_size)
    yield from _refused(found.refusals)


def _row(place: int, each: Candidate, world_size: int) -> str:
    strategy, step = each.strategy, each.step
    # Enough digits to tell the best plans apart.
    minutes = f"{each.seconds / 60:.3f}" if each.seconds < 600 else f"{each.seconds / 60:,.1f}"
    micro = f"{strategy.gradient_accumulation_steps} x {strategy.sequences(world_size)}"
    milliseconds = (1000 * seconds for seconds in (step.total, step.forward_backward, step.reduce, step.update))
    total, computing, reduce, update = milliseconds
    return (
        f"{place:>2} {minutes:>9} {strategy.global_batch_size:>7,} {strategy.stages:>9} {strategy.tensor:>7} {micro:>14}"
        f"  {strategy.precision:<9} {strategy.reduction:<14} {strategy.reduce_dtype:<5} "
        f"{strategy.bucket_bytes / 2**20:>5.0f} {total:>9.2f} {computing:>9.2f} {reduce:>8.2f} {update:>8.2f}"
        f" {each.memory / 1e9:>6.1f}  {strategy.recompute}"
    )


def _values(each: Candidate, world_size: int) -> dict[str, str]:
    """The settings of a candidate that others differ in, in words."""
    strategy = each.strategy
    return {
        "batch": f"{strategy.global_batch_size:,}",
        "pipeline": strategy.stages,
        "tensor": str(strategy.tensor),
        "micro-batch": f"{strategy.sequences(world_size):,}",
        "precision": strategy.precision,
        "reduction": strategy.reduction,
        "sums in": strategy.reduce_dtype,
        "recompute": strategy.recompute,
        "buckets of": f"{strategy.bucket_bytes / 2**20:g} MiB",
    }


def _rivals(found: Found, world_size: int) -> Iterator[str]:
    """A line for each value of a setting that the best does not have, about the fastest that has it.

    Micro-batches are compared at the best's own batch and copies: those of others follow from them.
    """
    best = found.best[0]
    own = _values(best, world_size)
    rivals: dict[tuple[str, str], Candidate] = {}
    # `ranked` is sorted, so that the first candidate with a value is the fastest with it.
    for each in found.ranked:
        values = _values(each, world_size)
        for setting, value in values.items():
            alike = setting != "micro-batch" or all(
                values[name] == own[name] for name in ("batch", "pipeline", "tensor")
            )
            if value != own[setting] and alike:
                rivals.setdefault((setting, value), each)
    for setting in own:
        losing = [(value, rival) for (named, value), rival in rivals.items() if named == setting]
        for value, rival in losing[:_MOST_VALUES]:
            yield f"  {f'{setting} {value}:':<28}{rival.seconds / best.seconds - 1:+7.1%}  {_cause(best, rival)}"
        if rest := [value for value, _ in losing[_MOST_VALUES:]]:
            yield f"  {setting} {', '.join(rest)}: more still"


def _cause(best: Candidate, rival: Candidate) -> str:
    """Say what makes a rival slower: another number of steps, or the part that takes the most longer."""
    # Steps of different batches do not compare part by part: samples to converge differ as well.
    if rival.strategy.global_batch_size != best.strategy.global_batch_size:
        return _steps(rival)
    longer = {part: rival.step.parts[part] - seconds for part, seconds in best.step.parts.items()}
    most = max(longer, key=lambda part: longer[part])
    before, after = 1000 * best.step.parts[most], 1000 * rival.step.parts[most]
    return f"{most.replace('_', ' ')} {after:.2f} ms a step, not {before:.2f}"


def _steps(each: Candidate) -> str:
    return f"{each.run.samples / 1e6:.2f} million samples in {each.run.steps:,.0f} steps of {1000 * each.step.total:.2f} ms"


def _refused(refusals: Sequence[Refusal]) -> Iterator[str]:
    """A line for each reason, with all values that it is the reason for."""
    values: dict[tuple[str, str], list[str]] = {}
    for each in refusals:
        # Many values fail for the same reason, and share its line.
        shown = f"{each.value:,}" if isinstance(each.value, int) else str(each.value)
        known = values.setdefault((each.setting, each.reason), [])
        if shown not in known:
            known.append(shown)
    if values:
        yield "not feasible"
    for (setting, reason), found in values.items():
        yield f"  {setting} {', '.join(found)}: {visible(reason)}"


def summary(candidate: Candidate) -> str:
    """Say in a line what a plan does and where its hyperparameters are from."""
    optimizer, run = candidate.schedule.optimizer, candidate.run
    return (
        f"batch {candidate.schedule.global_batch_size:,}: learning rate {optimizer.base_learning_rate:g}, betas "
        f"{optimizer.beta_1:g} and {optimizer.beta_2:g}, decay {optimizer.weight_decay_rate:g}, "
        f"{counted(optimizer.learning_rate_training_steps, 'step')}; {run.samples / 1e6:.3g} million samples; "
        f"{visible(candidate.schedule.source)}"
    )
