"""Number of processes on this node and of threads in each, and the store of layouts that ``python -m cluster tune`` found.

PyTorch is imported only to count GPUs, because importing it takes longer than most choices save.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from bert.configuration.config import Config, flattened
from bert.configuration.run_plan import read_plan
from bert.parallel.environment import processor_name
from console.files import read_bounded, write_atomically
from console.program import say

VARIABLES = ("NPROC", "OMP_NUM_THREADS")
FOLDER_VARIABLE = "MLPERF_BERT_CACHE"
_OF_THE_STEP = (
    "global_batch_size",
    "gradient_accumulation_steps",
    "device",
    "precision",
    "reduction",
    "reduce_dtype",
    "recompute",
    "implementations",
)
"""Settings under ``training`` that affect the time of a step."""

Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    processes: Count
    threads: Count

    def __str__(self) -> str:
        return f"{self.processes} process(es) x {self.threads} thread(s)"


def has_gpus() -> bool:
    return shutil.which("nvidia-smi") is not None


def whole_number(name: str, default: int, least: int, most: int = 10**9) -> int:
    """Return the value of an environment variable, or ``default`` if it is unset or empty.

    Raises ``ValueError`` unless the value is a whole number from ``least`` to ``most``.
    """
    return in_range(name, os.environ.get(name) or str(default), least, most)


def in_range(name: str, text: str, least: int, most: int = 10**9) -> int:
    """Return a text as a number. Raises ``ValueError`` unless it is a whole number from ``least`` to ``most``."""
    if not re.fullmatch("0|[1-9][0-9]{0,17}", text) or not least <= int(text) <= most:
        upper = "" if most == 10**9 else f" and at most {most}"
        raise ValueError(f"{name} is {text!r}, expected a whole number of at least {least}{upper}")
    return int(text)


def layout_of(config: Config, *, takes_tuned: bool, reads_file: bool) -> Layout:
    """Return the layout of a run on this node, from the environment, tuning or the defaults.

    A tuned layout is used if ``takes_tuned`` is set and nothing else determines the layout. ``reads_file`` tells whether
    the settings come from a file, whose run may have had another layout. Raises ``ValueError`` for a wrong variable.
    """
    processes = whole_number("NPROC", 1, 1) if os.environ.get("NPROC") else None
    default = default_layout(config, processes)
    default = Layout(default.processes, whole_number("OMP_NUM_THREADS", default.threads, 1))
    tuned = kept(config) if takes_tuned and whole_number("TUNED", 1, 0, 1) else None
    given = [
        *filter(os.environ.get, VARIABLES),
        *(["config"] if reads_file else ()),
        *(["plan"] if config.plan else ()),
    ]
    if tuned and given:
        say(f"==> tuned on this machine is {tuned}: not used, as {given[0]} is set")
    elif tuned:
        say(f"==> tuned on this machine: {tuned}")
        return tuned
    return default


def default_layout(config: Config, processes: int | None = None) -> Layout:
    """Return the layout without tuning. A plan states the number of processes, and a GPU has one process."""
    is_tiny = config.recipe == "tiny_cpu"
    cores = len(os.sched_getaffinity(0))
    if processes is None:
        if config.plan is not None:
            processes = read_plan(config.plan).ranks_per_node
        elif config.training.device == "cuda":
            processes = visible_gpus()
        else:
            processes = min(cores, 2) if is_tiny else 1
    threads = max(1, cores // processes)
    # More threads do not speed up such a small model.
    return Layout(processes, min(threads, 2) if is_tiny else threads)


def visible_gpus() -> int:
    """Return the number of GPUs that a run would see, or 1 if there are none."""
    if not has_gpus():
        return 1
    from torch.cuda import device_count

    return max(1, device_count())


def default_folder() -> Path:
    """Return ``$MLPERF_BERT_CACHE``, or the folder of this machine and checkout in ``$XDG_CACHE_HOME`` (``~/.cache``).

    The folder's name includes the machine, because several machines may share a home directory.
    """
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG base directory specification says to ignore relative paths
        base = Path(os.path.expanduser("~")) / ".cache"  # noqa: PTH111  Path.home() fails for a user without a name
    checkout = hashlib.sha256(os.fsencode(Path(__file__).resolve().parents[2])).hexdigest()[:8]
    return base / "mlperf-bert" / f"{platform.node()}-{checkout}"


def keep(config: Config, choice: Layout) -> None:
    """Store a choice for this machine and configuration. Print a warning if it cannot be written."""
    path = _file(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(choice))
    except OSError as error:
        say(f"warning: the tuned choice is not kept: {error}")


def kept(config: Config) -> Layout | None:
    """Return the stored choice for this machine and configuration, or None if its file is missing or damaged."""
    path = _file(config)
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(read_bounded(path, 4096, "delete it"), type=Layout)
    except (ValueError, msgspec.MsgspecError) as error:
        say(f"warning: the choice that was tuned for {config.recipe} is ignored: {error}; delete {path}")
        return None


def _file(config: Config) -> Path:
    """Return the file of a choice, named by a digest of everything that affects the choice and needs no PyTorch to read."""
    shape = flattened("model", config.model) + flattened("parallel", config.parallel)
    shape += [(f"training.{name}", getattr(config.training, name)) for name in _OF_THE_STEP]
    key = {
        "processor": processor_name(),
        # Use the affinity, because containers and batch systems may allow fewer cores than the machine has.
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        # Read the package's metadata, because importing PyTorch takes longer than most choices save.
        "torch": metadata.version("torch"),
        "data.loader": config.data.loader,
        **dict(shape),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return default_folder() / "runs" / f"{config.recipe}-{digest}.json"
