"""``launch/slurm.sub`` and ``launch/data.sub`` on a real Slurm cluster of two nodes on this machine."""

import contextlib
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.view import write_view
from tests.cluster.test_view import made_up
from tests.conftest import SmallRun
from tests.dataloading.preparation.stand_in import write_stand_in
from tests.e2e.slurm.slurm_cluster import Cluster, missing, running_cluster
from tests.e2e.test_scripts import REACHED_AT_ONCE, SHORT, status_of

RESULTS = Path("results/tiny_cpu/bert")

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_results(checkout: Path) -> None:
    shutil.rmtree(checkout / "results", ignore_errors=True)
    (checkout / "results").mkdir()


def submit(cluster: Cluster, checkout: Path, *arguments: str, options: tuple[str, ...] = ("-N2",), **env: str) -> str:
    """Submit ``launch/slurm.sub`` from the checkout and return the job's number."""
    command = ("sbatch", "--parsable", *options, "launch/slurm.sub", *arguments)
    return cluster.run(*command, cwd=checkout, **({"OMP_NUM_THREADS": "1", "CLEAR_CACHES": "0"} | env)).strip()


def small(run: SmallRun, results: str = "results", samples: int = 10_000_000, **changes: object) -> list[str]:
    """Return settings of a run with a very small model. By default, the run lasts until it is stopped."""
    settings = {"training__max_samples": samples, "evaluation__interval_samples": 1600} | changes
    return ["--", *run.arguments(Path(results), **settings)[1:]]


def output(checkout: Path, job: str) -> str:
    path = checkout / f"results/slurm-{job}.out"
    return path.read_text() if path.exists() else ""


def training(cluster: Cluster, checkout: Path, number: int, folder: Path = RESULTS) -> None:
    """Wait until run ``number`` has logged a step."""
    path = checkout / folder / f"metrics_{number}.jsonl"
    cluster.wait_for(lambda: path.exists() and '"event": "step"' in path.read_text())


def requeue(cluster: Cluster, job: str) -> None:
    cluster.run("scontrol", "requeue", job)
    cluster.wait_for(lambda: cluster.job(job)["JobState"] == "PENDING")
    # Slurm would wait two minutes. A job that starts in the second of its requeue fails (Job credential revoked).
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")


def test_a_job_of_two_tasks_trains_on_a_free_port_and_writes_a_report(cluster: Cluster, checkout: Path) -> None:
    """Another program listens on the port that the first run would use."""
    settings = ("--", *SHORT, REACHED_AT_ONCE)
    job = submit(cluster, checkout, "tiny_cpu", "2", *settings, options=("-N2", "--hold"), CLEAR_CACHES="1")
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 20000 + (int(job) * 16 + 1) % 12000)):
        cluster.run("scontrol", "release", job)
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


def test_tasks_start_in_the_order_of_the_host_file(
    cluster: Cluster, checkout: Path, small_run: SmallRun, tmp_path: Path
) -> None:
    """In this test, ``cluster place`` writes n2 before n1, against Slurm's order. Tasks must start in the written order."""
    view, hosts = made_up(hosts=2, ranks=1), tmp_path / "hosts.txt"
    named = tuple(replace(host, name=name) for host, name in zip(view.hosts, ("n2", "n1"), strict=True))
    write_view(replace(view, hosts=named, collectives=(), outliers=()), tmp_path / "cluster.json")
    written = ("--tasks-per-node", "2", "--out", str(hosts))
    cluster.run(sys.executable, "-m", "cluster", "place", str(tmp_path / "cluster.json"), *written, cwd=checkout)
    assert hosts.read_text().split() == ["n2", "n2", "n1", "n1"]
    tasks = re.findall(r"train (--ntasks=.*?) \\", (checkout / "launch/slurm.sub").read_text())[-1]
    for order, nodes in (("block", ["n1", "n1", "n2", "n2"]), ("arbitrary", ["n2", "n2", "n1", "n1"])):
        script = f"all=4 tasks=2; srun {tasks} sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME'"
        options = ("-N2", "--ntasks-per-node=2", f"--distribution={order}", f"--output={tmp_path}/{order}")
        file: dict[str, Any] = {"SLURM_HOSTFILE": str(hosts)} if order == "arbitrary" else {}
        job = cluster.run("sbatch", "--parsable", *options, f"--wrap={script}", **file).strip()
        assert cluster.finish(job)["ExitCode"] == "0:0", (tmp_path / order).read_text()
        ranks = sorted(re.findall(r"^rank (\d) (n\d)$", (tmp_path / order).read_text(), re.M))
        assert ranks == [(str(rank), node) for rank, node in enumerate(nodes)]
    hosts.write_text("n2\nn1\n")
    settings = small(small_run, evaluation__interval_samples=80, evaluation__target=0.001)
    place = {"SLURM_HOSTFILE": str(hosts), "MASTER_ADDR": "127.0.0.1"}
    job = submit(cluster, checkout, "tiny_cpu", "1", *settings, options=("-N2", "--distribution=arbitrary"), **place)
    assert cluster.finish(job)["ExitCode"] == "0:0", output(checkout, job)
    assert "# processes: 2 x 1 threads" in (checkout / RESULTS / "result_0.txt").read_text()


