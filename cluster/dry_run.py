"""Predict a run's memory and the time of its step, and check whether the run could start.

    python -m cluster.dry_run RECIPE [--section.field value ...]

The prediction covers runs that use GPUs, or in which several ranks share a copy of the model. For the benchmark's recipes,
the prediction needs no data set. The check is that of ``python -m bert.train RECIPE --dry-run``. The exit status is the
check's, or 2 if the check succeeds but the prediction fails. Without a launcher, the number of ranks comes from the plan or
the recipe's name.
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.filesize import decimal

from bert.configuration.config import Config
from bert.configuration.recipes import shape_of
from bert.configuration.run_plan import read_plan
from bert.parallel.environment import Launch, is_rank
from bert.parallel.mesh import require_whole_copies
from bert.train import main as train
from bert.train import parse, refused
from console.program import accept_any_text, say


def main(arguments: Sequence[str]) -> int:
    accept_any_text()
    problem = None
    try:
        config = parse(arguments)
        if config.training.device == "cuda" and not is_rank():
            ranks = shape_of(config.recipe) or (1,)
            if config.plan is not None:
                plan = read_plan(config.plan)
                ranks = plan.nodes, plan.ranks_per_node
            os.environ["WORLD_SIZE"] = str(math.prod(ranks))
        launch = Launch.from_environment()
    except (ValueError, OSError) as error:
        return refused(error)
    try:
        if config.training.device == "cuda" or config.parallel.copy_ranks > 1:
            for line in list(memory_and_step(config, launch.world_size, launch.local_size)):
                say(f"{config.recipe}: {line}")
    except (ValueError, OSError) as error:
        problem = error
    # Run the check last, so that the verdict is the last line.
    status = train([*arguments, "--dry-run"])
    # The prediction reads the same inputs as the check, so report its error only if the check found no error.
    return refused(problem) if problem and not status else status


def memory_and_step(config: Config, world_size: int, local_size: int = 0) -> Iterator[str]:
    """Yield lines about a rank's memory with each recomputation mode, and about the step time if the device is known.

    ``local_size`` is the number of ranks of a node, or 0 to assume nodes of the device's usual size.
    """
    # Import only here, so that a refused run does not spend a second on these imports.
    from cluster.model.memory import USABLE_MEMORY, memory_of_rank
    from cluster.model.rates import device_of, target_of_devices
    from cluster.model.step import predict_step
    from cluster.model.work import REPEATED, strategy_of, work_to_plan

    try:
        device = device_of(config.recipe, None)
    except ValueError:
        device = None
    per_node = device.per_node if device else world_size
    whole_nodes = world_size if world_size <= per_node else math.gcd(world_size, per_node)
    a_node = whole_nodes if local_size == 0 or world_size % local_size else local_size
    nodes = world_size // a_node
    require_whole_copies(config.parallel, nodes, a_node)
    work, strategy = work_to_plan(config), strategy_of(config)
    if not config.data.train.is_dir():
        yield f"{config.data.train} is missing, so the prediction uses the lengths of the benchmark's Wikipedia data"

    on_gpu = config.training.device == "cuda"
    held = {mode: memory_of_rank(work, replace(strategy, recompute=mode), nodes, a_node, on_gpu) for mode in REPEATED}
    parts = held.pop(strategy.recompute)
    total = sum(parts.values())
    shown = ", ".join(f"{part} {_shown(size)}" for part, size in parts.items() if size)
    yield f"a rank holds {_shown(total)} at most: {shown}"
    others = ", ".join(f"{mode} would hold {_shown(sum(sizes.values()))}" for mode, sizes in held.items())
    yield f"training.recompute is {strategy.recompute}; {others}"
    if device is None:
        return
    usable = USABLE_MEMORY * device.memory_gb * 1e9
    if total > usable:
        yield f"{device.name} has only {_shown(usable)} of usable memory; `python -m cluster plan` finds settings that fit"
    # If the device lacks the precision, such as FP8 on an A100, no step time can be predicted.
    rates = target_of_devices(device, world_size, a_node).rates.get(strategy.precision)
    if rates is not None:
        step = predict_step(work, strategy, rates)
        spent = {name.replace("_", " "): 1000 * seconds for name, seconds in step.parts.items() if seconds}
        times = ", ".join(f"{name} {milliseconds:.0f}" for name, milliseconds in spent.items())
        yield f"a step is predicted to take {1000 * step.total:.0f} ms on {nodes} x {a_node} {device.name}: {times}"


def _shown(size: float) -> str:
    return decimal(int(size), precision=2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
