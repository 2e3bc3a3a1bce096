"""Runs on several nodes, started by hand or by mpirun, with ``--prepare`` before the run and ``--verdict`` after it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.distributed.ranks import free_port
from tests.e2e.test_scripts import REACHED_AT_ONCE, SHORT, begin, start
from tests.programs import PATIENCE_S


def two_nodes(checkout: Path, *settings: str) -> list[subprocess.Popen[str]]:
    """Start ``run_and_time.sh`` twice on this machine, as nodes 0 and 1 of a run."""
    shared = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    shared["MASTER_PORT"] = str(free_port())
    script, run = checkout / "run_and_time.sh", ("tiny_cpu", "1", "--", *SHORT, *settings)
    return [begin(script, *run, cwd=checkout, NODE_RANK=str(node), **shared) for node in (0, 1)]


def test_only_the_first_of_two_nodes_prints_the_verdict(checkout: Path, tmp_path: Path) -> None:
    nodes = two_nodes(checkout, REACHED_AT_ONCE, "--log.results", str(tmp_path))
    outputs = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert ["1 of 1 runs valid" in output for output in outputs] == [True, False]
    assert "# processes: 2 x 1 threads" in (tmp_path / "tiny_cpu/bert/result_0.txt").read_text()


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun here: apt-get install openmpi-bin")
def test_mpirun_starts_the_processes_of_one_run(checkout: Path, tmp_path: Path) -> None:
    settings = ("--", *SHORT, REACHED_AT_ONCE, "--log.results", str(tmp_path))
    ready = start(checkout / "run_and_time.sh", "--prepare", "tiny_cpu", *settings, cwd=checkout, WORLD_SIZE="2")
    assert ready.stdout.endswith(f"results would go to {tmp_path}/tiny_cpu/bert/result_0.txt\n"), ready.stderr
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = ("--oversubscribe", "-np", "2", "./run_and_time.sh", "tiny_cpu", "1", *settings)
    done = start(Path("mpirun"), *command, cwd=checkout, **root, **address)
    assert done.returncode == 0, done.stdout + done.stderr
    result = tmp_path / "tiny_cpu/bert/result_0.txt"
    assert "# processes: 2 x 1 threads" in result.read_text()
    shown = start(checkout / "run_and_time.sh", "--verdict", str(result), cwd=checkout)
    assert shown.returncode == 0
    assert "1 of 1 runs valid" in shown.stdout


def test_the_verdict_fails_if_the_system_description_cannot_be_written(checkout: Path, tmp_path: Path) -> None:
    log = tmp_path / "results/system/bert/result_0.txt"
    log.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / "results/cpu_2cores/bert/result_0.txt", log)
    (tmp_path / "results/systems").write_text("no folder\n")
    done = start(checkout / "run_and_time.sh", "--verdict", str(log), cwd=checkout)
    assert f"PASS {log}" in done.stdout
    assert "</html>" in log.with_name("report.html").read_text()
    assert done.returncode == 1
    assert "systems/system.json cannot be written" in done.stderr
