"""Jobs of ``launch/slurm.sub`` that are cancelled, out of time, or have a task that dies, and tests that are killed."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.conftest import SmallRun
from tests.e2e.slurm.slurm_cluster import Cluster, missing
from tests.e2e.slurm.slurm_jobs import RESULTS, output, small, submit, training

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.usefixtures("no_results"),
]


def status_of(log: Path) -> str:
    """Return the status in the log's only ``run_stop``."""
    (line,) = (line for line in log.read_text().splitlines() if '"run_stop"' in line)
    return json.loads(line.partition(":::MLLOG ")[2])["metadata"]["status"]


def test_scancel_leaves_an_aborted_log(cluster: Cluster, checkout: Path, small_run: SmallRun) -> None:
    job = submit(cluster, checkout, "tiny_cpu", "3", *small(small_run))
    training(cluster, checkout, 0)
    cluster.run("scancel", job)
    assert cluster.finish(job)["JobState"] == "CANCELLED"
    assert status_of(checkout / RESULTS / "result_0.txt") == "aborted"
    assert not (checkout / RESULTS / "result_1.txt").exists()
    assert "not a valid result (aborted)" in output(checkout, job)


def test_time_limit_ahead_ends_the_run_in_order(cluster: Cluster, checkout: Path, small_run: SmallRun) -> None:
    """``#SBATCH --signal=B:TERM@120`` sends a signal only to the batch script."""
    job = submit(cluster, checkout, "tiny_cpu", "2", *small(small_run))
    training(cluster, checkout, 0)
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    assert cluster.finish(job)["ExitCode"] == "143:0", output(checkout, job)
    assert status_of(checkout / RESULTS / "result_0.txt") == "aborted"
    assert not (checkout / RESULTS / "result_1.txt").exists()
    assert "not a valid result (aborted)" in output(checkout, job)


def test_dead_task_fails_the_job(cluster: Cluster, checkout: Path, small_run: SmallRun) -> None:
    job = submit(cluster, checkout, "tiny_cpu", "2", *small(small_run))
    training(cluster, checkout, 0)
    (victim, *_) = (
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if is_task(path, cluster, job, rank=1)
    )
    os.kill(victim, signal.SIGKILL)
    ended = cluster.finish(job)
    assert re.fullmatch(r"[1-9]\d*:0", ended["ExitCode"]), output(checkout, job)
    assert not (checkout / RESULTS / "result_1.txt").exists()


def is_task(environ: Path, cluster: Cluster, job: str, rank: int) -> bool:
    """Tell whether a process is this cluster's task. Another cluster on this machine may have a job of the same number."""
    try:
        variables = environ.read_bytes().split(b"\0")
        command = (environ.parent / "cmdline").read_bytes()
    except OSError:
        return False
    expected = cluster.environment | {"SLURM_JOB_ID": job, "SLURM_PROCID": str(rank)}
    return b"bert.train" in command and {f"{name}={value}".encode() for name, value in expected.items()} <= set(
        variables
    )
