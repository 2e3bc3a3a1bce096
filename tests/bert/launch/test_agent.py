"""torchrun as the launcher starts it: what it prints, what it writes to a file, and its exit status."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import free_port
from tests.programs import PATIENCE_S, REPOSITORY, wait_for

pytestmark = pytest.mark.slow


def begin(reports: Path, rank_1: str, *options: str, rank_0: str = f"exec sleep {PATIENCE_S}") -> subprocess.Popen[str]:
    """Start two ranks, which run shell scripts. By default, rank 0 waits until torchrun ends it."""
    script = f"if [[ $RANK == 0 ]]; then {rank_0}; else {rank_1}; fi"
    place = ("--nproc-per-node", "2", *(options or ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))))
    command = ("-m", "bert.launch.agent", str(reports), "--log-dir", os.devnull, *place, "--no-python")
    return subprocess.Popen(
        [sys.executable, *command, "bash", "-c", script],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def report(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize(
    ("rank_1", "status", "said"),
    [
        ("echo 'error: wrong' >&2; exit 2", 2, "error: wrong\n"),
        ("echo 'error: rank 0: lost' >&2; exit 3", 3, "error: rank 0: lost\n"),
        ("exit 1", 3, "error: rank 1: ended with exit status 1; torchrun's report is in REPORT\n"),
    ],
)
def test_a_fault_is_said_once_and_torchrun_writes_its_report_to_a_file(
    tmp_path: Path, rank_1: str, status: int, said: str
) -> None:
    process = begin(tmp_path / "results/bert", rank_1)
    _, errors = process.communicate(timeout=PATIENCE_S)
    path = report(tmp_path / "results/bert")
    assert (process.returncode, errors) == (status, said.replace("REPORT", str(path)))
    assert path.name == f"torchrun_{os.uname().nodename}_{process.pid}.txt"
    assert "Root Cause" in path.read_text()


@pytest.mark.oldest_torch
def test_every_restart_of_an_elastic_run_names_its_cause(tmp_path: Path) -> None:
    elastic = ("--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    process = begin(tmp_path, "kill -SEGV $BASHPID", *elastic)
    _, errors = process.communicate(timeout=PATIENCE_S)
    said = f"error: rank 1: ended by SIGSEGV; torchrun's report is in {report(tmp_path)}\n"
    assert (process.returncode, errors) == (3, 2 * said)


@pytest.mark.oldest_torch
def test_after_a_signal_torchruns_traceback_is_in_the_file(tmp_path: Path) -> None:
    process = begin(tmp_path / "reports", f"touch {tmp_path}/ready; exec sleep {PATIENCE_S}")
    wait_for((tmp_path / "ready").exists, process)
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "")
    assert "SignalException" in report(tmp_path / "reports").read_text()


def test_a_successful_run_leaves_no_report(tmp_path: Path) -> None:
    process = begin(tmp_path, "exit 0", rank_0="exit 0")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors, list(tmp_path.iterdir())) == (0, "", [])


def test_a_report_that_cannot_be_written_is_mentioned_in_the_line(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    process = begin(tmp_path / "results/bert", "kill -KILL $BASHPID")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3
    assert errors.startswith(
        f"error: rank 1: ended by SIGKILL; torchrun's report cannot be written to {tmp_path}/results/"
    )
    assert errors.count("\n") == 1


def test_a_fault_of_torchrun_itself_is_said_in_one_line(tmp_path: Path) -> None:
    process = begin(tmp_path, "exit", "--nnodes", "0")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors.count("\n")) == (3, 1)
    assert errors.startswith("error: torchrun: min_nodes must be > 0")
    assert "Traceback" in report(tmp_path).read_text()
