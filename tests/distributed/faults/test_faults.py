"""If a rank is killed, stopped, fails or hangs during a run, all other ranks end with one message that says why.

The message shows whether the run ended at once or after ``training.fault_seconds``. The duration would not show it,
because a busy machine may be arbitrarily slow.
"""

import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bert.parallel.watchdog.watchdog import FAULT_STATUS
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
    """Yield a function that starts an endless run. Unless ``breaks`` is given, it waits for the second evaluation."""
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
    ],
)
def test_other_ranks_end_and_blame_a_killed_or_stopped_rank(
    start: Start, tmp_path: Path, rank: int, number: int, seconds: float, why: str
) -> None:
    ranks = start(training__fault_seconds=seconds)
    begin = time.monotonic()
    ranks.processes[rank].send_signal(number)
    assert ranks.ends(*{0, 1, 2} - {rank}) == [FAULT_STATUS] * 2
    assert number == signal.SIGKILL or time.monotonic() - begin > SECONDS / 2
    [message] = ranks.errors
    assert re.fullmatch(rf"error: rank {rank} on host {re.escape(socket.gethostname())}: {why}", message)
    assert "Traceback" not in ranks.output
    assert_aborted(tmp_path, message)
    if number == signal.SIGSTOP:
        ranks.processes[rank].send_signal(signal.SIGCONT)  # when it continues, the stopped rank ends too
        assert ranks.ends(rank) == [FAULT_STATUS]


STAGES = {"parallel__pipeline": 2, "training__gradient_accumulation_steps": 2, "training__global_batch_size": 16}


@pytest.mark.measured
@pytest.mark.parametrize(
    ("breaks", "count", "changes", "place", "phase"),
    [
        ("hang:0", 3, {}, "rank 0 on host {}", "data_wait of step {}, and the"),
        (
            *("compute:1", 4, STAGES, r"rank 1 on host {} \(data 0, pipeline 1, tensor 0\)"),
            "forward_backward of step {}, and the others wait for it in reduce of",
        ),
    ],
)
def test_a_hanging_rank_is_blamed_rather_than_ranks_that_wait_for_it(
    start: Start, tmp_path: Path, breaks: str, count: int, changes: dict[str, object], place: str, phase: str
) -> None:
    ranks = start(count, breaks, training__fault_seconds=SECONDS, **changes)
    assert ranks.ends() == [FAULT_STATUS] * count
    [message] = ranks.errors
    named, during = place.format(re.escape(socket.gethostname())), phase.format(r"\d+")
    assert re.match(rf"error: {named}: standing still for \d+ s in {during}", message), message
    assert_aborted(tmp_path)


@pytest.mark.measured
def test_a_run_continues_after_all_ranks_were_suspended(start: Start) -> None:
    ranks = start(training__fault_seconds=SECONDS)
    for process in ranks.processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2 * SECONDS)
    for process in ranks.processes:
        process.send_signal(signal.SIGCONT)
    time.sleep(SECONDS / 2)
    assert [process.poll() for process in ranks.processes] == [None] * 3, ranks.output


def test_a_slow_rank_causes_a_warning_in_the_metrics_and_the_log(start: Start, tmp_path: Path) -> None:
    ranks = start(breaks="slow:1", log__interval_steps=5)
    slow = f"rank 1 on host {socket.gethostname()} is slow: "
    ranks.wait_for_text(result_of(tmp_path).with_name("metrics_0.jsonl"), slow)
    ranks.wait_for_text(result_of(tmp_path), "warning at step")
    named = next(record for record in records(tmp_path, "warning") if slow in record["text"])
    times = re.search(r"([\d.]+) times the median", named["text"])
    assert times
    assert float(times[1]) > 2
    assert f"warning at step {named['step']}: rank 1 on host" in result_of(tmp_path).read_text()
