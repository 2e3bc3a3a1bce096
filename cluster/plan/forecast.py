"""Forecast of a run before it starts: the memory of a rank, and the time of a step on the recipe's devices."""

from collections.abc import Iterator
from dataclasses import replace

from bert.configuration.config import Config
from cluster.model.memory import memory_of_rank
from cluster.model.step import predict_step
from cluster.model.strategy import strategy_of
from cluster.model.work import work_of
from cluster.plan.search import RECOMPUTES, USABLE_MEMORY
from cluster.plan.target import described, device_of


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
