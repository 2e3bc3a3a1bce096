"""Number of processes on this node, and number of threads in each process.

PyTorch is imported only to count GPUs, because the import takes more than a second.
"""

import os
import re
import shutil
from dataclasses import dataclass

from bert.configuration.config import Config
from bert.configuration.run_plan import read_plan

_SMALL = 256
"""Hidden size below which training on a CPU is fastest with two processes of at most two threads each."""


@dataclass(frozen=True)
class Layout:
    processes: int
    threads: int


def has_gpus() -> bool:
    return shutil.which("nvidia-smi") is not None


def whole_number(name: str, default: int, least: int, most: int = 10**9) -> int:
    """Return the value of an environment variable, or ``default`` if it is unset or empty.

    Raises ``ValueError`` unless the value is a whole number from ``least`` to ``most``.
    """
    return parse_whole_number(name, os.environ.get(name) or str(default), least, most)


def parse_whole_number(name: str, text: str, least: int, most: int = 10**9) -> int:
    """Return the number in a text. Raises ``ValueError`` unless it is a whole number from ``least`` to ``most``.

    The error message names the argument or variable ``name``.
    """
    if not re.fullmatch("0|[1-9][0-9]{0,17}", text) or not least <= int(text) <= most:
        upper = "" if most == 10**9 else f" and at most {most}"
        raise ValueError(f"{name} is {text!r}, expected a whole number of at least {least}{upper}")
    return int(text)


def layout_of(config: Config) -> Layout:
    """Return the layout of a run on this node. Raises ``ValueError`` if NPROC or OMP_NUM_THREADS is wrong.

    NPROC, or else the plan, sets the number of processes. Without these, a run starts one process per GPU; on a CPU, the
    number depends on the model and on the number of cores. OMP_NUM_THREADS sets the number of threads.
    """
    training, cores = config.training, len(os.sched_getaffinity(0))
    is_small = training.device == "cpu" and config.model.hidden_size < _SMALL
    if os.environ.get("NPROC"):
        processes = whole_number("NPROC", 1, 1)
    elif config.plan is not None:
        processes = read_plan(config.plan).ranks_per_node
    elif training.device == "cuda":
        processes = visible_gpus()
    else:
        # On idle cores, two processes with one thread each are as fast as one process with two threads. If other programs
        # run too, they are up to three times as fast, because threads wait for each other many times in a step.
        can_share = training.global_batch_size % (2 * training.gradient_accumulation_steps) == 0
        processes = min(cores, 2) if is_small and can_share else 1
    threads = max(1, cores // processes)
    return Layout(processes, whole_number("OMP_NUM_THREADS", min(threads, 2) if is_small else threads, 1))


def visible_gpus() -> int:
    """Return the number of GPUs that a run would see, or 1 if there are none."""
    if not has_gpus():
        return 1
    from torch.cuda import device_count

    return max(1, device_count())
