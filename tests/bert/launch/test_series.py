"""Series of runs: what is started in which order, what a failure ends, and what signals do."""

import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest

from tests.bert.launch.started import Started
from tests.compliance.result_folders import write_experiment
from tests.programs import PATIENCE_S, REPOSITORY, python, wait_for

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
    """Return a script that claims to have written a log."""
    return f"echo '{log}' >\"$MLPERF_BERT_CLAIM\"; {then}"


def start(folder: Path, words: str, train: str, ignored: str = "", **others: str) -> Started:
    return Started(folder, f"bert.launch {words} -- {SETTINGS}", train, ignored=ignored, **{"NPROC": "1"} | others)


def modules(calls: list[str]) -> list[str]:
    """Return the names of the programs; the check before a run counts as one."""
    return [re.sub(r" .*--dry-run$", " check", call) if "--dry-run" in call else call.split()[0] for call in calls]


def test_each_run_is_checked_and_the_verdict_comes_last(tmp_path: Path, log: Path) -> None:
    started = start(tmp_path, "tiny_cpu 2", logs(log), OMP_NUM_THREADS="3")
    done = started.end()
    assert (done.returncode, done.stderr) == (0, "")
    run = ["bert.train check", "bert.train"]
    assert modules(started.calls) == [*run, *run, *["compliance"] * 4]
    assert started.calls[1] == f"bert.train tiny_cpu {SETTINGS}"
    system = f"system --out {tmp_path}/results/systems/my system.json --division open"
    assert started.calls[-4:] == [
        f"compliance {words}"
        for words in (f"check {log} {log}", system, f"summary {log.parent}", f"report {log.parent}")
    ]
    said = [f"==> tiny_cpu, run {number} of 2: 1 process with 3 threads each" for number in (1, 2)]
    assert done.stdout.splitlines() == [*said, "==> check, summary and report"]


def test_runs_without_a_target_are_not_judged_by_rules(tmp_path: Path) -> None:
    log = write_experiment(tmp_path / "results/my system/bert", 0, (0.1,), status="aborted")
    started = start(tmp_path, "tiny_cpu", logs(log, "exit 130"))
    assert started.end().returncode == 130
    assert started.calls[-2:] == [f"compliance {word} {log.parent}" for word in ("summary", "report")]
    assert modules(started.calls) == ["bert.train check", "bert.train", *["compliance"] * 2]
    assert not list((tmp_path / "tmp").iterdir())


def test_a_described_system_is_not_described_again(tmp_path: Path, log: Path) -> None:
    description = tmp_path / "results/systems/my system.json"
    description.parent.mkdir()
    description.write_text("{}")
    started = start(tmp_path, "tiny_cpu", logs(log))
    assert started.end().returncode == 0
    assert not [call for call in started.calls if call.startswith("compliance system")]


@pytest.mark.parametrize(
    ("scripts", "status", "said", "programs"),
    [
        # A wrong input ends the series before anything is trained.
        ({"check": "echo error: wrong >&2; exit 2"}, 2, "error: wrong\n", "check"),
        # A run that misses its target does not.
        ({"train": "LOG exit 1"}, 1, "", "check train check train compliance"),
        ({"train": "LOG exit 3"}, 3, "", "check train check train compliance"),
        ({"train": "LOG kill -9 $$"}, 137, "warning: signal 9 has ended run 1: no further", "check train compliance"),
        ({"train": "exit 0"}, 1, "error: run 1 has left no log\nerror: run 2", "check train check train"),
        ({"train": "exit 2"}, 2, "", "check train check train"),
        ({"compliance": "[[ $3 != summary ]]"}, 1, "", "check train check train compliance"),
    ],
)
def test_a_failure_ends_what_depends_on_it(
    tmp_path: Path, log: Path, scripts: dict[str, str], status: int, said: str, programs: str
) -> None:
    scripts = {name: script.replace("LOG", logs(log, "")) for name, script in scripts.items()}
    started = start(tmp_path, "tiny_cpu 2", **{"train": logs(log)} | scripts)
    done = started.end()
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(said)
    assert not said or said.count("\n") <= done.stderr.count("\n") <= 2
    short = {"bert.train check": "check", "bert.train": "train"}
    found = [short.get(name, name) for name in modules(started.calls)]
    assert list(dict.fromkeys(found)) == list(dict.fromkeys(programs.split()))
    assert found.count("train") == programs.split().count("train")
    assert found.count("compliance") == 4 * programs.split().count("compliance")


