"""``launch/slurm.sub`` on a real Slurm cluster of this machine: two nodes, a task each, from sbatch to the report."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, SmallRun
from tests.e2e.slurm_cluster import Cluster, missing

SHORT = ("--", "--evaluation.interval-samples", "160", "--log.interval-steps", "5", "--evaluation.target", "0.02")
"""Settings with which the recipe as it is reaches its target at once."""
RESULTS = Path("results/tiny_cpu/bert")

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=2)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(autouse=True)
def no_results(checkout: Path) -> None:
    shutil.rmtree(checkout / "results", ignore_errors=True)
    (checkout / "results").mkdir()


def submit(cluster: Cluster, checkout: Path, *arguments: str, options: tuple[str, ...] = ("-N2",), **env: str) -> str:
    """Submit ``launch/slurm.sub`` from the checkout; the job's number."""
    command = ("sbatch", "--parsable", *options, "launch/slurm.sub", *arguments)
    return cluster.run(*command, cwd=checkout, **({"OMP_NUM_THREADS": "1", "CLEAR_CACHES": "0"} | env)).strip()


def small(run: SmallRun, results: str = "results", samples: int = 10_000_000, **changes: object) -> list[str]:
    """Settings of a very small run, without an end and with a target that it does not reach."""
    settings = {"training__max_samples": samples, "evaluation__interval_samples": 1600} | changes
    return ["--", *run.arguments(Path(results), **settings)[1:]]


def output(checkout: Path, job: str) -> str:
    path = checkout / f"results/slurm-{job}.out"
    return path.read_text() if path.exists() else ""


def status_of(log: Path) -> str:
    """The status of the only ``run_stop`` of a log."""
    (line,) = (line for line in log.read_text().splitlines() if '"run_stop"' in line)
    return json.loads(line.partition(":::MLLOG ")[2])["metadata"]["status"]


def training(cluster: Cluster, checkout: Path, number: int, folder: Path = RESULTS) -> None:
    """Wait until run ``number`` has trained for some steps."""
    path = checkout / folder / f"metrics_{number}.jsonl"
    cluster.wait_for(lambda: path.exists() and '"event": "step"' in path.read_text(), 240)


def test_two_tasks_train_and_the_job_reports(cluster: Cluster, checkout: Path) -> None:
    job = submit(cluster, checkout, "tiny_cpu", "2", *SHORT, CLEAR_CACHES="1")
    ended = cluster.finish(job)
    assert ended["ExitCode"] == "0:0", output(checkout, job)
    shown = output(checkout, job)
    assert "2 of 2 runs valid" in shown
    assert shown.count("end: success") == 2
    for run in (0, 1):
        assert f"PASS {RESULTS}/result_{run}.txt" in shown
        log = (checkout / RESULTS / f"result_{run}.txt").read_text()
        assert "# processes: 2 x 1 threads" in log
        dropped = "# config.log.cache_cleared: True" in log
        assert dropped == ('"cache_clear", "value": true' in log)
    assert (checkout / RESULTS / "report.html").exists()


def test_scancel_leaves_an_aborted_log(cluster: Cluster, checkout: Path, small_run: SmallRun) -> None:
    job = submit(cluster, checkout, "tiny_cpu", "3", *small(small_run))
    training(cluster, checkout, 0)
    cluster.run("scancel", job)
    assert cluster.finish(job)["JobState"] == "CANCELLED"
    assert status_of(checkout / RESULTS / "result_0.txt") == "aborted"
    assert not (checkout / RESULTS / "result_1.txt").exists()
    assert "not a valid result (aborted)" in output(checkout, job)


def test_time_limit_ahead_ends_the_run_in_order(cluster: Cluster, checkout: Path, small_run: SmallRun) -> None:
    """What ``#SBATCH --signal=B:TERM@120`` sends: a signal to the batch script alone."""
    job = submit(cluster, checkout, "tiny_cpu", "2", *small(small_run))
    training(cluster, checkout, 0)
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    assert cluster.finish(job)["ExitCode"] == "143:0", output(checkout, job)
    assert status_of(checkout / RESULTS / "result_0.txt") == "aborted"
    assert not (checkout / RESULTS / "result_1.txt").exists()
    assert "not a valid result (aborted)" in output(checkout, job)


