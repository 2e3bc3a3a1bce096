"""Fixtures that copy the repository, as a new user would clone it."""

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


def left_behind(folder: str, names: list[str]) -> set[str]:
    """Return the names that a clone lacks, to omit them. ``__pycache__`` stays, because it has code compiled by Numba."""
    at_top, in_results = Path(folder) == REPOSITORY, Path(folder) == REPOSITORY / "results"
    return {
        name
        for name in names
        if (at_top and (name[0] == "." or name in ("data", "build") or name.endswith(".egg-info")))
        or (in_results and name != COMMITTED_RESULTS)
    }


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all data of tiny_cpu and a small part of it. The first pytest worker makes both."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = shared / "demo"
    with (shared / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            write_demo(made / "tiny_cpu", REPOSITORY / "bert/artifacts/tiny_cpu/vocab.txt")
            for name, count in (("train", 2048), ("evaluation", 128)):
                whole = open_dataset(made / "tiny_cpu" / name)
                chosen = np.linspace(0, len(whole) - 1, count).astype(np.int64)
                write_dataset(made / "few" / name, whole.take(chosen), shards=SHARDS, info=whole.info)
    return made


@pytest.fixture(scope="module")
def real_checkout(tmp_path_factory: pytest.TempPathFactory, demo_data: Path) -> Path:
    """Return a copy of the repository whose .venv has this interpreter's packages and is marked as installed.

    The copy has a small part of tiny_cpu's data, so that evaluations are short.
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
    """Return a copy of the repository whose ``python`` is fast, because a server forks instead of starting Python.

    A test that looks for processes by parent or name needs ``real_checkout`` or ``launching_checkout``.
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
    """Return a copy of the repository in which torchrun starts as a real program, and others as forks of a server.

    Ranks start as forks too, unless the variable ``RANKS_PYTHON`` names an interpreter for them.
    """
    python = checkout / ".venv/bin/python"
    (forked := python.with_name("forked")).mkdir()
    python.rename(forked / "python")
    torchrun = f'PYTHON_EXEC=${{RANKS_PYTHON-$0}} exec {sys.executable} "$@"'
    launch = f'exec -a "$0" {sys.executable} "$@"'
    cases = f'case "$1 $2" in\n"-m bert.launch.agent") {torchrun} ;;\n"-m bert.launch") {launch} ;;\nesac\n'
    write_script(python, f'#!/bin/bash\n{cases}exec "${{0%/*}}/forked/python" "$@"\n')
    return checkout


@pytest.fixture(scope="module")
def checkout_with_all_data(checkout: Path, demo_data: Path) -> Path:
    """Return a copy of the repository that also has all data of tiny_cpu, in ``data/whole``."""
    shutil.copytree(demo_data / "tiny_cpu", checkout / "data/whole")
    return checkout


@pytest.fixture(scope="module")
def checkout_with_results(checkout: Path) -> Path:
    """Return a copy of the repository with a copy of the committed results as results of tiny_cpu."""
    results = checkout / "results"
    (results / "systems").mkdir()
    shutil.copytree(results / COMMITTED_RESULTS, results / "tiny_cpu")
    shutil.copy(REPOSITORY / f"results/systems/{COMMITTED_RESULTS}.json", results / "systems/tiny_cpu.json")
    return checkout
