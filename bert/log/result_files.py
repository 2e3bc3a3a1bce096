"""The files that a run writes, the choice of the run number, and the header of the log: the configuration, commit, package
versions and machine.

By default, a run takes the lowest run number that is free when it creates its log. No file is ever overwritten. If the
environment variable MLPERF_BERT_CLAIM names a file, the run appends the path of its log to that file, so that the program
that started the run can find the log.
"""

import importlib.metadata
import itertools
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from bert.configuration.config import Config, flattened
from bert.log.mllog import MLLog
from bert.parallel.environment import CLAIM, processor_name
from bert.parallel.mesh import Mesh
from console.version import commit


class ResultFiles(NamedTuple):
    result: Path
    metrics: Path

    @classmethod
    def numbered(cls, folder: Path, number: int) -> "ResultFiles":
        return cls(folder / f"result_{number}.txt", folder / f"metrics_{number}.jsonl")


def choose_files(folder: Path, wanted: int | None) -> ResultFiles:
    """Return the files of run number ``wanted``, or of the lowest free number if it is None.

    Raises ``ValueError`` if a file of run number ``wanted`` exists.
    """
    if wanted is None:
        return next(_free(folder))
    files = ResultFiles.numbered(folder, wanted)
    for path in files:
        if path.exists():
            raise ValueError(f"{path} exists already: move it away, or set log.run to another number")
    return files


def create_log(folder: Path, wanted: int | None) -> tuple[MLLog, ResultFiles]:
    """Create the log of run number ``wanted``, or of the lowest free number if it is None.

    Raises ``ValueError`` if a file of run number ``wanted`` exists, and ``OSError`` if the log cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if wanted is not None:
        files = choose_files(folder, wanted)
        return MLLog(files.result), files
    for files in _free(folder):
        with suppress(FileExistsError):  # if another run has just taken this number, try the next one
            return MLLog(files.result), files
    raise AssertionError("numbers do not end")


def claim(result: Path) -> None:
    """Append the path of the log to the file that MLPERF_BERT_CLAIM names, if it is set."""
    if asked := os.environ.get(CLAIM):
        with Path(asked).open("ab") as file:
            file.write(os.fsencode(f"{result}\n"))


def _free(folder: Path) -> Iterator[ResultFiles]:
    # List the folder once: checking each number would cost as many file system calls as there are runs.
    names = {path.name for path in folder.glob("*")}
    numbered = (ResultFiles.numbered(folder, number) for number in itertools.count())
    return (files for files in numbered if names.isdisjoint(path.name for path in files))


PACKAGES = ("torch", "numpy", "h5py", "tokenizers", "mlperf-logging", "nvidia-dali-cuda130", "triton")


def provenance(config: Config, mesh: Mesh, seed: int) -> dict[str, object]:
    head: dict[str, object] = {
        # This note is required for results that MLCommons has not reviewed (docs/compliance.md).
        "note": "not an MLPerf result: unverified, not reviewed by MLCommons",
        "recipe": config.recipe,
        "commit": commit(),
        "python": platform.python_version(),
    }
    head |= {package: _version(package) for package in PACKAGES}
    head |= {
        "host": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": f"{processor_name()}, {os.cpu_count()} logical cores",
        "processes": f"{mesh.world_size} x {torch.get_num_threads()} threads, {mesh}",
        "accelerator": torch.cuda.get_device_name() if mesh.device.type == "cuda" else "none",
        "seed": seed,
    }
    nccl = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    if nccl and mesh.device.type == "cuda":
        head["nccl"] = " ".join(nccl)
    return head | dict(flattened("config", config))


def _version(package: str) -> str:
    try:
        # Read the package metadata, which avoids importing the package.
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
