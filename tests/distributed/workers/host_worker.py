"""A process on a host of its own.

python -m tests.distributed.workers.host_worker NAMESPACE HOST CORE MODULE ARGUMENT...

It enters a network namespace, takes a host name that nobody else sees, and runs a module as ``python -m`` would. CORE is the
only core that it may use, or "any". It measures time beside other tests, so it goes before them where it may. A probe times
computations, which name nothing slow, in one copy each: a third of its time is theirs otherwise. On a CORE of its own it
probes with a quarter of it while devices and links are measured, of which it says what is slow.
"""

import ctypes
import os
import runpy
import signal
import sys
from typing import Any

from benchmarks.hosts import enter, go_first

COMPETITORS = 3
PR_SET_PDEATHSIG = 1


def be_busy(parent: int) -> None:
    """Keep a core busy, as a process that the scheduler sees beside its parent, until that one ends it, or ends."""
    go_first()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:
        pass


def compete_while_measured() -> None:
    """Have the probe fork competitors as it begins to measure devices and links, and end them before all that follows."""
    from cluster.probe import command

    competitors: list[int] = []
    measure_rates, measure_contention = command.measure_rates, command.measure_contention

    def with_competitors(*arguments: Any) -> Any:
        parent = os.getpid()
        while len(competitors) < COMPETITORS:
            if pid := os.fork():
                competitors.append(pid)
            else:
                be_busy(parent)
                os._exit(0)
        return measure_rates(*arguments)

    def without(*arguments: Any) -> Any:
        for pid in competitors:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return measure_contention(*arguments)

    command.measure_rates, command.measure_contention = with_competitors, without


if __name__ == "__main__":
    go_first()
    enter(sys.argv[1], sys.argv[2])
    module, pinned = sys.argv[4], sys.argv[3] != "any"
    if pinned:
        os.sched_setaffinity(0, {int(sys.argv[3])})
    if module == "cluster":
        from cluster.probe import computations

        computations._COPIES = 1
        if pinned:
            compete_while_measured()
    sys.argv = [module, *sys.argv[5:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
