"""Ranks that die, stop, fail or stand still in the middle of a run: all others end in time, with one message."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bert.faults import FAULT_STATUS
from bert.optimizer import learning_rate
from bert.train import parse
from tests.conftest import REPOSITORY, SmallRun
from tests.distributed.test_ranks import launch, wait_for

SECONDS = 4.0
"""The setting ``training.fault_seconds`` of the runs below."""


class Ranks:
    """Processes of one run, started without a launcher that would end the others when one ends."""

    def __init__(self, arguments: list[str], count: int, folder: Path, program: tuple[str, ...] = ("-m", "bert.train")):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.master_port: int = probe.getsockname()[1]
        self.errors = [folder / f"stderr_{rank}" for rank in range(count)]
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(count):
            place = {
                "RANK": rank,
                "WORLD_SIZE": count,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": count,
                "OMP_NUM_THREADS": 1,
            }
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.master_port}
            environment = os.environ | {name: str(value) for name, value in place.items()}
            with self.errors[rank].open("wb") as errors:
                command = [sys.executable, *program, *arguments]
                self.processes.append(
                    subprocess.Popen(
                        command, stdout=subprocess.DEVNULL, stderr=errors, cwd=REPOSITORY, env=environment, text=True
                    )
                )

    def all_stderr(self) -> str:
        return "".join(path.read_text() for path in self.errors)

    def ends(self, ranks: list[int], seconds: float) -> list[int]:
        """Exit statuses of ``ranks``, which must end in this time."""
        deadline = time.monotonic() + seconds
        return [self.processes[rank].wait(max(0.01, deadline - time.monotonic())) for rank in ranks]

    def clean_up(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


@pytest.fixture
def start(small_run: SmallRun, tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def start(count: int = 3, program: tuple[str, ...] = ("-m", "bert.train"), **changes: object) -> Ranks:
        endless = {
            "training__max_samples": 10_000_000,
            "training__global_batch_size": 12,
            "evaluation__interval_samples": 1200,
        }
        arguments = small_run.arguments(tmp_path, training__fault_seconds=SECONDS, **endless | changes)
        ranks = Ranks(arguments, count, tmp_path, program)
        started.append(ranks)
        result = result_of(tmp_path)
        wait_for(lambda: result.exists() and result.read_text().count('"eval_stop"') > 1, ranks.processes[0])
        return ranks

    yield start
    for ranks in started:
        ranks.clean_up()


def result_of(folder: Path) -> Path:
    return folder / "tiny_cpu" / "bert" / "result_0.txt"


def last_record(result: Path) -> str:
    return [line for line in result.read_text().splitlines() if line.startswith(":::MLLOG")][-1]


def messages(ranks: Ranks) -> list[str]:
    return [line for line in ranks.all_stderr().splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_killed_rank_ends_all_at_once(start: Callable[..., Ranks], tmp_path: Path, lost: int) -> None:
    ranks = start()
    ranks.processes[lost].kill()
    others = [rank for rank in range(3) if rank != lost]
    assert ranks.ends(others, seconds=SECONDS) == [FAULT_STATUS] * 2
    [message] = messages(ranks)
    host = re.escape(socket.gethostname())
    assert re.fullmatch(rf"error: rank {lost} on host {host}: ended without a word, last in \w+ of step \d+", message)
    assert "Traceback" not in ranks.all_stderr()
    assert f"# ended by a fault: {message.removeprefix('error: ')}\n" in result_of(tmp_path).read_text()
    assert '"status": "aborted"' in last_record(result_of(tmp_path))


@pytest.mark.parametrize("count", [2, 4])
def test_a_stopped_rank_ends_all_in_time(start: Callable[..., Ranks], tmp_path: Path, count: int) -> None:
    ranks = start(count)
    ranks.processes[1].send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    others = [rank for rank in range(count) if rank != 1]
    assert ranks.ends(others, seconds=2 * SECONDS + 3) == [FAULT_STATUS] * (count - 1)
    assert time.monotonic() - begin > SECONDS / 2
    [message] = messages(ranks)
    assert message.startswith(f"error: rank 1 on host {socket.gethostname()}: not heard of for ")
    assert '"status": "aborted"' in last_record(result_of(tmp_path))
    ranks.processes[1].send_signal(signal.SIGCONT)  # and when it goes on, it ends as well
    assert ranks.ends([1], seconds=2 * SECONDS) == [FAULT_STATUS]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_rank_0_ends_all_in_time(start: Callable[..., Ranks], number: signal.Signals) -> None:
    ranks = start()
    ranks.processes[0].send_signal(number)
    assert ranks.ends([1, 2], seconds=2 * SECONDS + 3) == [FAULT_STATUS] * 2
    [message] = messages(ranks)
    assert message.startswith(f"error: rank 0 on host {socket.gethostname()}: ")
    assert "Traceback" not in ranks.all_stderr()


WORKER = ("-m", "tests.distributed.faulty_worker")


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_on_one_rank_ends_all_at_once(start: Callable[..., Ranks], tmp_path: Path, rank: int) -> None:
    ranks = start(program=(*WORKER, "raise", str(rank)))
    assert ranks.ends([0, 1, 2], seconds=60) == [FAULT_STATUS] * 3
    [message] = messages(ranks)
    assert message == f"error: rank {rank} on host {socket.gethostname()}: RuntimeError: broken on purpose"
    assert ranks.all_stderr().count("Traceback") == 1  # of what broke, and not of those whose connections broke with it
    assert "# ended by a fault: " in result_of(tmp_path).read_text()
    assert '"status": "aborted"' in last_record(result_of(tmp_path))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still_is_named(start: Callable[..., Ranks], tmp_path: Path, rank: int) -> None:
    ranks = start(program=(*WORKER, "hang", str(rank)))
    assert ranks.ends([0, 1, 2], seconds=60) == [FAULT_STATUS] * 3
    [message] = messages(ranks)
    assert re.match(
        rf"error: rank {rank} on host \S+: standing still for \d+ s in data_wait of step \d+, and the", message
    )
    assert '"status": "aborted"' in last_record(result_of(tmp_path))


def test_a_wait_of_all_ranks_blames_nobody_before_its_time(start: Callable[..., Ranks]) -> None:
    ranks = start()
    for process in ranks.processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2 * SECONDS)
    for process in ranks.processes:
        process.send_signal(signal.SIGCONT)
    time.sleep(SECONDS / 2)
    assert [process.poll() for process in ranks.processes] == [None] * 3, ranks.all_stderr()


def test_a_stranger_at_the_port_is_sent_away(start: Callable[..., Ranks]) -> None:
    ranks = start(2)
    with socket.create_connection(("127.0.0.1", hub_port(ranks))) as stranger:
        stranger.sendall(b'{"token": "guess", "rank": 1, "host": "elsewhere"}\n{"failed": "no", "status": 0}\n')
        stranger.settimeout(5)
        assert stranger.recv(100) == b""
    with socket.create_connection(("127.0.0.1", hub_port(ranks))) as stranger:
        stranger.settimeout(5)
        try:
            stranger.sendall(b"x" * 100_000)
            assert stranger.recv(100) == b""
        except ConnectionError:
            pass
    time.sleep(1)
    assert [process.poll() for process in ranks.processes] == [None, None]


def hub_port(ranks: Ranks) -> int:
    """The port on which rank 0 listens on all addresses, beside that of PyTorch's store."""
    inodes, pid = set(), ranks.processes[0].pid
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(link.readlink()))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].rpartition(":")
            own = f"socket:[{fields[9]}]" in inodes and int(port, 16) != ranks.master_port
            if fields[3] == "0A" and set(address) == {"0"} and own:
                return int(port, 16)
    raise AssertionError("it listens nowhere")


