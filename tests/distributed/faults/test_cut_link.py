"""The network between two hosts is cut during a run. The ranks on both sides end in time and name the other host.

Hosts are network namespaces with host names of their own.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import bridged_hosts, why_not
from bert.parallel.watchdog.watchdog import FAULT_STATUS
from tests.conftest import SmallRun
from tests.distributed.on_host import ranks_on_hosts
from tests.distributed.ranks import ENDLESS, assert_aborted, result_of

SECONDS = 3.0
"""The setting ``training.fault_seconds``."""

MISSING = why_not()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[list[str], str]]:
    """Create two hosts as network namespaces. Yields their names and the name of the switch between them."""
    with bridged_hosts(2) as names:
        yield names, names[0].removesuffix("h0")  # the bridge's namespace has the common part of the hosts' names


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.mark.measured
@pytest.mark.parametrize("silent", [False, True], ids=["down", "silent"])
def test_both_ends_of_a_cut_link_end_in_time_and_name_the_other(
    small_run: SmallRun, tmp_path: Path, hosts: tuple[list[str], str], silent: bool
) -> None:
    """Shut down host 1's interface, or, with ``silent``, leave it up but disconnect it at the switch."""
    names, switch = hosts
    arguments = small_run.arguments(tmp_path, **ENDLESS, training__fault_seconds=SECONDS, log__interval_steps=10)
    ranks = ranks_on_hosts(names, ["bert.train", *arguments], a_host=2)
    try:
        ranks.wait_for_text(result_of(tmp_path), '"eval_stop"')
        ip("-n", switch, "link", "set", "p1", "nomaster") if silent else ip("-n", names[1], "link", "set", "v0", "down")
        begin = time.monotonic()
        statuses = ranks.ends()
        assert time.monotonic() - begin > SECONDS / 2
    finally:
        for rank in ranks.processes:
            rank.kill()
        ip("-n", names[1], "link", "set", "v0", "up")
        ip("-n", switch, "link", "set", "p1", "master", "br0")
    assert statuses == [FAULT_STATUS] * 4
    said = [rank.output for rank in ranks.processes]
    errors = [[line for line in text.splitlines() if line.startswith("error: ")] for text in said]
    assert errors[1] == errors[3] == []
    [here], [there] = errors[0], errors[2]
    assert re.fullmatch(
        r"error: rank 2 on host h1, rank 3 on host h1: not heard of for \d+ s, last in \w+ of step \d+: stopped, or cut off",
        here,
    )
    assert re.fullmatch(r"error: rank 0 on host h0: not heard of for \d+ s: stopped, or cut off", there)
    assert "Traceback" not in "".join(said)
    assert_aborted(tmp_path, here)