def test_a_requeued_job_repeats_only_the_interrupted_run(cluster: Cluster, checkout: Path, small_run: SmallRun) -> None:
    """Run 0 ends at its sample limit and run 1 is interrupted. The job repeats only run 1, under the same number."""
    settings = small(small_run, "results/of us all", samples=4800)
    folder = Path("results/of us all/tiny_cpu/bert")
    job = submit(cluster, checkout, "tiny_cpu", "2", *settings, options=("-N1",))
    training(cluster, checkout, 1, folder)
    first = (checkout / folder / "result_0.txt").read_bytes()
    (checkout / folder / "result_2.txt").write_text("of somebody else\n")
    requeue(cluster, job)
    assert cluster.finish(job)["ExitCode"] == "1:0", output(checkout, job)
    assert "restart 1: 1 of 2 run(s) are done" in output(checkout, job)
    assert (checkout / folder / "result_0.txt").read_bytes() == first
    assert "train_samples" in (checkout / folder / "result_1.txt").read_text()
    assert (checkout / folder / "result_2.txt").read_text() == "of somebody else\n"
    names = "metrics_0.jsonl metrics_1.jsonl metrics_1.jsonl.cut-off-1 result_0.txt result_1.txt result_1.txt.cut-off-1"
    assert {path.name for path in (checkout / folder).glob("*_[0-9]*")} == {*names.split(), "result_2.txt"}
    notes = {path: path.read_text().splitlines() for path in (checkout / "results").rglob(f"slurm-{job}.runs*")}
    logs = [f"{folder}/result_0.txt", f"{folder}/result_1.txt"]
    assert notes == {checkout / f"results/of us all/slurm-{job}.runs": logs}, "it is beside the chosen results"


def test_a_run_that_ended_before_its_job_was_requeued_is_not_repeated(cluster: Cluster, checkout: Path) -> None:
    job = submit(cluster, checkout, "tiny_cpu", "1", "--", *SHORT, REACHED_AT_ONCE, options=("-N1",))
    log = checkout / RESULTS / "result_0.txt"
    cluster.wait_for(lambda: log.exists() and '"run_stop"' in log.read_text())
    ended = log.read_bytes()
    requeue(cluster, job)
    assert cluster.finish(job)["ExitCode"] == "0:0", output(checkout, job)
    assert "restart 1: 1 of 1 run(s) are done" in output(checkout, job)
    assert [path.name for path in (checkout / RESULTS).glob("result_*")] == ["result_0.txt"]
    assert log.read_bytes() == ended


def test_a_requeued_job_resumes_on_the_remaining_node(cluster: Cluster, checkout: Path, small_run: SmallRun) -> None:
    """One node goes down while the requeued job waits. The job resumes on the other node with the same global batch."""
    checkpoints = {"log__division": "open", "checkpoint__folder": "results/checkpoints", "checkpoint__every_steps": 5}
    job = submit(cluster, checkout, "tiny_cpu", "1", *small(small_run, **checkpoints), options=("-N1-2",))
    cluster.wait_for(lambda: any((checkout / "results").glob("checkpoints/step_*/state.json")))
    cluster.run("scontrol", "requeue", job)
    cluster.wait_for(lambda: cluster.job(job)["JobState"] == "PENDING")
    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=broken")
    try:
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
        cluster.wait_for(lambda: (checkout / RESULTS / "result_0.txt.cut-off-1").exists())
        # Wait for the new log, because until then the old metrics may not have been renamed.
        cluster.wait_for(lambda: (checkout / RESULTS / "result_0.txt").exists())
        training(cluster, checkout, 0)
        cluster.run("scancel", job)
        cluster.finish(job)
    finally:
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    text = (checkout / RESULTS / "result_0.txt").read_text()
    resumed = re.search(r"^# resumed from: results/checkpoints/step_(\d{8})$", text, re.M)
    assert resumed, output(checkout, job)
    assert re.search(rf"^step +{int(resumed[1]) + 1} ", text, re.M)
    assert re.search(r"^# lost: host \S+ \(1 rank\)$", text, re.M)
    shares = "1 rank on 1 host, a step of each with at most 2 x 8 sequences; before 2 ranks on 1 host, a step of each"
    assert f"# shares of the global batch: {shares} with at most 1 x 8 sequences\n" in text