def test_under_torchrun_a_killed_rank_is_named_first(small_run: SmallRun, tmp_path: Path) -> None:
    process = launch(
        small_run.arguments(tmp_path, training__max_samples=10_000_000, evaluation__interval_samples=1600), ranks=2
    )
    result = result_of(tmp_path)
    wait_for(lambda: result.exists() and '"eval_stop"' in result.read_text(), process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {
        int(variable.removeprefix("RANK=")): int(pid)
        for pid in children
        for variable in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if variable.startswith("RANK=")
    }
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert output.count(f"error: rank 1 on host {socket.gethostname()}: ended without a word") == 1
    assert '"status": "aborted"' in last_record(result)


def test_a_slow_rank_is_named_while_the_run_goes_on(start: Callable[..., Ranks], tmp_path: Path) -> None:
    start(program=(*WORKER, "slow", "1"), log__interval_steps=10)
    metrics = result_of(tmp_path).with_name("metrics_0.jsonl")
    warnings = [line for line in metrics.read_text().splitlines() if '"event": "warning"' in line]
    [named] = [line for line in warnings if f"rank 1 on host {socket.gethostname()} is slow: " in line]
    times = re.search(r"([\d.]+) times the median", named)
    assert times
    assert float(times[1]) > 2
    assert f"warning at step {json.loads(named)['step']}: rank 1 on host" in result_of(tmp_path).read_text()


def test_steps_that_are_all_skipped_end_the_run_on_every_rank(
    small_run: SmallRun, start: Callable[..., Ranks], tmp_path: Path
) -> None:
    ranks = start(program=(*WORKER, "overflow", "1"), log__interval_steps=10, training__bad_intervals=3)
    ranks.ends([0, 1, 2], seconds=60)
    text = result_of(tmp_path).read_text()
    assert "ending the run: no step of the last 3 intervals had finite gradients" in text
    assert '"status": "aborted"' in last_record(result_of(tmp_path))
    metrics = result_of(tmp_path).with_name("metrics_0.jsonl").read_text().splitlines()
    steps = [record for line in metrics if (record := json.loads(line))["event"] == "step"]
    skipped = [record["skipped_steps"] for record in steps]
    assert skipped[-3:] == [10, 10, 10]
    assert sum(skipped) - 30 < 10
    optimizer = parse(small_run.arguments(tmp_path)).optimizer
    for record, so_far in zip(steps, itertools.accumulate(skipped), strict=True):
        last_taken = record["step"] - so_far - 1  # from 0
        assert record["learning_rate"] == pytest.approx(learning_rate(optimizer, last_taken), rel=1e-8)
    assert messages(ranks) == []
