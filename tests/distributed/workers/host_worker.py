"""A process on a host of its own.

python -m tests.distributed.workers.host_worker NAMESPACE HOST CORE MODULE ARGUMENT...

It enters a network namespace, takes a host name that nobody else sees, and runs a module as ``python -m`` would. CORE is the
only core that it may use, or "any". It measures time beside other tests, so it goes before them where it may. A probe times
computations, which name nothing slow, in one copy each: a third of its time is theirs otherwise.
"""

import os
import runpy
import signal
import sys

from benchmarks.hosts import enter, go_first

if __name__ == "__main__":
    go_first()
    if sys.argv[1] == "busy":
        os.sched_setaffinity(0, {int(sys.argv[2])})
        signal.alarm(600)  # where the tests were killed nobody else ends it
        while True:
            pass
    enter(sys.argv[1], sys.argv[2])
    if sys.argv[3] != "any":
        os.sched_setaffinity(0, {int(sys.argv[3])})
    module = sys.argv[4]
    if module == "cluster":
        from cluster.probe import computations

        computations._COPIES = 1
    sys.argv = [module, *sys.argv[5:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
