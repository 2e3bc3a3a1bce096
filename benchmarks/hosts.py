"""Ranks on hosts that are network namespaces of this machine, forked from one process that has imported what they run."""

import contextlib
import ctypes
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
PORT = 29600


def enter(namespace: str, host: str) -> None:
    """Be on a host, under a name that nobody else sees."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    with Path(f"/run/netns/{namespace}").open() as file:
        entered = libc.setns(file.fileno(), CLONE_NEWNET) == 0
    if not entered or libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "cannot enter the host")
    socket.sethostname(host)


def go_first() -> None:
    """Have the scheduler prefer this process and those that it forks, in a session of their own: it prefers whole ones."""
    with contextlib.suppress(OSError):
        os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-19")
        os.nice(-19)


def run_ranks(
    namespaces: Sequence[str], local_size: int, program: Callable[[], int], output: Path, limit_s: float
) -> list[int | None]:
    """Run a program on ``local_size`` ranks of every host; returns their exit statuses, None of those that did not end."""
    fork = multiprocessing.get_context("fork")
    places = [(host, local) for host in range(len(namespaces)) for local in range(local_size)]
    ranks = [
        fork.Process(target=_rank, args=(namespaces, host, local, local_size, program, output), daemon=True)
        for host, local in places
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(limit_s)
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def _rank(
    namespaces: Sequence[str], host: int, local: int, local_size: int, program: Callable[[], int], output: Path
) -> None:
    number = host * local_size + local
    with (output / f"rank_{number}.txt").open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    enter(namespaces[host], f"h{host}")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})  # as launchers bind ranks, so that none wanders
    place = {
        "RANK": number,
        "WORLD_SIZE": len(namespaces) * local_size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": "10.77.0.1",  # of the first host, as the network of these benchmarks has it
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "v0",
    }
    os.environ |= {name: str(value) for name, value in place.items()}
    status = 1
    with contextlib.suppress(SystemExit):
        status = program()
    sys.stdout.flush()
    os._exit(status)  # a fork must not run what its parent has registered for its own end
