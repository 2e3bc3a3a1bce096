"""Jobs of ``launch/slurm.sub`` that are cancelled, out of time, or have a task that dies, and tests that are killed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, SmallRun
from tests.e2e.slurm.slurm_cluster import Cluster, missing
from tests.e2e.slurm.slurm_jobs import RESULTS, output, small, submit, training
from tests.programs import PATIENCE_S

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


def test_killed_tests_leave_no_daemons_and_no_jobs(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tests.e2e.slurm.slurm_cluster import Cluster
cluster = Cluster(Path({str(tmp_path)!r}), nodes=2)
cluster.start()
cluster.run("sbatch", "--output=/dev/null", "--wrap", "exec tail -f {tmp_path}/slurm.conf")
cluster.wait_for(lambda: cluster.run("squeue", "-h", "-o", "%T").strip() == "RUNNING")
print("started", flush=True)
input()
"""
    tests = subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert tests.stdout
    assert tests.stdout.readline() == "started\n"
    assert len(mentioning(tmp_path)) >= 5  # munged, slurmctld, two slurmd, the job
    tests.kill()
    tests.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while mentioning(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert mentioning(tmp_path) == []


def mentioning(folder: Path) -> list[str]:
    """Return the command lines of processes that mention a folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if str(folder) in line]
