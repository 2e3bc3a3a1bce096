"""Jobs of ``launch/slurm.sub`` that are cancelled, reach their time limit, or have a task that dies."""

import json
import re
from pathlib import Path

import psutil
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


@pytest.mark.parametrize(
    ("signal_to", "state"), [((), "CANCELLED"), (("--batch", "--signal=TERM"), "FAILED")], ids=["scancel", "time limit"]
)
def test_a_job_that_is_ended_leaves_an_aborted_log(
    cluster: Cluster, checkout: Path, small_run: SmallRun, signal_to: tuple[str, ...], state: str
) -> None:
    """Near the time limit, ``#SBATCH --signal=B:TERM@120`` sends a signal only to the batch script."""
    job = submit(cluster, checkout, "tiny_cpu", "2", *small(small_run))
    training(cluster, checkout, 0)
    cluster.run("scancel", *signal_to, job)
    ended = cluster.finish(job)
    assert ended["JobState"] == state, output(checkout, job)
    assert ended["ExitCode"] == "143:0" or state == "CANCELLED"
    assert status_of(checkout / RESULTS / "result_0.txt") == "aborted"
    assert not (checkout / RESULTS / "result_1.txt").exists()
    assert "not a valid result (aborted)" in output(checkout, job)


def test_dead_task_fails_the_job(cluster: Cluster, checkout: Path, small_run: SmallRun) -> None:
    job = submit(cluster, checkout, "tiny_cpu", "2", *small(small_run))
    training(cluster, checkout, 0)
    # Another cluster on this machine may have a job of the same number.
    task = cluster.environment | {"SLURM_JOB_ID": job, "SLURM_PROCID": "1"}
    processes = psutil.process_iter(["cmdline", "environ"])
    victim = next(
        each for each in processes
        if "bert.train" in (each.info["cmdline"] or ()) and task.items() <= (each.info["environ"] or {}).items()
    )  # fmt: skip
    victim.kill()
    ended = cluster.finish(job)
    assert re.fullmatch(r"[1-9]\d*:0", ended["ExitCode"]), output(checkout, job)
    assert not (checkout / RESULTS / "result_1.txt").exists()
