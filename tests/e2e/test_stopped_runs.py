"""``run_and_time.sh`` is interrupted while it makes data, or while one process, two processes or two nodes train.

torchrun must be a real program here, and not a fork of a server, because the script finds ranks as torchrun's children.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_nodes import two_nodes
from tests.e2e.test_scripts import NEVER_REACHED, REACHED_AT_ONCE, SHORT, begin, status_of
from tests.programs import PATIENCE_S, wait_for, wait_for_text


@pytest.fixture
def training(
    launching_checkout: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[str]]:
    """Start two runs of ``request.param`` processes, and wait for the first step. Results go to ``tmp_path``."""
    settings = (*SHORT, NEVER_REACHED, "--log.results", str(tmp_path))
    shared = {"NPROC": str(request.param), "OMP_NUM_THREADS": "1", "RANKS_PYTHON": sys.executable}
    process = begin(launching_checkout / "run_and_time.sh", "tiny_cpu", "2", "--", *settings, cwd=tmp_path, **shared)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step "):
            break
    yield process
    if process.poll() is None:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("training", "number", "times", "status"),
    [(2, signal.SIGTERM, 1, 143), (1, signal.SIGINT, 1, 130), (2, signal.SIGINT, 2, 130), (1, signal.SIGHUP, 1, 129)],
    indirect=["training"],
)
def test_a_signal_ends_the_run_with_an_aborted_log_and_a_report(
    training: subprocess.Popen[str], number: int, times: int, status: int, tmp_path: Path
) -> None:
    assert training.stdout
    for _ in range(times):
        training.send_signal(number)
        said = next(line for line in training.stdout if not line.startswith(("step ", "eval ")))
    output, _ = training.communicate(timeout=PATIENCE_S)
    assert training.returncode == status, output
    assert "Traceback" not in output
    assert said == ("stopping after this step; again to end now\n" if times == 1 else "ending now\n")
    failed = next(line for line in output.splitlines() if line.startswith("FAIL"))
    assert f"{tmp_path}/tiny_cpu/bert/result_0.txt: official " in failed
    assert "ours fail: not a valid result (aborted)" in failed
    assert is_aborted(tmp_path)
    assert (tmp_path / "tiny_cpu/bert/report.html").exists()
    assert not processes_of(tmp_path)


@pytest.mark.parametrize("training", [1, 2], indirect=True)
def test_killing_the_launcher_ends_its_ranks_and_the_series(training: subprocess.Popen[str], tmp_path: Path) -> None:
    [launcher] = (each for each in psutil.Process(training.pid).children() if "bert.train" in each.cmdline())
    alone = not launcher.children()
    launcher.kill()
    output, _ = training.communicate(timeout=PATIENCE_S)
    assert training.returncode == 137, output
    assert "run 2 of 2" not in output
    if not alone:  # with a single process there is no launcher: the rank itself was killed
        assert is_aborted(tmp_path)
        assert f"launcher, process {launcher.pid}, is gone" in (tmp_path / "tiny_cpu/bert/result_0.txt").read_text()
    assert not processes_of(tmp_path)


@pytest.mark.parametrize("training", [2], indirect=True)
def test_killing_the_script_ends_its_ranks(training: subprocess.Popen[str], tmp_path: Path) -> None:
    training.kill()
    training.wait()
    wait_for(lambda: not processes_of(tmp_path))
    assert is_aborted(tmp_path)


def test_a_series_continues_when_its_output_is_closed(launching_checkout: Path, tmp_path: Path) -> None:
    settings = (*SHORT, REACHED_AT_ONCE, "--log.results", str(tmp_path))
    script = launching_checkout / "run_and_time.sh"
    process = begin(script, "tiny_cpu", "2", "--", *settings, cwd=tmp_path, NPROC="1", OMP_NUM_THREADS="1")
    assert process.stdout
    assert any(line.startswith("==> tiny_cpu, run 1 of 2") for line in process.stdout)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE_S) == 0
    names = {path.name for path in (tmp_path / "tiny_cpu/bert").iterdir()}
    assert {"result_0.txt", "result_1.txt", "report.html"} <= names


def processes_of(results: Path, program: str = "") -> list[str]:
    """Return the command lines of processes that contain the results folder and the program's name."""
    commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [command for command in commands if str(results) in command and program in command]


def is_aborted(results: Path) -> bool:
    """Return whether the only log has the status aborted."""
    (log,) = (results / "tiny_cpu/bert").glob("result_*.txt")
    return status_of(log) == "aborted"


@pytest.mark.parametrize("during", ["--dry-run", "bert.launch.agent"])
def test_ctrl_c_before_the_log_exists_prints_one_line(launching_checkout: Path, tmp_path: Path, during: str) -> None:
    settings = ("--", *SHORT, NEVER_REACHED, "--log.results", str(tmp_path))
    process = begin(launching_checkout / "run_and_time.sh", "tiny_cpu", "1", *settings, cwd=tmp_path, NPROC="2")
    wait_for(lambda: bool(processes_of(tmp_path, during)))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, output
    progress = ("==> ", "data/", "verified ")
    assert [line for line in output.splitlines() if not line.startswith(progress)] == ["interrupted"]
    assert not list(tmp_path.rglob("result_*"))


def test_a_signal_to_the_second_node_ends_the_run(launching_checkout: Path, tmp_path: Path) -> None:
    nodes = two_nodes(launching_checkout, NEVER_REACHED, "--log.results", str(tmp_path))
    wait_for_text(tmp_path / "tiny_cpu/bert/metrics_0.jsonl", '"event": "step"')
    nodes[1].terminate()
    outputs = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 143], outputs
    assert "ours fail: not a valid result (aborted)" in outputs[0]
    assert not re.findall("^error: .*", "".join(outputs), re.M)
