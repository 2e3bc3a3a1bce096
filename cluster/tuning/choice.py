"""Choice that was found best for a recipe on this machine: kept by ``tune``, asked for by ``run_and_time.sh``.

    python -m cluster.tuning.choice RECIPE [--section.field value ...]

prints, if there is one for this machine and what these settings train, a sentence, the number of processes, the threads of
each, and settings, a line each; else nothing. Without PyTorch, whose import would take longer than most choices gain.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bert.configuration.config import Config, flattened
from bert.train import parse
from cluster.probe.machine import host_memory, processor_name
from console.files import read_json, write_atomically
from console.program import say

SETTINGS = {"data.prefetch": (1, 64), "training.bucket_bytes": (1 << 16, 1 << 30)}
"""Settings that are tuned, with the least and the most that is taken from a file. None of them changes what is computed."""
VARIABLES = ("NPROC", "OMP_NUM_THREADS")
FOLDER_VARIABLE = "MLPERF_BERT_CACHE"
_MOST_PROCESSES = 4096
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


@dataclass(frozen=True)
class TunedRun:
    """Processes, threads of each, and settings by name."""

    processes: int
    threads: int
    settings: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        """Say it in words, as a table or a log does."""
        settings = "".join(f", {name} {value}" for name, value in self.settings)
        return f"{self.processes} process(es) x {self.threads} thread(s){settings}"

    @property
    def arguments(self) -> list[str]:
        """The settings as arguments of ``bert.train``."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.settings]

    def to_json(self) -> dict[str, object]:
        """Return what ``of`` reads."""
        return {"processes": self.processes, "threads": self.threads, "settings": dict(self.settings)}

    @classmethod
    def of(cls, found: object) -> TunedRun:
        """Read parsed JSON; ``ValueError`` where it is anything else than a choice."""
        # The file lies in a user's cache folder, and what it holds goes into a command line.
        if not isinstance(found, dict) or set(found) != {"processes", "threads", "settings"}:
            raise ValueError("expected an object with processes, threads, settings")
        counts, settings = (found["processes"], found["threads"]), found["settings"]
        # type(...) is int: isinstance would let True through.
        if not all(type(count) is int and 1 <= count <= _MOST_PROCESSES for count in counts):
            raise ValueError(f"expected 1 to {_MOST_PROCESSES} processes and threads")
        if not isinstance(settings, dict) or not all(name in SETTINGS for name in settings):
            raise ValueError(f"expected settings among {', '.join(SETTINGS)}")
        for name, value in settings.items():
            least, most = SETTINGS[name]
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"expected {name} from {least} to {most}")
        return cls(*counts, tuple(settings.items()))


def default_folder() -> Path:
    """Return ``$MLPERF_BERT_CACHE``, or the folder of this machine and checkout in ``$XDG_CACHE_HOME`` (``~/.cache``).

    A choice for one machine is wrong for another machine that shares its home.
    """
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    checkout = hashlib.sha256(os.fsencode(Path(__file__).resolve().parents[2])).hexdigest()[:8]
    return _user_folder() / "mlperf-bert" / f"{platform.node()}-{checkout}"


def _user_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):  # the XDG base directory specification ignores relative paths
        return Path(base)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container's user without a name
        return Path(tempfile.gettempdir())


def keep(config: Config, choice: TunedRun) -> None:
    """Keep a choice for this machine and for what ``config`` trains; print a warning if it cannot be written."""
    path, key = _file_and_key(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"key": key, "choice": choice.to_json()}, indent=1).encode())
    except OSError as error:
        say(f"warning: what was tuned is not kept: {error}")


def kept(config: Config) -> TunedRun | None:
    """Return the choice that was kept for this machine and for what ``config`` trains; print a warning if it is damaged."""
    path, key = _file_and_key(config)
    if not path.exists():
        return None
    try:
        found = read_json(path, _MOST_BYTES, "delete it")
        # The file's name has a part of the digest only.
        if not isinstance(found, dict) or found.get("key") != key:
            raise ValueError(f"{path} was made for another machine or configuration; delete it")
        return TunedRun.of(found.get("choice"))
    except ValueError as error:
        say(f"warning: what was tuned for {config.recipe} is ignored: {error}")
        return None


def _file_and_key(config: Config) -> tuple[Path, dict[str, object]]:
    key = _key(config)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return default_folder() / "runs" / f"{config.recipe}-{digest}.json", key


def set_by_hand(choice: TunedRun, settings: Sequence[str]) -> str | None:
    """Name what the user has set of a choice, in the environment or in the settings; None where it is nothing."""
    for name in VARIABLES:
        if os.environ.get(name):
            return name
    # A configuration file or a plan states settings of its own, which a kept choice must not override.
    return next((name for name in ("config", "plan", *dict(choice.settings)) if name in given(settings)), None)


def given(settings: Sequence[str]) -> set[str]:
    """Names of the settings on a command line, among whatever else stands there."""
    return {argument.partition("=")[0].removeprefix("--").replace("-", "_") for argument in settings}


def _key(config: Config) -> dict[str, object]:
    """Collect everything that decides what is fastest, as far as it can be known without PyTorch."""
    shape = flattened("model", config.model) + flattened("parallel", config.parallel)
    shape += [(f"training.{name}", getattr(config.training, name)) for name in _OF_THE_STEP]
    return {
        "processor": processor_name(),
        # The affinity: containers and batch systems may give fewer cores than the machine has.
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(host_memory() / 2**30),
        "gpus": _gpus(),
        "python": platform.python_version(),
        # From the package's metadata: importing PyTorch takes longer than most choices gain.
        "torch": metadata.version("torch"),
        "data.loader": config.data.loader,
        **dict(shape),
    }


def _gpus() -> list[str]:
    """Return the models of NVIDIA's GPUs as their driver names them, under /proc, so that no library is needed."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    texts = [path.read_text(errors="replace") for path in files]
    return [found[1].strip() for text in texts if (found := re.search(r"^Model:(.*)$", text, re.M))]


def main(arguments: Sequence[str]) -> int:
    """Print the choice for a command line, if there is one; a wrong one is for ``bert.train`` to complain about."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # --help is answered by the run, too
            config = parse(arguments)
    # Wrong arguments and --help are for bert.train to answer, once.
    except (ValueError, OSError, SystemExit):
        return 0
    choice = kept(config)
    if choice is None:
        return 0
    if name := set_by_hand(choice, arguments):
        say(f"tuned on this machine is {choice}: not used, as {name} is set")
        return 0
    for line in (f"tuned on this machine: {choice}", choice.processes, choice.threads, *choice.arguments):
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
