"""``launch/elastic.sh`` continues a run when a host is lost and when it comes back. Hosts are simulated by host names."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest

from console.text import counted
from tests.conftest import REPOSITORY, SmallRun
from tests.distributed.elastic import HOSTS
from tests.distributed.ranks import Ranks, compare_steps, free_port
from tests.programs import PATIENCE_S, wait_for, write_forked_python, write_script

STEPS, EVERY = 40, 5
PYTHON = f"""#!/bin/bash
[[ "$1 $2" != "-m bert.launch.elastic" ]] || exec -a "$0" {sys.executable} "$@"
[[ "$1 $2" != "-m bert.launch.agent" ]] ||
  set -- -m tests.distributed.worker tests.distributed.elastic:agent "$HOST" "$FOLDER" "${{@:3}}"
exec "${{0%/*}}/forked/python" "$@"
"""
"""The checkout's ``python``, a script that runs ``elastic.agent`` in place of torchrun."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout that ``launch/elastic.sh`` accepts as installed."""
    root = tmp_path / "checkout"
    programs, installed = root / ".venv/bin", root / ".venv/installed"
    for folder in (programs / "forked", installed):
        folder.mkdir(parents=True)
    for name in ("tests", "bert", "cluster", "compliance", "console", "dataloading", "kernels"):
        (root / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "launch", root / "launch")
    for name in ("constraints.txt", "hashes.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, root)
    for name in ("lib", "pyvenv.cfg"):
        (root / ".venv" / name).symlink_to(Path(sys.prefix, name))
    write_script(programs / "python", PYTHON)
    write_forked_python(programs / "forked", "bert")
    mark = "source launch/venv.sh; for part in run dali; do venv_pins >.venv/installed/$part; done"
    subprocess.run(["bash", "-c", mark], cwd=root, check=True)
    return root


class Elastic:
    """``launch/elastic.sh`` on several hosts, and its rendezvous server. All are killed at the end of the block."""

    def __init__(self, checkout: Path, folder: Path, arguments: list[str]) -> None:
        recipe, *settings = arguments
        self.port, self.folder = free_port(), folder
        self._script = checkout / "launch/elastic.sh"
        self._started: list[subprocess.Popen[str]] = []
        self._arguments = ["3:4", f"127.0.0.1:{self.port}", recipe, "--", *settings]
        self._start("meet", "--meet", str(self.port))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for started in self._started:
            started.kill()
            started.wait(PATIENCE_S)

    def lose_host(self) -> list[int]:
        """Start all hosts, kill host 0 during the run, start it again later, and return the exit statuses."""
        hosts = [self._add_host(number) for number in range(HOSTS)]
        wait_for((self.folder / "whole").exists, hosts[1])
        (self.folder / "whole-is-done").touch()
        (self.folder / "fewer").unlink(missing_ok=True)  # left by an earlier attempt that some hosts joined late
        self.kill_host(0)
        wait_for((self.folder / "fewer").exists, hosts[1])
        (self.folder / "fewer-is-done").touch()
        hosts.append(self._add_host(0))
        return [each.wait(PATIENCE_S) for each in hosts]

    def _add_host(self, number: int) -> subprocess.Popen[str]:
        """Start the script on a host. Ranks are numbered in the order of their hosts' addresses."""
        return self._start(f"h{number}", *self._arguments, ADDRESS=f"127.0.0.{number + 1}")

    def kill_host(self, number: int) -> None:
        """Kill a host's agent and ranks without warning, as a power failure does."""
        agent = int((self.folder / f"h{number}.agent").read_text())
        ranks = [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        for process in (agent, *ranks):
            os.kill(process, signal.SIGKILL)

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.output")))

    def _start(self, name: str, *arguments: str, **changes: str) -> subprocess.Popen[str]:
        variables = {"HOST": name, "FOLDER": str(self.folder), "NPROC": "1", "OMP_NUM_THREADS": "1", "LAST_CALL": "5"}
        variables |= {"GLOO_SOCKET_IFNAME": "lo"} | changes
        with (self.folder / f"{name}.output").open("a") as output:
            started = subprocess.Popen(
                [self._script, *arguments], env=os.environ | variables, stdout=output, stderr=output, text=True
            )
        self._started.append(started)
        return started


def curve(results: Path) -> list[dict[str, float]]:
    """Return the record of each step from the logs of all attempts. If a step has several records, return the last one."""
    files = sorted((results / "tiny_cpu" / "bert").glob("metrics_*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return list({line["step"]: line for line in lines if line["event"] == "step"}.values())


def test_losing_and_regaining_a_host_does_not_change_losses(
    small_run: SmallRun, checkout: Path, tmp_path: Path
) -> None:
    settings = {"training__max_samples": 16 * STEPS, "evaluation__interval_samples": 16 * 10}
    with Ranks(small_run.arguments(tmp_path / "unbroken", **settings), 1) as unbroken:
        settings |= {"checkpoint__folder": tmp_path / "checkpoints", "checkpoint__every_steps": EVERY}
        settings |= {"training__fault_seconds": 600, "log__division": "open"}
        with Elastic(checkout, tmp_path, small_run.arguments(tmp_path, **settings)) as elastic:
            statuses = elastic.lose_host()
        assert unbroken.ends() == [1], unbroken.output
    assert statuses == [-signal.SIGKILL, *[0] * HOSTS], elastic.output
    unbroken_steps = curve(tmp_path / "unbroken")
    assert len(unbroken_steps) == STEPS
    # Losses agree although three ranks divide a batch of 16 unevenly, into 6, 5 and 5 sequences.
    compare_steps(unbroken_steps, curve(tmp_path))
    check_logs(tmp_path)


def turning_points(results: Path) -> tuple[str, str, str]:
    """Return the log before a host is lost, the last log without it, and the first log with it again.

    On a busy machine, a host may join too late for an attempt. It then causes another attempt, which has its own log.
    """
    files = sorted((results / "tiny_cpu" / "bert").glob("result_*.txt"), key=lambda path: int(path.stem.split("_")[1]))
    logs = [path.read_text() for path in files]
    lost = next(number for number, text in enumerate(logs) if "\n# lost: " in text)
    gained = next(number for number, text in enumerate(logs) if number > lost and "\n# gained: " in text)
    return logs[lost - 1], logs[gained - 1], logs[gained]


def check_logs(results: Path) -> None:
    """Check the logs of attempts on all hosts, on all hosts but one, and on all hosts again."""
    whole, fewer, again = turning_points(results)
    host = "h0" if os.geteuid() == 0 else socket.gethostname()
    others = HOSTS if os.geteuid() == 0 else 1
    step = "a step of each with at most"
    four = f"4 ranks on {counted(others, 'host')}, {step} 1 x 4 sequences"
    three = f"3 ranks on {counted(min(3, others), 'host')}, {step} 2 x 3 sequences"
    assert "run_stop" not in whole  # rank 0 was killed
    resumed = re.search(r"# resumed from: .*/step_(\d{8})\n", again)
    assert resumed
    assert int(resumed[1]) == int(re.findall(r"^step +(\d+) ", fewer, re.M)[-1])  # a requested stop writes a checkpoint
    for text, lines in (
        (fewer, (f"lost: host {host} (1 rank)", f"shares of the global batch: {three}; before {four}")),
        (again, (f"gained: host {host} (1 rank)", f"shares of the global batch: {four}; before {three}")),
    ):
        for line in lines:
            assert f"# {line}\n" in text
