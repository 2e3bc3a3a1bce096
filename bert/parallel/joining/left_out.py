"""Hosts that sit out a run, because a rank of theirs was a straggler for long: their processes wait for its end.

No launcher can be asked to do without a host that it has started: an agent of torchrun that ends takes others with it, and
under srun the number of tasks is fixed. So the processes stay, the other ranks are counted anew, and these form the run.
The host of rank 0, where all meet, always takes part.
"""

import json
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from torch._C._distributed_c10d import Store

from bert.parallel.joining.launch import Launch, lost_launcher
from bert.parallel.watchdog.hub import FAULT_STATUS
from console.files import read_json, write_atomically

FILE = "left_out.json"
"""Beside the checkpoints: names of hosts, in a JSON list."""
_FILE_BYTES = 1 << 20
_PAUSE_S = 0.5
_PATIENCE_S = 10.0


class LeftOut(Exception):  # noqa: N818 an event, not an error
    """Signal that this process's host takes no part in the run."""

    def __init__(self, store: Store, rank: int) -> None:
        super().__init__(f"host {socket.gethostname()} sits out as a straggler")
        self._store = store
        self._rank = rank

    def wait(self) -> int:
        """Wait for the end of the run; returns the exit status, a fault's if rank 0 or this process's launcher is lost."""
        try:
            # Asked again and again, as a wait inside the store ends by no signal.
            while not self._store.check(["over"]):
                if lost_launcher():
                    return FAULT_STATUS
                time.sleep(_PAUSE_S)
            self._store.set(f"heard/{self._rank}", "")
        except RuntimeError:  # the store has gone with rank 0, or its agent
            return FAULT_STATUS
        return 0


@dataclass(frozen=True)
class Absent:
    """Ranks that sit out, as the others see them."""

    store: Store
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]

    def release(self) -> None:
        """Tell them, from one rank, that the run is over, and wait until they have heard it."""
        # The store may end with this process, and who has not heard by then would take that for a fault.
        self.store.set("over", "")
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and not self.store.check([f"heard/{rank}" for rank in self.ranks]):
            time.sleep(_PAUSE_S / 5)


def take_part(store: Store, launch: Launch, names: Collection[str]) -> tuple[Launch, Absent]:
    """Count the ranks anew without those of hosts called as in ``names``, of which rank 0's count; all must call it.

    Raises ``LeftOut`` on those.
    """
    store.set(f"host/{launch.rank}", socket.gethostname()[:128])
    if launch.rank == 0:
        hosts = [store.get(f"host/{rank}").decode() for rank in range(launch.world_size)]
        # By rank 0's file alone: others may see another folder, and all must leave out the same hosts.
        out = {rank: host for rank, host in enumerate(hosts) if host in names and host != hosts[0]}
        # JSON, since whoever reaches the store can write there, and pickles run code.
        store.set("out", json.dumps([[*out], sorted({*out.values()})]))
    out, hosts = json.loads(store.get("out"))
    if launch.rank in out:
        raise LeftOut(store, launch.rank)
    rank = launch.rank - sum(other < launch.rank for other in out)
    return replace(launch, rank=rank, world_size=launch.world_size - len(out)), Absent(store, tuple(out), tuple(hosts))


def left_out_hosts(folder: Path) -> list[str]:
    """Names of hosts that are to sit out runs with checkpoints in ``folder``. Raises ``ValueError`` at a damaged file."""
    path = folder / FILE
    if not path.exists():
        return []
    # Whoever can write to the folder of checkpoints can write this: it is read with a bound, as JSON.
    names = read_json(path, _FILE_BYTES, "remove it")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: expected a list of names of hosts; remove it")
    return names


def leave_out(folder: Path, host: str) -> None:
    """Note that a host is to sit out from the next start on."""
    names = left_out_hosts(folder)
    if host not in names:
        write_atomically(folder / FILE, json.dumps([*names, host]).encode())
