"""Check a run before it starts, and predict its memory and the time of a step.

    python -m cluster.dry_run RECIPE [--section.field value ...]

This runs ``python -m bert.train RECIPE --dry-run``. It adds a forecast if the run uses GPUs, or if several ranks share a
copy of the model.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bert.configuration.config import Config
from bert.parallel.environment import Launch
from bert.train import main as train
from bert.train import parse
from console.program import say


def main(arguments: Sequence[str]) -> int:
    if status := train([*arguments, "--dry-run"]):
        return status
    # The trainer ignores signals once it has ended, but the forecast takes seconds.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    config, launch = parse(arguments), Launch.from_environment()
    if config.training.device == "cuda" or config.parallel.copy_ranks > 1:
        for line in memory_and_step(config, launch.world_size, launch.local_size):
            say(f"{config.recipe}: {line}")
    return 0


def memory_and_step(config: Config, world_size: int, local_size: int = 0) -> Iterator[str]:
    """Return lines about a rank's memory with each recomputation mode, and about the step time if the device is known.

    ``local_size`` is the number of ranks of a node, or 0 if it is unknown. Then nodes have the device's usual size.
    """
    # These imports take a second, which a refused run does not need.
    from cluster.model.memory import USABLE_MEMORY, memory_of_rank
    from cluster.model.rates import device_of, target_of_devices
    from cluster.model.step import predict_step
    from cluster.model.work import REPEATED, strategy_of, work_of

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
        f"{mode} would hold {_gigabytes(sum(memory(mode).values()))}" for mode in REPEATED if mode != strategy.recompute
    )
    if device is None:
        return
    usable = USABLE_MEMORY * device.memory_gb * 1e9
    if total > usable:
        yield f"{device.name} has {_gigabytes(usable)} for it, which is less; `python -m cluster plan` finds what fits"
    # A device may lack the precision, such as FP8 on an A100.
    rates = target_of_devices(device, world_size, a_node).rates.get(strategy.precision)
    if rates is not None:
        step = predict_step(work, strategy, rates)
        times = ", ".join(
            f"{name.replace('_', ' ')} {1000 * seconds:.0f}" for name, seconds in step.parts.items() if seconds
        )
        yield f"a step is predicted to take {1000 * step.total:.0f} ms on {nodes} x {a_node} {device.name}: {times}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