def test_jobs_at_once_take_the_numbers_that_are_free_and_report_their_own(
    cluster: Cluster, checkout: Path, small_run: SmallRun
) -> None:
    (checkout / RESULTS).mkdir(parents=True)
    names = [f"{name}_{run}.{kind}" for run in (0, 2) for name, kind in (("result", "txt"), ("metrics", "jsonl"))]
    earlier = {checkout / RESULTS / name: name for name in names}
    for path, text in earlier.items():
        path.write_text(text)
    settings = small(small_run, evaluation__interval_samples=80, evaluation__target=0.001)
    jobs = [submit(cluster, checkout, "tiny_cpu", "1", *settings, options=("-N1",)) for _ in range(2)]
    cluster.wait_for(lambda: [cluster.job(job)["JobState"] for job in jobs] == ["RUNNING"] * 2, 60)
    assert [cluster.finish(job)["ExitCode"] for job in jobs] == ["0:0", "0:0"], [output(checkout, job) for job in jobs]
    checked = [re.findall(r"^(?:PASS|FAIL) (.*?):", output(checkout, job), re.M) for job in jobs]
    assert sorted(checked[0] + checked[1]) == [f"{RESULTS}/result_{run}.txt" for run in (1, 3)]
    for job, logs in zip(jobs, checked, strict=True):
        assert (checkout / f"results/slurm-{job}.runs").read_text().splitlines() == logs
        assert re.findall(r"^log in (.*)$", output(checkout, job), re.M) == logs
    assert {path: path.read_text() for path in earlier} == earlier
    logs = sorted(int(path.stem.removeprefix("result_")) for path in (checkout / RESULTS).glob("result_*.txt"))
    assert logs == [0, 1, 2, 3]
    assert not list((checkout / RESULTS).glob("*cut-off*"))


def test_requeued_job_repeats_what_was_cut_off(cluster: Cluster, checkout: Path, small_run: SmallRun) -> None:
    """Run 0 ends by itself at its sample limit, run 1 is cut off: only run 1 is repeated, under its number."""
    settings = small(small_run, "results/of us all", samples=4800)
    folder = Path("results/of us all/tiny_cpu/bert")
    job = submit(cluster, checkout, "tiny_cpu", "2", *settings, options=("-N1",))
    training(cluster, checkout, 1, folder)
    first = (checkout / folder / "result_0.txt").read_bytes()
    (checkout / folder / "result_2.txt").write_text("of somebody else\n")
    cluster.run("scontrol", "requeue", job)
    cluster.wait_for(lambda: cluster.job(job)["JobState"] == "PENDING", 60)
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm holds requeued jobs back for two minutes
    assert cluster.finish(job)["ExitCode"] == "1:0", output(checkout, job)
    assert "restart 1: 1 of 2 run(s) are done" in output(checkout, job)
    assert (checkout / folder / "result_0.txt").read_bytes() == first
    assert "train_samples" in (checkout / folder / "result_1.txt").read_text()
    assert (checkout / folder / "result_2.txt").read_text() == "of somebody else\n"
    names = sorted(path.name for path in (checkout / folder).glob("*_[0-9]*"))
    assert names == [
        *("metrics_0.jsonl", "metrics_1.jsonl", "metrics_1.jsonl.cut-off-1"),
        *("result_0.txt", "result_1.txt", "result_1.txt.cut-off-1", "result_2.txt"),
    ]
    notes = (checkout / f"results/slurm-{job}.runs").read_text().splitlines()
    assert notes == [f"{folder}/result_0.txt", f"{folder}/result_1.txt"]
    assert not list((checkout / "results").glob(f"slurm-{job}.claim*"))


