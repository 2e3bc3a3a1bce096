"""A stranger's copy of the repository."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.slurm.slurm_cluster import Cluster

COMMITTED_RESULTS = "cpu_2cores"


def left_behind(folder: str, names: list[str]) -> set[str]:
    """What a clone would not have: environments, data and results. What Numba has compiled is not compiled once more."""
    at_top, in_results = Path(folder) == REPOSITORY, Path(folder) == REPOSITORY / "results"
    return {
        name
        for name in names
        if (at_top and (name[0] == "." or name in ("data", "build") or name.endswith(".egg-info")))
        or (in_results and name != COMMITTED_RESULTS)
    }


@pytest.fixture(scope="module")
def checkout(bare_checkout: Path, demo_data: Path) -> Path:
    """A copy of the sources that has made the data of tiny_cpu before."""
    shutil.copytree(demo_data, bare_checkout / "data/tiny_cpu")
    return bare_checkout


@pytest.fixture(scope="module")
def checkout_with_results(checkout: Path) -> Path:
    """A copy in which ``./run_and_time.sh`` has run before: the committed results are of tiny_cpu."""
    results = checkout / "results"
    (results / "systems").mkdir()
    shutil.copytree(results / COMMITTED_RESULTS, results / "tiny_cpu")
    shutil.copy(REPOSITORY / f"results/systems/{COMMITTED_RESULTS}.json", results / "systems/tiny_cpu.json")
    return checkout


@pytest.fixture(scope="module")
def bare_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with this interpreter's packages as its .venv, marked as installed."""
    copy = tmp_path_factory.mktemp("checkout") / "with a space"
    shutil.copytree(REPOSITORY, copy, ignore=left_behind)
    (copy / ".venv/installed").mkdir(parents=True)
    for entry in Path(sys.prefix).iterdir():
        if entry.name != "installed":
            (copy / ".venv" / entry.name).symlink_to(entry)
    mark = "source launch/venv.sh; for part in run test dali nvml; do venv_pins >.venv/installed/$part; done"
    subprocess.run(["bash", "-c", mark], cwd=copy, check=True)
    return copy


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm cluster of two nodes, for jobs from the checkout."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=2)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def no_results(checkout: Path) -> None:
    """The checkout has none, nor anything else that a job has left there."""
    shutil.rmtree(checkout / "results", ignore_errors=True)
    (checkout / "results").mkdir()
