"""Arrival of all ranks, with a limit: who does not come is named, with the host that it should be on.

PyTorch's own rendezvous ends after its limit too, but says numbers only and dumps stacks on every rank that did come. So
rank 0 opens the store that PyTorch takes afterwards, as torchrun's agent does, and all ranks answer a roll call in it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from bert.parallel.launch import Launch
from bert.parallel.master_port import require_free_port
from cluster.probe.machine import scontrol_show

# Short beside an arrival, long beside a question to the store.
_PAUSE_S = 0.05
# As torch.distributed.elastic names it: with it set, PyTorch's env:// rendezvous is a client on every rank.
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_MOST_NAMED = 8


def meet(launch: Launch, seconds: float, hosts: Sequence[str] = ()) -> Store | None:
    """Wait until all ranks are there; returns the store, which must live as long as they talk. None for a single process.

    Args:
        seconds: the limit.
        hosts: names of the hosts in the order of the nodes, where they are known; Slurm is asked otherwise.

    Raises:
        ValueError: an address is missing; or ranks are, which rank 0 names with their hosts.
    """
    if launch.world_size == 1:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(
                f"{launch.world_size_variable}={launch.world_size}, but {name} is not set: export rank 0's address as "
                "MASTER_ADDR and a free port there as MASTER_PORT"
            )
    deadline = time.monotonic() + seconds
    # Under torchrun its agent has opened a store at that address already, so rank 0 must not open another.
    is_server = launch.rank == 0 and os.environ.get(_AGENT) != "True"
    if is_server:
        # Said here in one line: PyTorch's server would end with a stack when the port is taken.
        require_free_port()
    else:
        _reach(deadline, seconds)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Beyond the limit: who is absent is to be told by the roll call, not by a timeout of the store.
    limit = timedelta(seconds=seconds + 30)
    # wait_for_workers would block until all are there; multi_tenant has PyTorch's rendezvous share the server.
    tcp = TCPStore(
        address, port, None, is_server, timeout=limit, wait_for_workers=False, multi_tenant=True
    )  # fmt: skip
    os.environ[_AGENT] = "True"  # the store stands: PyTorch's rendezvous comes to it as a client, on rank 0 too
    # A prefix of its own: PyTorch's rendezvous keeps keys in the same store.
    store = PrefixStore("probe", tcp)
    # Cut, as a name goes into messages on other hosts.
    store.set(f"host/{launch.rank}", socket.gethostname()[:128])
    if launch.rank:
        # The others go on only when rank 0 has seen all: nobody talks to one who is not there.
        _answer(store, deadline, seconds)
        return tcp
    if absent := _absent(store, launch.world_size, deadline):
        present = sorted({*range(launch.world_size)}.difference(absent))
        host_of = {rank: store.get(f"host/{rank}").decode() for rank in present}
        text = describe_absent(absent, host_of, launch, hosts or slurm_hosts())
        # The value is never read: the key alone tells the others to end.
        store.set("missing", "")
        time.sleep(4 * _PAUSE_S)  # the others ask once more before the store goes with this process
        raise ValueError(
            f"{text} within {seconds:g} s: see whether {'it was' if len(absent) == 1 else 'they were'} started, and can "
            f"reach MASTER_ADDR={address}"
        )
    store.set("complete", "")
    return tcp


def _reach(deadline: float, seconds: float) -> None:
    """Wait until something listens where rank 0 is to be: PyTorch's client would print stacks."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not (port.isdecimal() and port.isascii() and 0 < int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT is {port!r}, expected a whole number from 1 to 65535")
    while True:
        left = deadline - time.monotonic()
        try:
            # At most five seconds: a name that resolves to a dead address must not take all of the limit.
            socket.create_connection((address, int(port)), timeout=max(0.1, min(5.0, left))).close()
            return
        except OSError as error:
            if left <= 0:
                raise ValueError(
                    f"rank 0 does not answer at {address}:{port} within {seconds:g} s ({error}): see whether it was "
                    "started there, and whether the network lets this host reach it"
                ) from None
        time.sleep(_PAUSE_S)


def _answer(store: Store, deadline: float, seconds: float) -> None:
    while not store.check(["complete"]):
        if store.check(["missing"]) or time.monotonic() > deadline + 5:  # rank 0 is to speak first
            raise ValueError(f"not all ranks have come within {seconds:g} s: rank 0 says which")
        time.sleep(_PAUSE_S)


def _absent(store: Store, world_size: int, deadline: float) -> list[int]:
    """Ranks that have not come when the time is up; [] as soon as all are there."""
    missing = list(range(world_size))
    while missing and time.monotonic() < deadline:
        # Only the last missing rank is asked for: one question a turn, however many ranks there are.
        while missing and store.check([f"host/{missing[-1]}"]):
            missing.pop()
        time.sleep(_PAUSE_S if missing else 0)
    # Once more for all: others may have come while the last one was waited for.
    return [rank for rank in missing if not store.check([f"host/{rank}"])]


def describe_absent(absent: Sequence[int], present: dict[int, str], launch: Launch, hosts: Sequence[str]) -> str:
    """Say which hosts have not come, and which of their ranks.

    A rank's host is the one in ``hosts``, in blocks of the local size; else that of its neighbours in the same block that
    did come; else the block's number is told.
    """
    # Where a launcher does not say how many ranks a host has, they are taken as equally many.
    size = launch.local_size or (launch.world_size // len(hosts) if hosts else 0)
    by_host: dict[str, list[int]] = {}
    for rank in absent:
        if not size:
            name = ""
        elif rank // size < len(hosts):
            name = f"host {hosts[rank // size]}"
        else:
            # Without names a neighbour that came tells where its block runs.
            block = range(rank // size * size, (rank // size + 1) * size)
            here = next((present[other] for other in block if other in present), None)
            name = f"host {here}" if here else f"node {rank // size} of {launch.world_size // size}"
        by_host.setdefault(name, []).append(rank)
    named = [f"{name} (rank {_listed(ranks)})" if name else f"rank {_listed(ranks)}" for name, ranks in by_host.items()]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    verb = "has" if len(absent) == 1 else "have"
    there = sorted(set(present.values()))
    came = f" ({', '.join(there[:_MOST_NAMED])} came)" if there and not hosts else ""
    return f"{', '.join(named[:_MOST_NAMED])}{more} {verb} not come{came}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")


def slurm_hosts() -> list[str]:
    """Return the hosts of this job in the order of their nodes, as Slurm has them; [] without Slurm."""
    names = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    return scontrol_show("hostnames", names)
