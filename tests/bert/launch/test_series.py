"""Series of runs: the order in which programs start, the effect of failures, and the effect of signals."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.bert.launch.started import Started
from tests.compliance.result_folders import write_experiment
from tests.programs import REPOSITORY, python, wait_for

pytestmark = pytest.mark.slow

SETTINGS = "--data.train a --data.evaluation b"
TWO_NODES = {"NNODES": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "29999"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    log = tmp_path / "results/my system/bert/result_0.txt"
    log.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / "results/cpu_2cores/bert/result_0.txt", log)
    return log


def logs(log: Path, then: str = "exit 0") -> str:
    """Return a script that reports ``log`` as its log, and then runs ``then``."""
    return f"echo '{log}' >\"$MLPERF_BERT_CLAIM\"; {then}"


def start(folder: Path, words: str, train: str, ignored: str = "", **others: str) -> Started:
    return Started(folder, f"bert.launch {words} -- {SETTINGS}", train, ignored=ignored, **{"NPROC": "1"} | others)


def modules(calls: list[str]) -> list[str]:
    """Return the names of the programs. The dry run before a run is called "bert.train check"."""
    return [re.sub(r" .*--dry-run$", " check", call) if "--dry-run" in call else call.split()[0] for call in calls]


def test_a_dry_run_precedes_each_run_and_the_verdict_comes_last(tmp_path: Path, log: Path) -> None:
    started = start(tmp_path, "tiny_cpu 2", logs(log), OMP_NUM_THREADS="3")
    done = started.end()
    assert (done.returncode, done.stderr) == (0, "")
    run = [f"bert.train tiny_cpu {SETTINGS}{option}" for option in (" --dry-run", "")]
    system = f"system --out {tmp_path}/results/systems/my system.json --division open"
    verdict = f"check {log} {log}", system, f"summary {log.parent}", f"report {log.parent}"
    assert started.calls == [*run, *run, *(f"compliance {words}" for words in verdict)]
    said = [f"==> tiny_cpu, run {number} of 2: 1 process with 3 threads each" for number in (1, 2)]
    assert done.stdout.splitlines() == [*said, "==> check, summary and report"]


def test_logs_of_runs_without_a_target_are_not_checked_against_the_rules(tmp_path: Path) -> None:
    log = write_experiment(tmp_path / "results/my system/bert", 0, (0.1,), status="aborted")
    started = start(tmp_path, "tiny_cpu", logs(log, "exit 130"))
    done = started.end()
    assert (done.returncode, done.stdout.splitlines()[1:]) == (130, ["==> summary and report"])
    (again := tmp_path / "again").mkdir()
    assert start(again, "tiny_cpu", logs(log)).end().returncode == 1, "the run has not reached its end"
    assert started.calls[2:] == [f"compliance {word} {log.parent}" for word in ("summary", "report")]
    assert not list((tmp_path / "tmp").iterdir())


ENDED = "warning: {} has ended run 1: no further runs are started\n"


@pytest.mark.parametrize(
    ("scripts", "status", "said", "programs"),
    [
        # Invalid input ends the series before anything is trained.
        ({"check": "echo error: wrong >&2; exit 2"}, 2, "error: wrong\n", "check"),
        # A run that misses its target does not end the series.
        ({"train": "LOG exit 1"}, 1, "", "check train check train VERDICT"),
        *(
            # Faults and wrong input end the series, and their status comes before the verdict's.
            (
                {"train": f"LOG exit {status}", "compliance": "exit 1"},
                status,
                ENDED.format("an error"),
                "check train VERDICT",
            )
            for status in (2, 3)
        ),
        (
            {"train": "LOG kill -9 $$"},
            *(137, ENDED.format("signal 9"), "check train VERDICT"),
        ),
        (
            {"train": "exit 0"},
            *(1, "".join(f"error: run {run} has left no log\n" for run in (1, 2)), "check train check train"),
        ),
        ({"train": "exit 2"}, 2, ENDED.format("an error"), "check train"),
        ({"compliance": "[[ $3 != summary ]]"}, 1, "", "check train check train VERDICT"),
    ],
)
def test_wrong_input_and_faults_end_the_series_and_missed_targets_do_not(
    tmp_path: Path, log: Path, scripts: dict[str, str], status: int, said: str, programs: str
) -> None:
    """The system's description exists already, so no case writes it."""
    description = tmp_path / "results/systems/my system.json"
    description.parent.mkdir()
    description.touch()
    scripts = {name: script.replace("LOG", logs(log, "")) for name, script in scripts.items()}
    started = start(tmp_path, "tiny_cpu 2", **{"train": logs(log)} | scripts)
    done = started.end()
    assert (done.returncode, done.stderr) == (status, said)
    short = {"bert.train check": "check", "bert.train": "train"}
    found = [short.get(name, call.split()[1]) for name, call in zip(modules(started.calls), started.calls, strict=True)]
    assert found == programs.replace("VERDICT", "check summary report").split()


