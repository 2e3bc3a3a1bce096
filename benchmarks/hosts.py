"""Hosts that are network namespaces of this machine; ranks on them, forked from a process that knows what they run."""

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
# Below the range that the system gives to connections.
PORT = 29600


class BridgedHosts:
    """Namespaces as hosts on one bridge, for the body of a ``with``; ``tc tbf`` shapes what each sends to a ``rate``."""

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        # Those of a process that was killed stay, and process numbers return.
        name = _unique_name()
        self._names = [f"{name}h{host}" for host in range(hosts)]
        self._rate = rate
        self.switch = f"{name}sw"

    def __enter__(self) -> list[str]:
        # The bridge has a namespace of its own, so that nothing of the machine's network is touched.
        switch = self.switch
        try:
            ip("netns", "add", switch)
            ip("-n", switch, "link", "add", "br0", "type", "bridge")
            ip("-n", switch, "link", "set", "br0", "up")
            for host, name in enumerate(self._names):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                # A veth pair is a cable: one end in the host, the other at the bridge.
                ip("link", "add", "v0", "netns", name, "type", "veth", "peer", "name", f"p{host}", "netns", switch)
                ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "v0")
                ip("-n", name, "link", "set", "v0", "up")
                ip("-n", switch, "link", "set", f"p{host}", "master", "br0")
                ip("-n", switch, "link", "set", f"p{host}", "up")
                if self._rate:
                    shape(name, "v0", self._rate)
        except BaseException:
            # `with` does not call __exit__ where __enter__ fails.
            self.__exit__()
            raise
        return self._names

    def __exit__(self, *_: object) -> None:
        for name in (*self._names, self.switch):
            # Deleting a namespace takes its devices with it; one that was never made is no error here.
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def why_not() -> str | None:
    """Return what is missing to make hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it with sudo"
    absent = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if absent:
        return f"{absent[0]} is not installed: install iproute2"
    name = f"{_unique_name()}probe"
    # Only trying tells: containers may have root and no right to make namespaces.
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "the kernel refuses network namespaces here"
    ip("netns", "del", name)
    return None


def require_hosts() -> None:
    """End the program with status 2 where hosts cannot be made here."""
    if missing := why_not():
        print(f"error: {missing}", file=sys.stderr)
        raise SystemExit(2)


def _unique_name() -> str:
    return f"reduce{os.getpid()}{os.urandom(3).hex()}"


def ip(*arguments: str) -> None:
    """Run ``ip``; RuntimeError where it refuses."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def shape(namespace: str, device: str, rate: str) -> None:
    """Let a device send at a rate, as ``tc`` writes it."""
    # The burst is what passes at full speed; the latency bounds the queue behind it.
    shaped = ("qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    ip("netns", "exec", namespace, "tc", *shaped)


def enter(namespace: str, host: str) -> None:
    """Be on a host, under a name that nobody else sees."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    with Path(f"/run/netns/{namespace}").open() as file:
        entered = libc.setns(file.fileno(), CLONE_NEWNET) == 0
    # Names of hosts are of a namespace of their own; otherwise the whole machine would be renamed.
    if not entered or libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "cannot enter the host")
    socket.sethostname(host)


def go_first() -> None:
    """Have the scheduler prefer this process and those that it forks, in a session of their own: it prefers whole ones."""
    with contextlib.suppress(OSError):
        os.setsid()
    # Without the rights for it figures are only noisier.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-19")
        os.nice(-19)


def block(hosts: int, local_size: int) -> list[int]:
    """The hosts of ranks that are numbered host by host."""
    return [host for host in range(hosts) for _ in range(local_size)]


def environment_of(rank: int, order: Sequence[int]) -> dict[str, str]:
    """Return what a launcher would set for a rank; ``order`` has the host of each."""
    # Local ranks are those of the same host, in the order of their numbers.
    local = [other for other, host in enumerate(order) if host == order[rank]]
    place = {"RANK": rank, "WORLD_SIZE": len(order), "LOCAL_RANK": local.index(rank), "LOCAL_WORLD_SIZE": len(local)}
    # Rank 0's host is the master, whichever that is; gloo would otherwise take the address of the host's name.
    place |= {"MASTER_ADDR": f"10.77.0.{order[0] + 1}", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "v0"}
    return {name: str(value) for name, value in place.items()}


def run_ranks(
    namespaces: Sequence[str],
    order: Sequence[int],
    program: Callable[[], int],
    output: Path,
    limit_s: float,
    *,
    bound: bool = False,
) -> None:
    """Run a program on ranks whose hosts are ``order``, ``bound`` to a core each; what they say goes to files in ``output``.

    SystemExit, with that, unless all end with 0, or with 1, which says that a target was missed.
    """
    # Forked, so that ranks need not import PyTorch once more each.
    fork = multiprocessing.get_context("fork")
    ranks = [
        # daemon: ranks end with this process.
        fork.Process(target=_rank, args=(namespaces, order, rank, program, output, bound), daemon=True)
        for rank in range(len(order))
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(limit_s)
        statuses = [rank.exitcode for rank in ranks]
    finally:
        # Also on Ctrl-C, and where one rank has failed and others wait for it.
        for rank in ranks:
            rank.kill()
    # 1 is no failure: a target was missed, or a probe has found something slow.
    if not {*statuses} <= {0, 1}:
        raise SystemExit(f"error: ranks ended with {statuses}:\n{said_by_ranks(output)}")


def said_by_ranks(output: Path) -> str:
    """Return the end of what `run_ranks` has written of its ranks."""
    return "".join(path.read_text() for path in sorted(output.glob("rank_*.txt")))[-4000:]


def _rank(
    namespaces: Sequence[str], order: Sequence[int], rank: int, program: Callable[[], int], output: Path, bound: bool
) -> None:
    with (output / f"rank_{rank}.txt").open("a", encoding="utf-8") as file:
        # Descriptors and not sys.stdout: libraries in C write to these.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    enter(namespaces[order[rank]], f"h{order[rank]}")
    if bound:  # as launchers do, so that none wanders
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ |= environment_of(rank, order)
    status = 2
    # SystemExit from a parser is that program's end, not this one's.
    with contextlib.suppress(SystemExit):
        status = program()
    sys.stdout.flush()
    os._exit(status)  # a fork must not run what its parent has registered for its own end
