"""Forecast of a run before it starts: the memory of a rank by part, and a step on devices that its recipe is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bert.configuration.config import Config
from cluster.model.memory import memory_of_rank
from cluster.model.step import predict_step
from cluster.model.strategy import strategy_of
from cluster.model.work import Work, work_of
from cluster.plan.search import RECOMPUTES, USABLE_MEMORY
from cluster.plan.target import described, device_of


def forecast(config: Config, world_size: int, local_size: int = 0, work: Work | None = None) -> Iterator[str]:
    """Say in lines what a rank holds, by recomputation mode, and what a step is predicted to take where the device is known.

    Args:
        local_size: ranks of a node; 0 where that is not known, and all of a device's usual nodes are taken.
        work: of the run, that of its data sets unless given.
    """
    try:
        device, per_node = device_of(config.recipe, None)
    # An unknown device still has memory to state: only the step's time needs its facts.
    except ValueError:
        device, per_node = None, world_size
    on_gpu = config.training.device == "cuda"
    # Nodes of the device's usual size, or the whole run where it is smaller than one.
    a_node = local_size or min(per_node, world_size)
    nodes = world_size // a_node
    work, strategy = work or work_of(config), strategy_of(config)
    memory = memory_of_rank(work, strategy, nodes, a_node, on_gpu)
    yield f"a rank holds {_gigabytes(sum(memory.values()))} at most: " + ", ".join(
        f"{part} {_gigabytes(size)}" for part, size in memory.items() if size
    )
    # What other modes would hold tells at once whether recomputation would help.
    others = {
        mode: sum(memory_of_rank(work, replace(strategy, recompute=mode), nodes, a_node, on_gpu).values())
        for mode in RECOMPUTES
        if mode != strategy.recompute
    }
    yield f"that recomputes {strategy.recompute}; " + ", ".join(
        f"{mode} would hold {_gigabytes(size)}" for mode, size in others.items()
    )
    if device is None:
        return
    # Not all of a device's memory can be used; the search counts with the same share.
    usable = USABLE_MEMORY * device.memory_gb * 1e9
    if sum(memory.values()) > usable:
        remedy = "`python -m cluster plan` finds what fits"
        yield f"more than the {_gigabytes(usable)} that {device.name} has for it: {remedy}"
    # There is no rate where the device lacks the precision, such as FP8 on an A100: then memory is all that is said.
    rates = described(device, world_size, a_node).rates.get(strategy.precision)
    if rates is not None:
        step = predict_step(work, strategy, rates)
        parts = ", ".join(
            f"{name.replace('_', ' ')} {1000 * seconds:.0f}" for name, seconds in step.parts.items() if seconds
        )
        yield f"a step is predicted to take {1000 * step.total:.0f} ms on {nodes} x {a_node} {device.name}: {parts}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
