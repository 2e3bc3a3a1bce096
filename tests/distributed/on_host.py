"""Ranks on separate hosts: network namespaces with host names of their own (``benchmarks.hosts``).

The processes measure time while other tests run, so they raise their priority if they have the permission.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.hosts import enter, raise_priority
from tests.distributed.ranks import Ranks, free_port, program
from tests.programs import Program

COMPETITORS = 3


def ranks_on_hosts(
    namespaces: Sequence[str],
    command: Sequence[object],
    a_host: int = 1,
    pinned: int | None = None,
) -> Ranks:
    """Start the ranks of a run, ``a_host`` ranks on each host.

    The rank ``pinned`` may use only one core. In a probe, it shares this core with three competing processes.
    """
    port, count, ranks = free_port(), len(namespaces) * a_host, []
    for rank in range(count):
        host, local = divmod(rank, a_host)
        place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": a_host}
        place |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "v0", "OMP_NUM_THREADS": 1}
        core = min(os.sched_getaffinity(0)) if rank == pinned else "any"
        ranks.append(Program(*program(on_host, [namespaces[host], f"h{host}", core, *command]), **place))
    return Ranks.of(ranks, port)


def on_host(namespace: str, host: str, core: str, module: str, *arguments: str) -> None:
    """Enter a host's namespaces and run a module as ``python -m`` would, pinned to ``core`` unless that is "any"."""
    raise_priority()
    enter(namespace, host)
    if core != "any":
        os.sched_setaffinity(0, {int(core)})
    if module == "cluster":
        from cluster.probe import computations

        computations._COPIES = 1  # saves a third of the probe's time; no test needs more copies
        if core != "any":
            compete_while_measured()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def compete_while_measured() -> None:
    """Run competing processes during the probe's ``measure_rates``, and kill them before ``measure_contention``."""
    from cluster.probe import command

    busy = [sys.executable, "-c", f"import os\nwhile os.getppid() == {os.getpid()}:\n    pass"]
    competitors: list[subprocess.Popen[bytes]] = []
    measure_rates, measure_contention = command.measure_rates, command.measure_contention

    def with_competitors(*arguments: Any) -> Any:
        while len(competitors) < COMPETITORS:
            competitors.append(subprocess.Popen(busy))
        return measure_rates(*arguments)

    def without(*arguments: Any) -> Any:
        for competitor in competitors:
            competitor.kill()
            competitor.wait()
        return measure_contention(*arguments)

    command.measure_rates, command.measure_contention = with_competitors, without