@pytest.mark.parametrize(
    ("variables", "options", "said"),
    [
        (
            {"NPROC": "2", "OMP_NUM_THREADS": "5", "PET_STANDALONE": "1"},
            "--nproc-per-node 2 --nnodes 1 --node-rank 0 --master-addr 127.0.0.1 --master-port [123]....",
            "2 2 claim\nunset 5 0\nerror: run 1 has left no log\n",
        ),
        (
            TWO_NODES | {"NODE_RANK": "1", "NPROC": "3", "OMP_NUM_THREADS": "2"},
            "--nproc-per-node 3 --nnodes 2 --node-rank 1 --master-addr h0 --master-port 29999",
            "6 3 claim\nunset 2 0\n",  # only node 0 writes a log, so node 1 misses none
        ),
        *(
            # srun starts one launcher for each node, or a user starts one by hand in the shell of salloc.
            (
                TWO_NODES | task | {"NODE_RANK": "1", "NPROC": "4", "OMP_NUM_THREADS": "2"},
                "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr h0 --master-port 29999",
                "8 4 claim\nunset 2 0\n",
            )
            for task in (
                {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
                {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},
            )
        ),
    ],
)
def test_torchrun_starts_the_processes_of_a_node_without_elastic_agents(
    tmp_path: Path, variables: dict[str, str], options: str, said: str
) -> None:
    """The dry run gets WORLD_SIZE for all nodes. It gets MLPERF_BERT_CLAIM only if a run follows, as it does here."""
    check = 'echo "$WORLD_SIZE $LOCAL_WORLD_SIZE ${MLPERF_BERT_CLAIM:+claim}" >&2'
    shows = 'echo "${WORLD_SIZE-unset} $OMP_NUM_THREADS $(env | grep -c ^PET_)" >&2'
    started = start(tmp_path, "tiny_cpu", shows, check=check, **variables)
    done = started.end()
    assert (done.returncode, done.stderr) == (said.count("error"), said)
    assert started.calls[0] == f"bert.train tiny_cpu {SETTINGS} --dry-run"
    reports = "results/tiny_cpu/bert"
    folder = f"--log-dir {tmp_path}/tmp/mlperf-bert-\\w+"
    assert re.fullmatch(
        f"bert.launch.agent {reports} {options} {folder} -m bert.train tiny_cpu {SETTINGS}", started.calls[1]
    )
    assert len(started.calls) == 2


WITHOUT_GPUS = ":".join(each for each in os.environ["PATH"].split(":") if not Path(each, "nvidia-smi").exists())


@pytest.mark.parametrize(
    ("words", "variables", "status", "world_size"),
    [
        ("--prepare tiny_cpu --", {"NPROC": "2", "NNODES": "3", "CLEAR_CACHES": ""}, 0, "6"),
        ("--prepare tiny_cpu --", {"WORLD_SIZE": "64"}, 0, "64"),
        ("--prepare tiny_cpu -- --dry-run", {}, 10, "1"),
        ("--prepare tiny_cpu -- --print-config", {}, 10, None),
        ("tiny_cpu 1 -- --dry-run", {}, 0, "1"),
        ("tiny_cpu 1 -- --print-config", {}, 0, None),
        # Without GPUs and NPROC, a dry run for one node takes the number of ranks from the recipe.
        ("h100_1x8 1 -- --dry-run", {"NPROC": "", "PATH": WITHOUT_GPUS}, 0, "unset"),
        ("h100_1x8 1 -- --dry-run", {"NPROC": "4", "PATH": WITHOUT_GPUS}, 0, "4"),
        ("--prepare h100_1x8 --", {"NPROC": "", "NNODES": "2", "PATH": WITHOUT_GPUS}, 0, "2"),
    ],
)
def test_prepare_and_dry_run_check_the_ranks_of_all_nodes_and_train_nothing(
    tmp_path: Path, words: str, variables: dict[str, str], status: int, world_size: str | None
) -> None:
    shows = 'echo "${WORLD_SIZE-unset} ${MLPERF_BERT_CLAIM-none}" >&2'
    started = Started(tmp_path, f"bert.launch {words} {SETTINGS}", dry_run=shows, **{"NPROC": "1"} | variables)
    done = started.end()
    assert (done.returncode, done.stderr) == (status, f"{world_size} none\n" if world_size else "")
    assert [call.split()[0] for call in started.calls] == (["cluster.dry_run"] if world_size else [])
    assert ("# config.recipe: tiny_cpu\n" in done.stdout) == ("print" in words)


WAITS = f"exec {sys.executable} -IS {REPOSITORY}/tests/bert/launch/waiting.py FILE 1"
STOPPING = "stopping after this step; again to end now\n"


def interrupt(started: Started, folder: Path, number: int) -> None:
    """Send a signal to the launcher as soon as its program waits in a loop."""
    wait_for((folder / "waiting").exists, started.process)
    started.process.send_signal(number)


@pytest.mark.parametrize(
    ("scripts", "number", "status", "said", "trained"),
    [
        ({"check": WAITS}, signal.SIGINT, 130, "interrupted\ngot SIGTERM\n", 0),
        ({"train": WAITS}, signal.SIGINT, 130, "interrupted\ngot SIGTERM\n", 1),
        ({"train": WAITS}, signal.SIGTERM, 143, "interrupted\ngot SIGTERM\n", 1),
        ({"train": f"LOG {WAITS}"}, signal.SIGINT, 130, f"{STOPPING}got SIGINT\n", 1),
        ({"train": f"LOG {WAITS}"}, signal.SIGTERM, 143, f"{STOPPING}got SIGTERM\n", 1),
        ({"train": f"LOG {WAITS}"}, signal.SIGHUP, 129, f"{STOPPING}got SIGTERM\n", 1),
        ({"compliance": WAITS}, signal.SIGINT, 130, "interrupted\ngot SIGTERM\n", 2),
    ],
)
def test_a_signal_prints_a_line_and_reaches_the_running_program(
    tmp_path: Path, log: Path, scripts: dict[str, str], number: int, status: int, said: str, trained: int
) -> None:
    waiting = f"{tmp_path}/waiting"
    scripts = {name: text.replace("LOG", logs(log, "")).replace("FILE", waiting) for name, text in scripts.items()}
    started = start(tmp_path, "tiny_cpu 2", **{"train": logs(log)} | scripts)
    interrupt(started, tmp_path, number)
    done = started.end()
    assert (done.returncode, done.stderr) == (status, said)
    called = modules(started.calls)
    assert called.count("bert.train") == trained
    assert called.count("compliance") == (4 if said.startswith("stopping") else trained == 2)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_signal_before_there_is_a_log_kills_torchrun_and_terminates_its_ranks(tmp_path: Path) -> None:
    rank = f"trap 'touch {tmp_path}/ended; exit' TERM; touch {tmp_path}/waiting; while :; do sleep 0.02; done"
    started = start(tmp_path, "tiny_cpu", f"trap 'echo got TERM >&2; exit' TERM; ({rank}) & wait", NPROC="2")
    interrupt(started, tmp_path, signal.SIGTERM)
    done = started.end()
    assert (done.returncode, done.stderr) == (143, "interrupted\n")
    assert (tmp_path / "ended").exists()


def test_the_third_signal_kills_the_run(tmp_path: Path, log: Path) -> None:
    stubborn = WAITS.replace("FILE 1", f"{tmp_path}/waiting 3")
    started = start(tmp_path, "tiny_cpu", logs(log, stubborn))
    wait_for((tmp_path / "waiting").exists, started.process)
    assert started.process.stderr
    lines = list[str]()
    while len(lines) < 4:  # two lines from the launcher and two from the program
        if len(lines) % 2 == 0:
            started.process.send_signal(signal.SIGINT)
        lines.append(started.process.stderr.readline())
    started.process.send_signal(signal.SIGINT)
    assert started.end().returncode == 130
    assert sorted(lines) == ["ending now\n", "got SIGINT\n", "got SIGINT\n", STOPPING]


def test_the_verdict_waits_for_processes_whose_launcher_was_killed(tmp_path: Path, log: Path) -> None:
    train = f"(sleep 0.5; touch {tmp_path}/ended) & {logs(log, '')} kill -9 $$"
    started = start(tmp_path, "tiny_cpu", train, compliance=f"[[ -e {tmp_path}/ended ]]")
    assert started.end().returncode == 137
    assert modules(started.calls).count("compliance") == 4


def test_the_series_ignores_a_signal_that_its_parent_ignored(tmp_path: Path, log: Path) -> None:
    """``nohup`` starts programs with SIGHUP ignored."""
    train = f"touch {tmp_path}/waiting; while [[ ! -e {tmp_path}/go ]]; do sleep 0.02; done; {logs(log)}"
    started = start(tmp_path, "tiny_cpu", train, ignored="SIGHUP")
    interrupt(started, tmp_path, signal.SIGHUP)
    (tmp_path / "go").touch()
    done = started.end()
    assert (done.returncode, done.stderr) == (0, "")


STOPPED = """
import signal, sys
from bert.launch.supervision import Stopped, Supervisor

supervisor = Supervisor()
supervisor.receive_signals()
try:
    exec("signal.raise_signal(signal.SIGTERM)")
except Stopped:
    sys.exit(supervisor.status)
"""


def test_a_signal_during_exec_ends_the_program_with_the_signals_status() -> None:
    done = python("-c", STOPPED)
    assert (done.returncode, done.stderr) == (143, "interrupted\n")