def test_processes_are_started_by_torchrun_without_elastic_agents(tmp_path: Path, log: Path) -> None:
    shows = 'env | grep -c ^PET_ >&2; echo "$OMP_NUM_THREADS" >&2;'
    started = start(tmp_path, "tiny_cpu", shows + logs(log), NPROC="2", OMP_NUM_THREADS="5", PET_STANDALONE="1")
    assert started.end().stderr == "0\n5\n"
    check, train, *_ = started.calls
    assert check == f"bert.train tiny_cpu {SETTINGS} --dry-run"
    options = dict(re.findall(r"--([a-z-]+) (\S+)", train.partition(" -m ")[0]))
    port, folder = options.pop("master-port"), options.pop("log-dir")
    assert options == {"nproc-per-node": "2", "nnodes": "1", "node-rank": "0", "master-addr": "127.0.0.1"}
    assert 10_000 <= int(port) < 32_000
    assert Path(folder).parent == tmp_path / "tmp"
    assert train.endswith(f" -m bert.train tiny_cpu {SETTINGS}")


@pytest.mark.parametrize(
    "task",
    [
        # srun starts one launcher for each node, or a user starts one by hand in the shell of salloc.
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},
    ],
)
def test_a_slurm_task_with_nnodes_starts_the_processes_of_its_node(tmp_path: Path, task: dict[str, str]) -> None:
    started = start(tmp_path, "tiny_cpu", "exit 0", **task | TWO_NODES, NODE_RANK="1", NPROC="4")
    assert started.end().returncode == 0
    assert "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr h0" in started.calls[1]


def test_a_check_knows_all_ranks_and_that_a_run_follows(tmp_path: Path) -> None:
    shows = 'echo "$WORLD_SIZE $LOCAL_WORLD_SIZE ${MLPERF_BERT_CLAIM:+claim}" >&2'
    place = TWO_NODES | {"NODE_RANK": "1", "NPROC": "3"}
    started = start(tmp_path, "tiny_cpu", "exit 0", check=shows, **place)
    done = started.end()
    assert (done.returncode, done.stderr) == (0, "6 3 claim\n")  # without a log, because only node 0 has one
    assert "--nnodes 2 --node-rank 1 --master-addr h0 --master-port 29999" in started.calls[1]
    assert modules(started.calls) == ["bert.train check", "torch.distributed.run"]


def test_a_port_that_is_taken_ends_the_series_but_not_the_verdict(tmp_path: Path, log: Path) -> None:
    with socket.create_server(("", 0)) as other:
        taken = TWO_NODES | {"MASTER_PORT": str(other.getsockname()[1]), "NODE_RANK": "0"}
        started = start(tmp_path, "tiny_cpu", logs(log), **taken)
        done = started.end()
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: MASTER_PORT is {taken['MASTER_PORT']}, but this node cannot listen there")
    assert started.calls == []


@pytest.mark.parametrize(
    ("words", "variables", "status", "world_size"),
    [
        ("--prepare tiny_cpu", {"NPROC": "2", "NNODES": "3"}, 0, "6"),
        ("--prepare tiny_cpu", {"WORLD_SIZE": "64"}, 0, "64"),
        ("--prepare tiny_cpu -- --dry-run", {}, 10, "1"),
        ("--prepare tiny_cpu -- --print-config", {}, 10, None),
        ("tiny_cpu 1 -- --dry-run", {}, 0, "1"),
        ("tiny_cpu 1 -- --print-config", {}, 0, None),
    ],
)
def test_a_preparation_is_only_checked(
    tmp_path: Path, words: str, variables: dict[str, str], status: int, world_size: str | None
) -> None:
    settings = f"{words} {SETTINGS}" if " -- " in words else f"{words} -- {SETTINGS}"
    shows = 'echo "$WORLD_SIZE ${MLPERF_BERT_CLAIM-none}" >&2'
    started = Started(tmp_path, f"bert.launch {settings}", dry_run=shows, **{"NPROC": "1"} | variables)
    done = started.end()
    assert done.returncode == status, done.stderr
    assert done.stderr == (f"{world_size} none\n" if world_size else "")
    assert [call.split()[0] for call in started.calls] == (["cluster.dry_run"] if world_size else [])
    assert ("# config.recipe: tiny_cpu\n" in done.stdout) == ("print" in words)


def test_the_dry_run_of_a_gpu_recipe_takes_the_ranks_from_the_recipe_if_there_are_no_gpus_here(tmp_path: Path) -> None:
    shows = 'echo "${WORLD_SIZE-unset}" >&2'
    own = os.environ["PATH"].split(":")
    path = ":".join(folder for folder in own if not Path(folder, "nvidia-smi").exists())
    started = Started(tmp_path, "bert.launch h100_1x8 1 -- --dry-run", dry_run=shows, PATH=path)
    assert started.end().stderr == "unset\n"


