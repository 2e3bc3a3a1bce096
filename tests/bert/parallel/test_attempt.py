"""Processes agree on the current attempt through a store that holds data of the run's earlier attempts."""

import re
import socket
import struct
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from bert.parallel import rendezvous
from bert.parallel.environment import Launch
from bert.parallel.rendezvous import agree_on_attempt, explained_store_errors
from tests.bert.parallel.forked import on_ranks
from tests.programs import PATIENCE_S

PROCESSES = ThreadPoolExecutor(4)


def agree(store: HashStore, order: list[int], world_size: int, seconds: float = PATIENCE_S) -> list[Future[str]]:
    """Start the processes of an attempt in ``order``, each in a thread that returns the attempt's name."""
    processes = []
    for rank in order:
        time.sleep(0.02)
        assert not any(process.done() for process in processes), "not all are there"
        processes.append(PROCESSES.submit(agree_on_attempt, store, Launch(rank, world_size), seconds))
    return processes


def test_processes_agree_on_a_new_name_for_each_attempt_once_all_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an attempt fails, rank 0 names the missing ranks."""
    monkeypatch.setattr(rendezvous, "_LONGEST_PAUSE_S", 0.02)
    store, names = HashStore(), set[str]()
    first, rank_0 = agree(store, [2, 0], 4, seconds=0.5)
    with pytest.raises(ValueError, match=r"^2 of 4 ranks have not arrived within 0 s \(rank 1, rank 3\): check that"):
        rank_0.result(PATIENCE_S)
    with pytest.raises(ValueError, match=r"^not all ranks have arrived within 0 s: see rank 0's message for the"):
        first.result(PATIENCE_S)
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        [name] = {process.result(PATIENCE_S) for process in agree(store, order, 3)}
        names.add(name)
    assert len(names) == 3
    for count, more in ((8, ""), (9, " and others")):
        listed = ", ".join(f"rank {rank} on the node with index {rank // 2}" for rank in range(1, 9))
        said = f"{count} of {count + 1} ranks have not arrived within 0 s ({listed}{more}): "
        with pytest.raises(ValueError, match=re.escape(said)):
            agree_on_attempt(store, Launch(0, count + 1, 0, 2), 0.0)
    monkeypatch.setattr(rendezvous, "lost_launcher", lambda: "the launcher is gone")
    with pytest.raises(ValueError, match=r"^the launcher is gone$"):
        agree_on_attempt(store, Launch(0, 2), PATIENCE_S)


def test_ranks_meet_in_the_store_of_torchruns_agent_even_after_a_restart() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(2):
        place = {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        assert on_ranks(2, lambda mesh: (mesh.rank, mesh.sites), **place) == [(0, ()), (1, ())]


def test_a_message_explains_that_a_stranger_has_overwritten_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with socket.create_connection(("127.0.0.1", store.port)) as stranger:
        # Overwrite the store's count of processes.
        text = [struct.pack("<Q", len(part)) + part for part in (b"init/", b"none")]
        stranger.sendall(b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x01" + b"".join(text))
        with pytest.raises(ValueError, match=f"127.0.0.1:{store.port}.*MASTER_PORT"), explained_store_errors():
            TCPStore("127.0.0.1", store.port, 2, timeout=timedelta(seconds=PATIENCE_S))
    for error, said in (
        (
            RuntimeError("closed\nat line 3"),
            f"^the ranks could not meet at 127.0.0.1:{store.port} \\(closed\\): rank 0",
        ),
        (IndexError("stoul"), r"\(stoul\): rank 0 or its store has ended, or another program writes to this port"),
        (ValueError("MASTER_ADDR is wrong"), "^MASTER_ADDR is wrong$"),
    ):
        with pytest.raises(ValueError, match=said), explained_store_errors():
            raise error
