"""Attempt of a run that processes belong to, where a store has seen others of the same run before.

torchrun's store outlives the processes that it starts again, and what earlier ones have left there must not be found. Its
count of restarts does not tell them apart: an agent whose process failed counts on, and one that starts its processes again
only because another agent did so does not.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

from bert.parallel.joining.launch import Launch, host_of, lost_launcher

_LONGEST_PAUSE_S = 1.0


@contextmanager
def explained_store_errors() -> Iterator[None]:
    """Raise ``ValueError`` with a sentence for errors of PyTorch's store, which anybody who reaches its port can cause."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        # Of a number that a stranger has overwritten, C++ only names the function that could not parse it.
        reason = str(error).partition("\n")[0]
        if isinstance(error, ValueError) and not re.fullmatch("sto[a-z]+", reason):
            raise
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ValueError(
            f"the ranks could not meet at {address} ({reason}): rank 0 or its store has ended, or another program writes to "
            "this port. Choose another MASTER_PORT, which other hosts than those of the run cannot reach"
        ) from None


def agree_on_attempt(store: Store, launch: Launch, seconds: float) -> str:
    """Agree on a name for this attempt, which no earlier attempt had and which all present processes get.

    Rank 0 makes it up, and the others answer to it. They take it when rank 0 has heard all of them, but not where it had
    before they came. Raises ``ValueError`` after ``seconds``, on rank 0 with the ranks that are missing.
    """
    if launch.rank:
        return _follow(store, launch.rank, seconds)
    # Random, as no number is counted alike on all hosts, and as the store still has the names of earlier attempts.
    name = os.urandom(8).hex()
    store.set("attempt", name)
    missing = [f"{name}/{other}" for other in range(1, launch.world_size)]

    def heard() -> bool:
        while missing and store.check([missing[-1]]):  # one key a request, and none again that has been seen
            missing.pop()
        return not missing

    if not _in_time(heard, seconds):
        # The list still has those behind the first absent one, after whom nobody has asked.
        absent = [int(key.partition("/")[2]) for key in missing if not store.check([key])]
        ranks = ", ".join(f"rank {rank}{host_of(rank, launch)}" for rank in absent[:8])
        raise ValueError(
            f"{len(absent)} of {launch.world_size} ranks have not come within {seconds:.0f} s ({ranks}"
            f"{' and others' if len(absent) > 8 else ''}): see whether their processes were started, and reach MASTER_ADDR"
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
            # If not, the attempt was complete before this process came: it is an earlier one, and a new name will
            # follow.
            return name in answered
        if name not in answered:
            store.set(f"{name}/{rank}", "")
            answered.add(name)
        return False

    if not _in_time(complete, seconds):
        raise ValueError(f"not all ranks have come within {seconds:.0f} s: rank 0 says which, if it is there")
    return name


def _in_time(condition: Callable[[], bool], seconds: float) -> bool:
    """Tell whether it comes true in time. Asked again and again, because a signal ends no wait inside the store.

    Raises ``ValueError`` when the launcher of this process is gone.
    """
    deadline, pause = time.monotonic() + seconds, 0.01
    while not condition():
        if time.monotonic() > deadline:
            return False
        if lost := lost_launcher():
            raise ValueError(lost)
        time.sleep(pause)
        # Less and less often, as thousands of ranks may ask the one store.
        pause = min(1.5 * pause, _LONGEST_PAUSE_S)
    return True
