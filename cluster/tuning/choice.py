"""The best choice for a recipe on this machine, which ``tune`` keeps and ``run_and_time.sh`` asks for.

    python -m cluster.tuning.choice RECIPE [--section.field value ...]

If there is one for this machine and these settings, prints a sentence, the number of processes, and the threads of each, one
a line; otherwise nothing. It does not import PyTorch, which would take longer than most choices save.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec

from bert.configuration.config import Config, flattened
from bert.train import parse
from cluster.probe.machine import host_memory, processor_name
from console.files import read_bounded, write_atomically
from console.program import say

VARIABLES = ("NPROC", "OMP_NUM_THREADS")
FOLDER_VARIABLE = "MLPERF_BERT_CACHE"
_MOST_BYTES = 1 << 20
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
"""Settings under ``training`` that decide how long a step takes."""

Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class TunedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of processes, and the threads of each."""

    processes: Count
    threads: Count

    def __str__(self) -> str:
        return f"{self.processes} process(es) x {self.threads} thread(s)"


class _Kept(msgspec.Struct):
    key: dict[str, Any]
    choice: TunedRun


def default_folder() -> Path:
    """Return ``$MLPERF_BERT_CACHE``, or the folder of this machine and checkout in ``$XDG_CACHE_HOME`` (``~/.cache``).

    A choice for one machine is wrong for another machine that shares its home.
    """
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG base directory specification ignores relative paths
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # a container's user without a name
            base = Path(tempfile.gettempdir())
    checkout = hashlib.sha256(os.fsencode(Path(__file__).resolve().parents[2])).hexdigest()[:8]
    return base / "mlperf-bert" / f"{platform.node()}-{checkout}"


def keep(config: Config, choice: TunedRun) -> None:
    """Keep a choice for this machine and for what ``config`` trains; print a warning if it cannot be written."""
    path, key = _file_and_key(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(_Kept(key, choice)), indent=1))
    except OSError as error:
        say(f"warning: the tuned choice is not kept: {error}")


def kept(config: Config) -> TunedRun | None:
    """Return the choice that was kept for this machine and for what ``config`` trains, unless it is damaged."""
    path, key = _file_and_key(config)
    if not path.exists():
        return None
    try:
        found = msgspec.json.decode(read_bounded(path, _MOST_BYTES, "delete it"), type=_Kept)
        # The file's name has only a part of the digest.
        if found.key != key:
            raise ValueError(f"{path} was made for another machine or configuration; delete it")
        return found.choice
    except (ValueError, msgspec.MsgspecError) as error:
        say(f"warning: the choice that was tuned for {config.recipe} is ignored: {error}")
        return None


def _file_and_key(config: Config) -> tuple[Path, dict[str, object]]:
    # As JSON reads it back.
    key = json.loads(json.dumps(_key(config), sort_keys=True))
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return default_folder() / "runs" / f"{config.recipe}-{digest}.json", key


def set_by_hand(settings: Sequence[str]) -> str | None:
    """Return the name of what the user has set instead of the choice, if anything, in the environment or the settings."""
    names = {argument.partition("=")[0].removeprefix("--") for argument in settings}
    # A kept choice must not override a configuration file or a plan.
    given = [
        *(name for name in VARIABLES if os.environ.get(name)),
        *(each for each in ("config", "plan") if each in names),
    ]
    return next(iter(given), None)


def _key(config: Config) -> dict[str, object]:
    """Return everything that decides which choice is fastest, as far as it is known without PyTorch."""
    shape = flattened("model", config.model) + flattened("parallel", config.parallel)
    shape += [(f"training.{name}", getattr(config.training, name)) for name in _OF_THE_STEP]
    return {
        "processor": processor_name(),
        # The affinity: containers and batch systems may give fewer cores than the machine has.
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(host_memory() / 2**30),
        "python": platform.python_version(),
        # From the package's metadata: importing PyTorch takes longer than most choices gain.
        "torch": metadata.version("torch"),
        "data.loader": config.data.loader,
        **dict(shape),
    }


def main(arguments: Sequence[str]) -> int:
    """Print the choice for a command line, if there is one. ``bert.train`` reports errors in the command line."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the run answers --help
            config = parse(arguments)
    except (ValueError, OSError, SystemExit):
        return 0
    choice = kept(config)
    if choice is None:
        return 0
    if name := set_by_hand(arguments):
        say(f"tuned on this machine is {choice}: not used, as {name} is set")
        return 0
    for line in (f"tuned on this machine: {choice}", choice.processes, choice.threads):
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