def test_notes_of_an_earlier_job_with_the_same_number_are_left_alone(cluster: Cluster, checkout: Path) -> None:
    earlier = submit(cluster, checkout, "nothing", options=("-N1", "--hold"))
    cluster.run("scancel", earlier)
    notes = checkout / f"results/slurm-{int(earlier) + 1}.runs"
    notes.write_text("results/other/bert/result_0.txt\n")
    job = submit(cluster, checkout, "tiny_cpu", options=("-N1",))
    assert cluster.finish(job)["ExitCode"] == "2:0"
    assert f"error: results/{notes.name} is of an earlier job with this number" in output(checkout, job)
    assert notes.read_text() == "results/other/bert/result_0.txt\n"


def test_dead_task_fails_the_job(cluster: Cluster, checkout: Path, small_run: SmallRun) -> None:
    job = submit(cluster, checkout, "tiny_cpu", "2", *small(small_run))
    training(cluster, checkout, 0)
    (victim, *_) = (
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if is_task(path, cluster, job, rank=1)
    )
    started = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    ended = cluster.finish(job)
    assert re.fullmatch(r"[1-9]\d*:0", ended["ExitCode"]), output(checkout, job)
    assert time.monotonic() - started < 100
    assert not (checkout / RESULTS / "result_1.txt").exists()


def is_task(environ: Path, cluster: Cluster, job: str, rank: int) -> bool:
    """Whether a process is that task; another cluster of this machine may have a job of the same number."""
    try:
        variables = environ.read_bytes().split(b"\0")
        command = (environ.parent / "cmdline").read_bytes()
    except OSError:
        return False
    expected = cluster.environment | {"SLURM_JOB_ID": job, "SLURM_PROCID": str(rank)}
    return b"bert.train" in command and {f"{name}={value}".encode() for name, value in expected.items()} <= set(
        variables
    )


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        (("tiny_cpu", "two"), ("-N2",), "RUNS is 'two'"),
        ((), ("-N2",), "no recipe given"),
        (("tiny_gpu", "1"), ("-N2",), "unknown recipe 'tiny_gpu'"),
        (("tiny_cpu", "1"), ("-N2", "--ntasks-per-node=3"), "does not divide over 6 ranks"),
        (("tiny_cpu", "1", "--log.run", "3"), ("-N2",), "expected -- and settings"),
    ],
)
def test_nonsense_is_one_line_and_trains_nothing(
    cluster: Cluster, checkout: Path, arguments: tuple[str, ...], options: tuple[str, ...], complaint: str
) -> None:
    job = submit(cluster, checkout, *arguments, options=options)
    assert cluster.finish(job)["ExitCode"] == "2:0", output(checkout, job)
    (error,) = (line for line in output(checkout, job).splitlines() if line.startswith("error: "))
    assert complaint in error
    assert not list(checkout.glob("results/*/bert/result_*"))


def test_killed_tests_leave_no_daemons_and_no_jobs(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tests.e2e.slurm_cluster import Cluster
cluster = Cluster(Path({str(tmp_path)!r}), nodes=2)
cluster.start()
cluster.run("sbatch", "--output=/dev/null", "--wrap", "exec tail -f {tmp_path}/slurm.conf")
cluster.wait_for(lambda: cluster.run("squeue", "-h", "-o", "%T").strip() == "RUNNING", 30)
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
    deadline = time.monotonic() + 60
    while mentioning(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert mentioning(tmp_path) == []


def mentioning(folder: Path) -> list[str]:
    """The command lines of processes that name a folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if str(folder) in line]


def test_submitted_from_elsewhere_is_one_line(cluster: Cluster, checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    job = cluster.run("sbatch", "--parsable", str(checkout / "launch/slurm.sub"), "tiny_cpu", cwd=tmp_path).strip()
    assert cluster.finish(job)["ExitCode"] == "2:0"
    assert "is not the repository's root" in output(tmp_path, job)
