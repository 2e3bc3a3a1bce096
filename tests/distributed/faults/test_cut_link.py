"""The network between two hosts is cut in the middle of a run: both ends of it end in the stated time and name the other.

Hosts are network namespaces, with host names of their own, as in ``benchmarks/training/collectives.py``.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import BridgedHosts, why_not
from bert.parallel.watchdog.watchdog import FAULT_STATUS
from tests.conftest import SmallRun
from tests.distributed.ranks import free_port, last_record, result_of, wait_for
from tests.programs import PATIENCE_S, Program

SECONDS = 3.0
"""The setting ``training.fault_seconds``."""

MISSING = why_not()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[list[str], str]]:
    """The namespaces of two hosts, host 0 at 10.77.0.1, and of the switch between them."""
    network = BridgedHosts(2)
    with network as names:
        yield names, network.switch


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def start(hosts: list[str], arguments: list[str]) -> list[Program]:
    """Two ranks on each host."""
    ranks, port = [], free_port()
    for rank in range(4):
        host, local = divmod(rank, 2)
        place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2}
        place |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "v0"}
        there = [hosts[host], f"h{host}", "any", "bert.train"]
        ranks.append(Program("tests.distributed.workers.host_worker", [*there, *arguments], **place))
    return ranks


@pytest.mark.measured
@pytest.mark.parametrize("silent", [False, True], ids=["down", "silent"])
def test_both_ends_of_a_cut_link_end_in_time_and_name_the_other(
    small_run: SmallRun, tmp_path: Path, hosts: tuple[list[str], str], silent: bool
) -> None:
    """Host 1's interface goes down, or all seems well there but the switch hands nothing on."""
    names, switch = hosts
    changes = {"training__max_samples": 10_000_000, "evaluation__interval_samples": 1600, "log__interval_steps": 10}
    ranks = start(names, small_run.arguments(tmp_path, training__fault_seconds=SECONDS, **changes))
    result = result_of(tmp_path)
    try:
        wait_for(lambda: result.exists() and '"eval_stop"' in result.read_text(), ranks[0])
        ip("-n", switch, "link", "set", "p1", "nomaster") if silent else ip("-n", names[1], "link", "set", "v0", "down")
        begin = time.monotonic()
        statuses = [rank.wait(PATIENCE_S) for rank in ranks]
        assert time.monotonic() - begin > SECONDS / 2
    finally:
        for rank in ranks:
            rank.kill()
        ip("-n", names[1], "link", "set", "v0", "up")
        ip("-n", switch, "link", "set", "p1", "master", "br0")
    assert statuses == [FAULT_STATUS] * 4
    said = [rank.output for rank in ranks]
    errors = [[line for line in text.splitlines() if line.startswith("error: ")] for text in said]
    assert errors[1] == errors[3] == []
    [here], [there] = errors[0], errors[2]
    assert re.fullmatch(
        r"error: rank 2 on host h1, rank 3 on host h1: not heard of for \d+ s, last in \w+ of step \d+: stopped, or cut off",
        here,
    )
    assert re.fullmatch(r"error: rank 0 on host h0: not heard of for \d+ s: stopped, or cut off", there)
    assert "Traceback" not in "".join(said)
    assert f"# {here.replace('error: ', 'ended by a fault: ')}\n" in result.read_text()
    assert '"status": "aborted"' in last_record(result)
