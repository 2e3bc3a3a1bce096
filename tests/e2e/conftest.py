"""Copies of the repository as a new user would have them."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.folder import open_dataset, write_dataset
from dataloading.preparation.demo import SHARDS, write_demo
from tests.conftest import REPOSITORY
from tests.programs import write_forked_python, write_script

COMMITTED_RESULTS = "cpu_2cores"
FEW = {"train": 2048, "evaluation": 128}
"""Numbers of the demo's samples that suffice for short runs."""


def left_behind(folder: str, names: list[str]) -> set[str]:
    """Return the names that a clone would not have: environments, data and results. Code compiled by Numba is kept."""
    at_top, in_results = Path(folder) == REPOSITORY, Path(folder) == REPOSITORY / "results"
    return {
        name
        for name in names
        if (at_top and (name[0] == "." or name in ("data", "build") or name.endswith(".egg-info")))
        or (in_results and name != COMMITTED_RESULTS)
    }


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data of tiny_cpu and a small part of it. The first worker to ask makes both."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = shared / "demo"
    with (shared / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            write_demo(made / "tiny_cpu", REPOSITORY / "bert/artifacts/tiny_cpu/vocab.txt")
            for name, count in FEW.items():
                whole = open_dataset(made / "tiny_cpu" / name)
                chosen = np.linspace(0, len(whole) - 1, count).astype(np.int64)
                write_dataset(made / "few" / name, whole.take(chosen), shards=SHARDS, info=whole.info)
    return made


@pytest.fixture(scope="module")
def real_checkout(tmp_path_factory: pytest.TempPathFactory, demo_data: Path) -> Path:
    """Return a copy of the sources with this interpreter's packages as its .venv, marked as installed.

    It has a small part of tiny_cpu's data, so that evaluations are short.
    """
    copy = tmp_path_factory.mktemp("checkout") / "with a space"
    shutil.copytree(REPOSITORY, copy, ignore=left_behind)
    shutil.copytree(demo_data / "few", copy / "data/tiny_cpu")
    (copy / ".venv/installed").mkdir(parents=True)
    for entry in Path(sys.prefix).iterdir():
        if entry.name != "installed":
            (copy / ".venv" / entry.name).symlink_to(entry)
    mark = "source launch/venv.sh; for part in run test dali; do venv_pins >.venv/installed/$part; done"
    subprocess.run(["bash", "-c", mark], cwd=copy, check=True)
    return copy


@pytest.fixture(scope="module")
def checkout(real_checkout: Path) -> Path:
    """Return the copy of the repository with a fast ``python``, which asks a server to fork instead of starting anew.

    It is for tests that do not look at processes.
    """
    programs = real_checkout / ".venv/bin"
    programs.unlink()
    programs.mkdir()
    for program in Path(sys.prefix, "bin").iterdir():
        if program.name not in ("python", "torchrun"):
            (programs / program.name).symlink_to(program)
    write_forked_python(programs)
    return real_checkout


@pytest.fixture(scope="module")
def launching_checkout(checkout: Path) -> Path:
    """Return such a copy in which torchrun is a real program and all other programs are forks.

    Ranks are forks too, unless ``RANKS_PYTHON`` names their interpreter.
    """
    python = checkout / ".venv/bin/python"
    (forked := python.with_name("forked")).mkdir()
    python.rename(forked / "python")
    torchrun = f'PYTHON_EXEC=${{RANKS_PYTHON-$0}} exec {sys.executable} "$@"'
    condition = '[[ "$1 $2" != "-m torch.distributed.run" ]]'
    write_script(python, f'#!/bin/bash\n{condition} || {torchrun}\nexec "${{0%/*}}/forked/python" "$@"\n')
    return checkout


@pytest.fixture(scope="module")
def checkout_with_all_data(checkout: Path, demo_data: Path) -> Path:
    """Return a copy that also has all data of tiny_cpu, in ``data/whole``."""
    shutil.copytree(demo_data / "tiny_cpu", checkout / "data/whole")
    return checkout


@pytest.fixture(scope="module")
def checkout_with_results(checkout: Path) -> Path:
    """Return a copy with results, as if ``./run_and_time.sh`` had run: the committed results, named tiny_cpu."""
    results = checkout / "results"
    (results / "systems").mkdir()
    shutil.copytree(results / COMMITTED_RESULTS, results / "tiny_cpu")
    shutil.copy(REPOSITORY / f"results/systems/{COMMITTED_RESULTS}.json", results / "systems/tiny_cpu.json")
    return checkout