def test_invalid_input_is_refused_in_one_line_before_training(cluster: Cluster, checkout: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for recipe, env, complaint in (
            ("tiny_gpu", {}, "unknown recipe 'tiny_gpu'"),
            ("tiny_cpu", {"MASTER_PORT": port}, f"MASTER_PORT is {port}, but a program listens there on node"),
        ):
            job = submit(cluster, checkout, recipe, "1", options=("-N2", "-t1"), **env)
            assert cluster.finish(job)["ExitCode"] == "2:0", output(checkout, job)
            (error,) = (line for line in output(checkout, job).splitlines() if line.startswith("error: "))
            assert complaint in error
            assert "warning: the time limit is " in output(checkout, job)
    assert not list(checkout.glob("results/*/bert/result_*"))


def test_array_tasks_make_parts_of_the_data_and_one_makes_the_rest(
    cluster: Cluster, checkout: Path, tmp_path: Path
) -> None:
    given, out = write_stand_in(tmp_path), tmp_path / "wikipedia"
    made = (str(given.files), str(given.text), "--checksums", str(given.checksums), "--shards", "2", "--out", str(out))
    command = ("sbatch", "--parsable", "--array=0-2", "launch/data.sub", *made)
    job = cluster.run(*command, cwd=checkout, OMP_NUM_THREADS="1").strip()
    cluster.finish(job)
    outputs = [(checkout / f"results/slurm-{job}_{task}.out").read_text() for task in range(3)]
    made_files = {path.name for path in out.iterdir()}
    assert made_files == {"train", "evaluation", "vocab.txt", "phase1.safetensors", "preparation"}, outputs
    assert sum("python -m bert.train h100_1x8 --dry-run" in shown for shown in outputs) == 1, outputs
    assert sum("/3 is done" in shown for shown in outputs) == 2, outputs
    assert not [shown for shown in outputs if "error" in shown]


@pytest.mark.parametrize(
    ("signal_to", "state"), [((), "CANCELLED"), (("--batch", "--signal=USR1"), "FAILED")], ids=["scancel", "time limit"]
)
def test_a_job_that_is_cancelled_or_out_of_time_leaves_an_aborted_log(
    cluster: Cluster, checkout: Path, small_run: SmallRun, signal_to: tuple[str, ...], state: str
) -> None:
    """``scancel`` signals all tasks. Near the time limit, ``--signal=B:USR1@120`` signals only the batch script."""
    job = submit(cluster, checkout, "tiny_cpu", "2", *small(small_run))
    training(cluster, checkout, 0)
    cluster.run("scancel", *signal_to, job)
    ended = cluster.finish(job)
    assert ended["JobState"] == state, output(checkout, job)
    assert ended["ExitCode"] == "143:0" or state == "CANCELLED"
    assert status_of(checkout / RESULTS / "result_0.txt") == "aborted"
    assert not (checkout / RESULTS / "result_1.txt").exists()
    assert "not a valid result (aborted)" in output(checkout, job)


@pytest.fixture
def real_python(checkout: Path) -> Iterator[None]:
    """Start Python as a real program, because stopping the program that asks for a fork would not stop the fork."""
    python = checkout / ".venv/bin/python"
    forking = python.rename(python.with_name("forking"))
    python.symlink_to(sys.executable)
    yield
    forking.replace(python)


@pytest.mark.usefixtures("real_python")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_killed_or_stopped_task_fails_the_job(
    cluster: Cluster, checkout: Path, small_run: SmallRun, number: int
) -> None:
    job = submit(cluster, checkout, "tiny_cpu", "2", *small(small_run, training__fault_seconds=5))
    training(cluster, checkout, 0)
    # Match the cluster too, because another one on this machine may have a job with this number.
    task = cluster.environment | {"SLURM_JOB_ID": job, "SLURM_PROCID": "1"}
    processes = psutil.process_iter(["cmdline", "environ"])
    victim = next(
        each for each in processes
        if "bert.train" in (each.info["cmdline"] or ()) and task.items() <= (each.info["environ"] or {}).items()
    )  # fmt: skip
    victim.send_signal(number)
    assert cluster.finish(job)["ExitCode"] == "3:0", output(checkout, job)
    assert "run 1 ended with status 3: 1 further run(s) are not started" in output(checkout, job)
    assert not (checkout / RESULTS / "result_1.txt").exists()