NOTES = "trap 'echo got INT >&2; exit 5' INT; trap 'echo got TERM >&2; exit 6' TERM"
WAITS = f"{NOTES}; touch FILE; while :; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("scripts", "number", "status", "said"),
    [
        ({"check": WAITS}, signal.SIGINT, 130, "interrupted got TERM"),
        ({"train": WAITS}, signal.SIGINT, 130, "interrupted got TERM"),
        ({"train": WAITS}, signal.SIGTERM, 143, "interrupted got TERM"),
        ({"train": f"LOG {WAITS}"}, signal.SIGINT, 130, "stopping after this step; again to end now got INT"),
        ({"train": f"LOG {WAITS}"}, signal.SIGTERM, 143, "stopping after this step; again to end now got TERM"),
        ({"train": f"LOG {WAITS}"}, signal.SIGHUP, 129, "stopping after this step; again to end now got TERM"),
        ({"compliance": WAITS}, signal.SIGINT, 130, "interrupted got TERM"),
    ],
)
def test_a_signal_is_answered_at_once_and_passed_on(
    tmp_path: Path, log: Path, scripts: dict[str, str], number: int, status: int, said: str
) -> None:
    waiting = tmp_path / "waiting"
    scripts = {name: text.replace("LOG", logs(log, "")).replace("FILE", str(waiting)) for name, text in scripts.items()}
    started = start(tmp_path, "tiny_cpu 2", **{"train": logs(log)} | scripts)
    wait_for(waiting.exists, started.process)
    started.process.send_signal(number)
    done = started.end()
    assert done.returncode == status, done.stderr
    assert " ".join(line for line in done.stderr.splitlines() if line != "Terminated") == said  # bash says this itself
    called = modules(started.calls)
    assert called.count("bert.train") == (2 if "compliance" in scripts else "train" in scripts)
    assert ("compliance" in called) == (said.startswith("stopping") or "compliance" in scripts)
    assert not list((tmp_path / "tmp").iterdir())


def test_torchrun_is_killed_before_there_is_a_log_and_its_ranks_are_not(tmp_path: Path) -> None:
    rank = f"trap 'touch {tmp_path}/ended; exit' TERM; touch {tmp_path}/waiting; while :; do sleep 0.02; done"
    torchrun = f"trap 'echo got TERM >&2; exit' TERM; ({rank}) & wait"
    started = start(tmp_path, "tiny_cpu", torchrun, NPROC="2")
    wait_for((tmp_path / "waiting").exists, started.process)
    started.process.terminate()
    done = started.end()
    assert (done.returncode, done.stderr) == (143, "interrupted\n")
    assert (tmp_path / "ended").exists()


def test_output_that_nobody_reads_ends_nothing(tmp_path: Path, log: Path) -> None:
    go = tmp_path / "go"
    wait = f"while [[ ! -e {go} ]]; do sleep 0.02; done"
    started = start(tmp_path, "tiny_cpu", logs(log), check=wait, compliance="echo checked")
    assert started.process.stdout
    started.process.stdout.close()
    go.touch()
    assert started.process.wait(PATIENCE_S) == 0
    assert modules(started.calls).count("compliance") == 4


def test_the_third_signal_kills(tmp_path: Path, log: Path) -> None:
    stubborn = f"trap 'echo got INT >&2' INT; {logs(log, '')} touch {tmp_path}/waiting; while :; do sleep 0.02; done"
    started = start(tmp_path, "tiny_cpu", stubborn)
    wait_for((tmp_path / "waiting").exists, started.process)
    assert started.process.stderr
    lines: list[str] = []
    while len(lines) < 4:  # two lines from the launcher and two from the program
        if len(lines) % 2 == 0:
            started.process.send_signal(signal.SIGINT)
        lines.append(started.process.stderr.readline())
    started.process.send_signal(signal.SIGINT)
    assert started.end().returncode == 130
    assert sorted(lines) == ["ending now\n", "got INT\n", "got INT\n", "stopping after this step; again to end now\n"]


def test_a_killed_launcher_takes_its_program_along(tmp_path: Path) -> None:
    note = tmp_path / "ended"
    started = start(
        tmp_path, "tiny_cpu", f"trap 'touch {note}; exit' TERM; touch {tmp_path}/waiting; while :; do sleep 0.02; done"
    )
    wait_for((tmp_path / "waiting").exists, started.process)
    started.process.kill()
    started.process.wait()
    wait_for(note.exists)


def test_the_verdict_waits_for_processes_whose_launcher_was_killed(tmp_path: Path, log: Path) -> None:
    note = tmp_path / "ended"
    train = f"(sleep 0.5; touch {note}) & {logs(log, '')} kill -9 $$"
    started = start(tmp_path, "tiny_cpu", train, compliance=f"[[ -e {note} ]]")
    assert started.end().returncode == 137
    assert modules(started.calls).count("compliance") == 4


def test_ignored_signals_stay_ignored(tmp_path: Path, log: Path) -> None:
    """``nohup`` ignores SIGHUP."""
    train = f"touch {tmp_path}/waiting; while [[ ! -e {tmp_path}/go ]]; do sleep 0.02; done; {logs(log)}"
    started = start(tmp_path, "tiny_cpu", train, ignored="SIGHUP")
    wait_for((tmp_path / "waiting").exists, started.process)
    started.process.send_signal(signal.SIGHUP)
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


def test_a_signal_inside_of_generated_code_does_not_change_the_status() -> None:
    done = python("-c", STOPPED)
    assert (done.returncode, done.stderr) == (143, "interrupted\n")
