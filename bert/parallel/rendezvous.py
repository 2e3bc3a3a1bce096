"""Rendezvous of a run's processes: their shared store, the attempt (start or restart) they belong to, and their hosts.

torchrun's store outlives the processes that torchrun restarts, so keys of earlier attempts must be hidden. torchrun's
restart count does not identify the attempt: an agent counts only restarts after failures of its own processes, and not the
restarts that it makes because another agent restarts.
"""

import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from bert.parallel.environment import SITE, Launch, host_of, lost_launcher, site
from bert.parallel.master_port import master_port, require_free_port
from bert.parallel.single import all_gather_single
from console.program import complain
from console.text import counted

_LONGEST_PAUSE_S = 1.0
_RESOLUTION_S = 10.0
"""Seconds in which the resolver may recover from a temporary failure."""
_IDENTITY_BYTES = 256
_DESCRIPTORS = 1024
"""Number of file descriptors to reserve for files, pipes, libraries, devices, and connections that are not from ranks."""


@dataclass(frozen=True)
class Identity:
    """Host and site of a rank, and its local rank. The boot id tells hosts with equal names, such as localhost, apart."""

    host: str
    boot: str
    local_rank: int
    local_size: int
    site: str = ""


def join_group(launch: Launch, device: torch.device, timeout: timedelta, arrival: timedelta) -> list[Identity]:
    """Meet the other ranks and create the default process group; return every rank's identity, by rank.

    Raises ``ValueError`` if the environment is incomplete or wrong, or if not all ranks arrive within ``arrival``.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(
                f"{launch.world_size_variable}={launch.world_size}, but {name} is not set: export rank 0's address as "
                "MASTER_ADDR and a free port there as MASTER_PORT"
            )
    # Do not check the port if torchrun's agent serves the store, because the agent already listens on the port.
    if launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        require_free_port(master_port())
    allow_descriptors(launch)
    if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
        # All ranks are on this host, so use the loopback. By default, gloo listens on an address where anybody can connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on_gpu = device.type == "cuda"
    if on_gpu and launch.local_size != launch.world_size:
        # Do not let NCCL register buffers, because captured collectives on registered buffers can give wrong results
        # between hosts (NVIDIA/nccl #2389).
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    rank, world_size = launch.rank, launch.world_size
    # Open the store here, because the ranks must agree on the attempt before init_process_group creates the group.
    with explained_store_errors():
        store = _open_store(launch, arrival)
        attempt = agree_on_attempt(store, launch, arrival.total_seconds())
        store = PrefixStore(attempt, store)
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        return _all_identities(launch, device)


def _open_store(launch: Launch, timeout: timedelta) -> Store:
    """Open the store where ranks meet: the store of torchrun's agent if there is one, else a store that rank 0 serves."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]
    address, port = os.environ["MASTER_ADDR"], master_port()
    _require_resolvable(address)

    def answers() -> bool:
        with suppress(OSError), socket.create_connection((address, port), timeout=5):
            return True
        return False

    # Wait here, because PyTorch's client would print stack traces until rank 0 answers.
    if launch.rank and not _in_time(answers, timeout.total_seconds()):
        raise ValueError(
            f"rank 0 does not answer at {address}:{port} within {timeout.total_seconds():.0f} s: check that it was started "
            "there, and that this host can reach it"
        )
    with _ended_by_signals():
        # PyTorch's rendezvous would wait here for all ranks and would not say which ones are missing.
        return TCPStore(address, port, None, launch.rank == 0, timeout, wait_for_workers=False, multi_tenant=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let signals end this process while the block runs.

    The handlers in Python would have to wait for PyTorch, which may itself wait minutes for a program that does not answer.
    """
    handlers = {
        number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _require_resolvable(address: str) -> None:
    """Raise ``ValueError`` if this host cannot resolve MASTER_ADDR within ten seconds. Refuse a malformed name at once."""
    reason = ""

    def resolves() -> bool:
        nonlocal reason
        try:
            return bool(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM))
        except OSError as error:
            reason = error.strerror or str(error)
            return False

    try:
        if _in_time(resolves, _RESOLUTION_S):
            return
    except UnicodeError as error:  # raised if a part of the name is empty or too long
        reason = str(error)
    raise ValueError(
        f"MASTER_ADDR is {address!r}, which this host cannot resolve ({reason}): set it to the name or address of rank 0's "
        "host, as all hosts know it"
    )


@contextmanager
def explained_store_errors() -> Iterator[None]:
    """Turn errors of PyTorch's store into a ``ValueError`` with a remedy. Anyone who can reach its port can cause errors."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        # If a stranger has overwritten a number, the error's text is only the name of a C++ parsing function, such as stoi.
        reason = str(error).partition("\n")[0]
        if isinstance(error, ValueError) and not re.fullmatch("sto[a-z]+", reason):
            raise
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ValueError(
            f"the ranks could not meet at {address} ({reason}): rank 0 or its store has ended, or another program writes to "
            "this port. Choose another MASTER_PORT, one that only this run's hosts can reach"
        ) from None


def agree_on_attempt(store: Store, launch: Launch, seconds: float) -> str:
    """Return a name for this attempt. All processes of the attempt get the name, and no other process does.

    Rank 0 creates the name, and the other ranks reply to it. A rank accepts the name when rank 0 has received all replies.
    If rank 0 already had all replies before this rank replied, the name belongs to an earlier attempt. Raises
    ``ValueError`` after ``seconds``; on rank 0, the error names the missing ranks.
    """
    if launch.rank:
        return _follow(store, launch.rank, seconds)
    # The name is random, because hosts count restarts differently and the store still has the names of earlier attempts.
    name = os.urandom(8).hex()
    store.set("attempt", name)
    missing = [f"{name}/{other}" for other in range(1, launch.world_size)]

    def heard() -> bool:
        while missing and store.check([missing[-1]]):  # ask for one key at a time, so that polls stay cheap
            missing.pop()
        return not missing

    if not _in_time(heard, seconds):
        # ``heard`` stops at the highest missing rank, so the list may still contain lower ranks that have arrived.
        absent = [int(key.partition("/")[2]) for key in missing if not store.check([key])]
        ranks = ", ".join(f"rank {rank}{host_of(rank, launch)}" for rank in absent[:8])
        raise ValueError(
            f"{len(absent)} of {launch.world_size} ranks have not arrived within {seconds:.0f} s ({ranks}"
            f"{' and others' if len(absent) > 8 else ''}): check that their processes were started and can reach MASTER_ADDR"
        )
    store.set(f"{name}/complete", "")
    return name


def _follow(store: Store, rank: int, seconds: float) -> str:
    answered: set[str] = set()
    name = ""

    def complete() -> bool:
        nonlocal name
        if not store.check(["attempt"]):
            return False
        name = store.get("attempt").decode()
        if store.check([f"{name}/complete"]):
            # An attempt that was complete before this process replied is an earlier one, so wait for a new name.
            return name in answered
        if name not in answered:
            store.set(f"{name}/{rank}", "")
            answered.add(name)
        return False

    if not _in_time(complete, seconds):
        raise ValueError(
            f"not all ranks have arrived within {seconds:.0f} s: see rank 0's message for the missing ranks"
        )
    return name


def _in_time(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll the condition, and return whether it held within ``seconds``.

    The function polls because a signal cannot end a wait inside the store. Raises ``ValueError`` if the launcher of this
    process has ended.
    """
    deadline, pause = time.monotonic() + seconds, 0.01
    while not condition():
        if time.monotonic() > deadline:
            return False
        if lost := lost_launcher():
            raise ValueError(lost)
        time.sleep(pause)
        # Poll less and less often, because thousands of ranks may poll the same store.
        pause = min(1.5 * pause, _LONGEST_PAUSE_S)
    return True


def allow_descriptors(launch: Launch) -> None:
    """Raise this process's limit of open files to the number of connections that it may need.

    PyTorch's store and the watchdog connect rank 0 to all ranks. With gloo, every rank is connected to all other ranks.
    Raises ``ValueError`` on rank 0 if the system's hard limit is certainly too low. Each host warns if it may be too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, is_limited = 3 * launch.world_size + _DESCRIPTORS, hard != resource.RLIM_INFINITY
    if is_limited and hard < 2 * launch.world_size and launch.rank == 0:
        raise ValueError(
            f"rank 0 may open {hard} files, but serves {launch.world_size} ranks with two connections each: "
            f"raise the hard limit of open files to {wanted} (ulimit -Hn, LimitNOFILE)"
        )
    if is_limited and hard < wanted and launch.local_rank == 0:
        complain(
            f"rank {launch.rank} may open {hard} files, but may need {wanted} with {launch.world_size} ranks: raise the "
            "hard limit of open files (ulimit -Hn, LimitNOFILE)",
            "warning",
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if is_limited else wanted, hard))


def _all_identities(launch: Launch, device: torch.device) -> list[Identity]:
    # Send bytes of a fixed size, so that nothing is unpickled. Two names, a boot id of 36 characters and two numbers fit.
    boot = Path("/proc/sys/kernel/random/boot_id")
    own = (socket.gethostname()[:128], boot.read_text().strip() if boot.exists() else "")
    text = "\n".join((*own, str(launch.local_rank), str(launch.local_size), site())).encode()
    sent = torch.tensor(list(text.ljust(_IDENTITY_BYTES)), dtype=torch.uint8, device=device)  # NCCL needs device memory
    received = sent.new_empty(launch.world_size * _IDENTITY_BYTES)
    all_gather_single(received, sent)
    rows = received.view(launch.world_size, _IDENTITY_BYTES).cpu().numpy()
    fields = [row.tobytes().decode().strip(" ").split("\n") for row in rows]
    return [Identity(host, boot, int(local), int(size), at) for host, boot, local, size, at in fields]


def group_by_host(identities: Sequence[Identity], one_launcher: bool = True) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host in ascending order. Hosts are ordered by their site, then by their lowest rank.

    Raises ``ValueError`` if hosts have different numbers of ranks, if a host states two sites, if only some hosts state a
    site, if a launcher announces more ranks on a host than were found there, or if a host's local ranks do not ascend with
    its ranks. With ``one_launcher``, equal local ranks on a host are an error too, because they would use the same device.
    """
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault((identity.host, identity.boot), []).append(rank)
    for (host, _), ranks in hosts.items():
        local_ranks = [identities[rank].local_rank for rank in ranks]
        # Containers may have their own host names, so ranks that share a host would count as several hosts.
        announced = max(identities[rank].local_size for rank in ranks)
        if len(ranks) < announced:
            raise ValueError(
                f"host {host} runs {counted(len(ranks), 'rank')} ({_listed(ranks)}), but its launcher announces "
                f"{announced} per host: if they run in containers, give all containers of a host its name"
            )
        found = f"host {host} runs ranks {_listed(ranks)} with local ranks {_listed(local_ranks)}"
        if one_launcher and len({*local_ranks}) < len(ranks):
            raise ValueError(f"{found}: start one launcher per host")
        sites = list(dict.fromkeys(identities[rank].site for rank in ranks))
        if len(sites) > 1:
            raise ValueError(
                f"host {host} states several sites ({', '.join(map(repr, sites))}): set one {SITE} per host"
            )
        # A rail joins ranks at equal positions on their hosts, and groups list ranks in ascending order. So a position
        # equals the local rank only if local ranks ascend with ranks.
        if local_ranks != sorted(local_ranks):
            raise ValueError(f"{found}: on each host, a higher rank must have a higher local rank")
    # A rail joins the ranks at one position of each host, so every host needs equally many ranks.
    if len({len(ranks) for ranks in hosts.values()}) > 1:
        counts = ", ".join(f"{host} {len(ranks)}" for (host, _), ranks in list(hosts.items())[:16])
        raise ValueError(f"hosts have different numbers of ranks ({counts}): start equally many on every host")
    order = list(dict.fromkeys(identity.site for identity in identities))
    if "" in order and len(order) > 1:
        without = next(identity.host for identity in identities if not identity.site)
        raise ValueError(f"host {without} states no site, but other hosts do: set {SITE} on every host or on none")
    return tuple(sorted(map(tuple, hosts.values()), key=lambda ranks: order.index(identities[ranks[0]].site)))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")
