"""The network between two hosts is cut during a run. The ranks on both sides end in time and name the other host.

Hosts are network namespaces with host names of their own.
"""

import re
import subprocess
import time
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


@pytest.mark.measured
@pytest.mark.parametrize("silent", [False, True], ids=["down", "silent"])
def test_both_sides_of_a_cut_link_end_and_blame_each_other(small_run: SmallRun, tmp_path: Path, silent: bool) -> None:
    """Shut down host 1's interface, or, with ``silent``, leave it up but disconnect it at the switch."""
    arguments = small_run.arguments(tmp_path, **ENDLESS, training__fault_seconds=SECONDS, log__interval_steps=10)
    with bridged_hosts(2) as names, ranks_on_hosts(names, ["bert.train", *arguments], a_host=2) as ranks:
        ranks.wait_for_text(result_of(tmp_path), '"eval_stop"')
        switch = names[0].removesuffix("h0")  # the bridge's namespace is named by the common prefix of the hosts' names
        cut = (switch, "link", "set", "p1", "nomaster") if silent else (names[1], "link", "set", "v0", "down")
        subprocess.run(["ip", "-n", *cut], check=True)
        begin = time.monotonic()
        assert ranks.ends() == [FAULT_STATUS] * 4
        assert time.monotonic() - begin > SECONDS / 2
    said = [rank.output for rank in ranks.processes]
    errors = [[line for line in text.splitlines() if line.startswith("error: ")] for text in said]
    assert errors[1] == errors[2] == []
    [here], [there] = errors[0], errors[3]
    assert re.fullmatch(
        r"error: rank 2 on host h1, rank 3 on host h1: not heard of for \d+ s, last in \w+ of step \d+: stopped, or cut off",
        here,
    )
    assert re.fullmatch(r"error: rank 0 on host h0: not heard of for \d+ s: stopped, or cut off", there)
    assert "Traceback" not in "".join(said)
    assert_aborted(tmp_path, here)
