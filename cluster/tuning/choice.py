"""Store of the fastest process and thread counts for recipes on this machine, written by ``tune``.

    python -m cluster.tuning.choice RECIPE [--section.field value ...]

If a choice is stored for this machine and these settings, the command prints three lines: a sentence, the number of
processes, and the threads per process. Otherwise it prints nothing. It does not import PyTorch, because that would take
longer than most choices save.
"""

import contextlib
import hashlib
import io
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from bert.configuration.config import Config, flattened
from bert.train import parse
from cluster.probe.machine import processor_name
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


class TunedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    processes: Count
    threads: Count

    def __str__(self) -> str:
        return f"{self.processes} process(es) x {self.threads} thread(s)"


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


def keep(config: Config, choice: TunedRun) -> None:
    """Store a choice for this machine and configuration. Print a warning if it cannot be written."""
    path = _file(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(choice))
    except OSError as error:
        say(f"warning: the tuned choice is not kept: {error}")


def kept(config: Config) -> TunedRun | None:
    """Return the stored choice for this machine and configuration, or None if its file is missing or damaged."""
    path = _file(config)
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(read_bounded(path, 4096, "delete it"), type=TunedRun)
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


def main(arguments: Sequence[str]) -> int:
    """Print the stored choice for a command line, if any. Errors in the command line are left to ``bert.train``."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the run itself answers --help
            config = parse(arguments)
    except (ValueError, OSError, SystemExit):
        return 0
    choice = kept(config)
    names = {argument.partition("=")[0].removeprefix("--") for argument in arguments}
    # A stored choice must not override a variable, a configuration file or a plan.
    given = [*filter(os.environ.get, VARIABLES), *({"config", "plan"} & names)]
    if choice and given:
        say(f"tuned on this machine is {choice}: not used, as {given[0]} is set")
    elif choice:
        for line in (f"tuned on this machine: {choice}", choice.processes, choice.threads):
            say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
