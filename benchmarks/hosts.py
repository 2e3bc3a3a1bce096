"""Network namespaces that simulate hosts on this machine, and ranks that are forked to run on them."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
# The port is below the range of ephemeral ports, so that no other connection gets it.
PORT = 29600


@contextlib.contextmanager
def bridged_hosts(hosts: int, rate: str | None = None, sites: int = 1) -> Iterator[list[str]]:
    """Make namespaces that act as hosts on one bridge. ``rate``, as for ``tc tbf``, limits what each host sends.

    With several ``sites``, each has a bridge for an equal number of hosts, and an uplink to a common bridge. Then ``rate``
    limits what each site sends, and not what each host sends.
    """
    # Namespaces of a killed process remain, and process ids are reused, so the name has random digits.
    switch = f"reduce{os.getpid()}{os.urandom(3).hex()}"
    names = [f"{switch}h{host}" for host in range(hosts)]
    try:
        # The bridge has its own namespace, so that the machine's network is not changed.
        ip("netns", "add", switch)
        for bridge in [f"br{site}" for site in range(sites)] + ["between"] * (sites > 1):
            ip("-n", switch, "link", "add", bridge, "type", "bridge")
            ip("-n", switch, "link", "set", bridge, "up")
        for host, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            # A veth pair acts as a cable with one end in the host and the other end at the bridge.
            ip("link", "add", "v0", "netns", name, "type", "veth", "peer", "name", f"p{host}", "netns", switch)
            ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "v0")
            ip("-n", name, "link", "set", "v0", "up")
            ip("-n", switch, "link", "set", f"p{host}", "master", f"br{host * sites // hosts}", "up")
        for site in range(sites if sites > 1 else 0):
            ip("-n", switch, "link", "add", f"u{site}", "type", "veth", "peer", "name", f"b{site}")
            ip("-n", switch, "link", "set", f"u{site}", "master", f"br{site}", "up")
            ip("-n", switch, "link", "set", f"b{site}", "master", "between", "up")
        if rate:
            # Data up to the burst passes at full speed. The latency limits the length of the queue.
            shaped = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            senders = [(switch, f"u{site}") for site in range(sites)] if sites > 1 else [(name, "v0") for name in names]
            for namespace, device in senders:
                ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, *shaped)
        yield names
    finally:
        for name in (*names, switch):
            # Deleting a namespace also deletes its devices. A namespace that was never made is not an error here.
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def why_not() -> str | None:
    """Return why namespaces cannot be made here, or None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it with sudo"
    absent = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if absent:
        return f"{absent[0]} is not installed: install iproute2"
    name = f"probe{os.getpid()}{os.urandom(3).hex()}"  # random digits avoid the names that killed processes left
    # Only trying is reliable, because a container may run as root without the right to make namespaces.
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "the kernel refuses network namespaces here"
    ip("netns", "del", name)
    return None


def sent_between_sites(names: Sequence[str]) -> int:
    """Return the bytes, with packet headers, that the sites of ``bridged_hosts`` have sent to each other."""
    links = json.loads(ip("-n", names[0].rpartition("h")[0], "-json", "-statistics", "link"))
    return sum(link["stats64"]["tx"]["bytes"] for link in links if link["ifname"].startswith("u"))


def ip(*arguments: str) -> str:
    """Run ``ip`` and return its output. Raises ``RuntimeError`` if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout


def enter(namespace: str, host: str) -> None:
    """Move this process into a host's network namespace, and set a host name that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns would need Python 3.12
    with Path(f"/run/netns/{namespace}").open() as file:
        entered = libc.setns(file.fileno(), CLONE_NEWNET) == 0
    # The host name needs its own UTS namespace; otherwise the whole machine would be renamed.
    if not entered or libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    socket.sethostname(host)


def raise_priority() -> None:
    """Start a new session, which Linux schedules as its own group, and raise the priority. Children inherit both."""
    with contextlib.suppress(OSError):
        os.setsid()
    # Without permission to raise the priority, the benchmark still works, but its figures are noisier.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-19")
        os.nice(-19)


def run_ranks(
    namespaces: Sequence[str], per_host: int, program: Callable[[], int], output: Path, limit_s: float = 120.0
) -> None:
    """Run a program on ``per_host`` ranks of each host, and write each rank's output to a file in the folder ``output``.

    Each rank is bound to a core. Raises ``SystemExit`` with the ranks' output if a rank ends with any status but 0 or 1, or
    has not ended after ``limit_s`` seconds.
    """
    # Ranks are forks, so that they need not import PyTorch again.
    fork = multiprocessing.get_context("fork")
    # Ranks are daemon processes, so that they end with this process.
    make = partial(fork.Process, target=_rank, daemon=True)
    ranks = [make(args=(namespaces, per_host, rank, program, output)) for rank in range(len(namespaces) * per_host)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(limit_s)
        statuses = [rank.exitcode for rank in ranks]
    finally:
        # Ranks may still run after Ctrl-C, or if one rank has failed while the other ranks wait for it.
        for rank in ranks:
            rank.kill()
    # Status 1 is not a failure: it means that training missed its target, or that a probe found something slow.
    if not {*statuses} <= {0, 1}:
        said = "".join(path.read_text() for path in sorted(output.glob("rank_*.txt")))[-4000:]
        raise SystemExit(f"error: exit statuses of the ranks (None if a rank did not end): {statuses}\n{said}")


def _rank(namespaces: Sequence[str], per_host: int, rank: int, program: Callable[[], int], output: Path) -> None:
    with (output / f"rank_{rank}.txt").open("a", encoding="utf-8") as file:
        # Redirect the descriptors instead of sys.stdout, because C libraries write to the descriptors.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    host, local = divmod(rank, per_host)
    enter(namespaces[host], f"h{host}")
    # Bind the rank, as launchers do, so that it does not migrate between cores.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    world_size = len(namespaces) * per_host
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host}
    # The master is rank 0's host. Without the interface name, gloo would use the address that the host name resolves to.
    place |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "v0"}
    os.environ |= {name: str(value) for name, value in place.items()}
    status = 2
    # If the program raises SystemExit, as parsers do, continue here, so that its output is flushed.
    with contextlib.suppress(SystemExit):
        status = program()
    sys.stdout.flush()
    os._exit(status)  # skip the exit handlers, which belong to the parent process
