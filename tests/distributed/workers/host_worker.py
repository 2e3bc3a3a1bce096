"""A process on a host of its own.

python -m tests.distributed.workers.host_worker NAMESPACE HOST CORE MODULE ARGUMENT...

It enters a network namespace, takes a host name that nobody else sees, and runs a module as ``python -m`` would. CORE is the
only core that it may use, or "any". It measures time beside other tests, so it goes before them where it may.
"""

import contextlib
import ctypes
import os
import runpy
import socket
import sys
from pathlib import Path

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


def go_first() -> None:
    """Have the scheduler prefer this process, in a session of its own, since it prefers whole sessions."""
    with contextlib.suppress(OSError):
        os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-19")
        os.nice(-19)


def enter(namespace: str, host: str) -> None:
    """Be on a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as file:
        entered = libc.setns(file.fileno(), CLONE_NEWNET) == 0
    if not entered or libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "cannot enter the host")
    socket.sethostname(host)


if __name__ == "__main__":
    go_first()
    if sys.argv[1] == "busy":
        os.sched_setaffinity(0, {int(sys.argv[2])})
        while True:
            pass
    enter(sys.argv[1], sys.argv[2])
    if sys.argv[3] != "any":
        os.sched_setaffinity(0, {int(sys.argv[3])})
    module = sys.argv[4]
    sys.argv = [module, *sys.argv[5:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
