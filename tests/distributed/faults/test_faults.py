"""If a rank is killed, stopped, fails or hangs during a run, all other ranks end with one message that says why.

The message shows whether the run ended at once or after ``training.fault_seconds``. The duration would not show it,
because a busy machine may be arbitrarily slow.
"""

import itertools
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
import torch

from bert.optimizer import learning_rate
from bert.parallel.watchdog.watchdog import FAULT_STATUS
from bert.train import parse
from tests.conftest import SmallRun
from tests.distributed.faulty import faulty
from tests.distributed.ranks import Ranks, assert_aborted, records, result_of

SECONDS = 4.0
"""``training.fault_seconds`` for runs that must wait until it has passed."""
LONG = 60.0
"""``training.fault_seconds`` for runs that must end before it has passed."""


Start = Callable[..., Ranks]


@pytest.fixture
def start(small_run: SmallRun, tmp_path: Path) -> Iterator[Start]:
    """Start an endless run, and wait for its second evaluation unless ``faulty`` is to break it as ``breaks`` says."""
    with ExitStack() as stack:

        def start(count: int = 3, breaks: str | None = None, **changes: object) -> Ranks:
            endless = {
                "training__max_samples": 10_000_000,
                "training__global_batch_size": 12,
                "training__fault_seconds": LONG,
                "evaluation__interval_samples": 120,
            }
            arguments = small_run.arguments(tmp_path, **endless | changes)
            if breaks is not None:
                return stack.enter_context(Ranks([breaks, *arguments], count, faulty))
            ranks = stack.enter_context(Ranks(arguments, count))
            ranks.wait_for_text(result_of(tmp_path), '"eval_stop"', 2)
            return ranks

        yield start


@pytest.mark.measured
@pytest.mark.parametrize(
    ("rank", "number", "seconds", "why"),
    [
        (2, signal.SIGKILL, LONG, r"ended without a word, last in \w+ of step \d+"),
        (1, signal.SIGSTOP, SECONDS, r"not heard of for \d+ s, last in \w+ of step \d+: stopped, or cut off"),
        (0, signal.SIGKILL, LONG, "ended without a word"),
        (0, signal.SIGSTOP, SECONDS, r"not heard of for \d+ s: stopped, or cut off"),
    ],
)
def test_a_lost_rank_ends_all(start: Start, tmp_path: Path, rank: int, number: int, seconds: float, why: str) -> None:
    ranks = start(training__fault_seconds=seconds)
    begin = time.monotonic()
    ranks.processes[rank].send_signal(number)
    assert ranks.ends(*{0, 1, 2} - {rank}) == [FAULT_STATUS] * 2
    assert number == signal.SIGKILL or time.monotonic() - begin > SECONDS / 2
    [message] = ranks.errors
    assert re.fullmatch(rf"error: rank {rank} on host {re.escape(socket.gethostname())}: {why}", message)
    assert "Traceback" not in ranks.output
    if rank != 0:  # rank 0 writes the log
        assert_aborted(tmp_path, message)
    if number == signal.SIGSTOP:
        ranks.processes[rank].send_signal(signal.SIGCONT)  # when it continues, the stopped rank ends too
        assert ranks.ends(rank) == [FAULT_STATUS]


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_on_one_rank_ends_all_at_once(start: Start, tmp_path: Path, rank: int) -> None:
    ranks = start(breaks=f"raise:{rank}")
    assert ranks.ends() == [FAULT_STATUS] * 3
    [message] = ranks.errors
    assert message.startswith(f"error: rank {rank} on host {socket.gethostname()}: RuntimeError: broken on purpose")
    assert len(message) < 2000
    assert ranks.output.count("Traceback") == 1  # only of the failed rank, not of the other ranks
    assert "# ended by a fault: " in result_of(tmp_path).read_text()
    assert_aborted(tmp_path)


STAGES = {"parallel__pipeline": 2, "training__gradient_accumulation_steps": 2, "training__global_batch_size": 16}


@pytest.mark.measured
@pytest.mark.parametrize(
    ("breaks", "count", "changes", "place", "phase"),
    [
        ("hang:0", 3, {}, "rank 0 on host {}", "data_wait of step {}, and the"),
        ("hang:1", 3, {}, "rank 1 on host {}", "data_wait of step {}, and the"),
        (
            *("compute:1", 4, STAGES, r"rank 1 on host {} \(data 0, pipeline 1, tensor 0\)"),
            "forward_backward of step {}, and the others wait for it in reduce of",
        ),
    ],
)
def test_a_rank_that_stands_still_is_named_and_not_those_that_wait(
    start: Start, tmp_path: Path, breaks: str, count: int, changes: dict[str, object], place: str, phase: str
) -> None:
    ranks = start(count, breaks, training__fault_seconds=SECONDS, **changes)
    assert ranks.ends() == [FAULT_STATUS] * count
    [message] = ranks.errors
    named, during = place.format(re.escape(socket.gethostname())), phase.format(r"\d+")
    assert re.match(rf"error: {named}: standing still for \d+ s in {during}", message), message
    assert_aborted(tmp_path)


@pytest.mark.measured
def test_a_wait_of_all_ranks_blames_nobody_before_its_time(start: Start) -> None:
    ranks = start(training__fault_seconds=SECONDS)
    for process in ranks.processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2 * SECONDS)
    for process in ranks.processes:
        process.send_signal(signal.SIGCONT)
    time.sleep(SECONDS / 2)
    assert [process.poll() for process in ranks.processes] == [None] * 3, ranks.output


def test_strangers_at_the_ports_do_not_end_a_run(start: Start, tmp_path: Path) -> None:
    """Attack the ports of the watchdog and of PyTorch's store by a flood, garbage, slow and half-open connections.

    As all ranks are on one host, the watchdog must listen on local addresses only. PyTorch's store listens on all.
    """
    ranks, result = start(2, breaks="show:0"), result_of(tmp_path)
    ranks.wait_for_text(result, '"eval_stop"')
    told = re.search(r"the watchdog's port: (\d+)", ranks.output)
    assert told
    connections = [each for rank in ranks.processes for each in psutil.Process(rank.pid).net_connections("tcp")]
    listening = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN]
    assert {address.port for address in listening if address.ip not in ("127.0.0.1", "::1")} <= {ranks.master_port}
    ports = {ranks.master_port, int(told[1])}
    evaluations = result.read_text().count('"eval_stop"')
    with closing(Strangers(ports)) as strangers:
        time.sleep(2.5)  # the minimum duration of the attack
        ranks.wait_for(lambda: strangers.connections > 100 * len(ports))
    ranks.wait_for_text(result, '"eval_stop"', evaluations + 2)
    assert [process.poll() for process in ranks.processes] == [None, None], ranks.output
    assert ranks.errors == []


class Strangers:
    """Threads that attack the given local ports until they are closed."""

    def __init__(self, ports: set[int]) -> None:
        self.connections = 0
        self._over = threading.Event()
        kinds = (self._flood, self._garbage, self._slow, self._half_open)
        self._pool = ThreadPoolExecutor(len(kinds) * len(ports))
        for kind, port in itertools.product(kinds, ports):
            self._pool.submit(self._attack, kind, port)

    def close(self) -> None:
        self._over.set()
        self._pool.shutdown()

    def _attack(self, kind: Callable[[int], None], port: int) -> None:
        while not self._over.is_set():
            with suppress(OSError):  # the connection may be closed or refused
                kind(port)

    def _connect(self, port: int) -> socket.socket:
        self.connections += 1
        return socket.create_connection(("127.0.0.1", port), timeout=1)

    def _flood(self, port: int) -> None:
        self._connect(port).close()

    def _garbage(self, port: int) -> None:
        for data in (b"[" * 1100 + b"\n", os.urandom(1000), b"x" * 100_000, b"guess 1 elsewhere\n{}\n", b"\0" * 64):
            with self._connect(port) as connection:
                connection.sendall(data)

    def _slow(self, port: int) -> None:
        with self._connect(port) as connection:
            while not self._over.wait(0.2):
                connection.sendall(b"x")

    def _half_open(self, port: int) -> None:
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(self._connect(port))
            self._over.wait(2)


def test_a_slow_rank_is_named_while_the_run_goes_on(start: Start, tmp_path: Path) -> None:
    ranks = start(breaks="slow:1", log__interval_steps=5)
    slow = f"rank 1 on host {socket.gethostname()} is slow: "
    ranks.wait_for_text(result_of(tmp_path).with_name("metrics_0.jsonl"), slow)
    ranks.wait_for_text(result_of(tmp_path), "warning at step")
    named = next(record for record in records(tmp_path, "warning") if slow in record["text"])
    times = re.search(r"([\d.]+) times the median", named["text"])
    assert times
    assert float(times[1]) > 2
    assert f"warning at step {named['step']}: rank 1 on host" in result_of(tmp_path).read_text()


def test_steps_that_are_all_skipped_end_the_run_on_all_ranks(small_run: SmallRun, start: Start, tmp_path: Path) -> None:
    ranks = start(breaks="overflow:1", log__interval_steps=10, training__bad_intervals=3)
    assert ranks.ends() == [1, 1, 1], ranks.output
    text = result_of(tmp_path).read_text()
    assert "ending the run: no step of the last 3 intervals had finite gradients" in text
    assert_aborted(tmp_path)
    steps = records(tmp_path, "step")
    skipped = [record["skipped_steps"] for record in steps]
    assert skipped[-3:] == [10, 10, 10]
    assert sum(skipped) - 30 < 10
    optimizer = parse(small_run.arguments(tmp_path)).optimizer
    for record, so_far in zip(steps, itertools.accumulate(skipped), strict=True):
        taken = record["step"] - so_far - 1  # the last step that was taken, counted from 0
        assert record["learning_rate"] == pytest.approx(learning_rate(optimizer, torch.tensor(taken)).item(), rel=1e-8)
    assert ranks.errors == []
