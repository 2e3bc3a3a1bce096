"""Processes agree on the current attempt through a store that holds data of the run's earlier attempts."""

import socket
import struct
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from bert.parallel import rendezvous as attempt
from bert.parallel.environment import Launch, host_of, scontrol_show
from bert.parallel.rendezvous import agree_on_attempt, explained_store_errors
from tests.programs import PATIENCE_S

PROCESSES = ThreadPoolExecutor(4)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_LONGEST_PAUSE_S", 0.02)


def start(store: HashStore, rank: int, world_size: int, seconds: float = PATIENCE_S) -> Future[str]:
    """Start a process of an attempt, in a thread. Its result is the attempt's name."""
    return PROCESSES.submit(agree_on_attempt, store, Launch(rank, world_size), seconds)


def come(store: HashStore, ranks: list[int], world_size: int, pause: float = 0.0) -> set[str]:
    """Start the ranks one after another and return the names that they agreed on."""
    processes = []
    for rank in ranks:
        processes.append(start(store, rank, world_size))
        time.sleep(pause)
    return {process.result(PATIENCE_S) for process in processes}


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_each_attempt_has_one_name_of_its_own(order: list[int]) -> None:
    store, names = HashStore(), []
    for _ in range(3):
        [name] = come(store, order, 3, pause=0.02)
        names.append(name)
    assert len(set(names)) == 3


def test_nobody_takes_the_name_before_all_are_there() -> None:
    store = HashStore()
    come(store, [0, 1, 2], 3)
    early = [start(store, 1, 3), start(store, 0, 3)]
    time.sleep(0.1)
    assert not any(process.done() for process in early)
    late = start(store, 2, 3)
    assert len({process.result(PATIENCE_S) for process in (*early, late)}) == 1


def test_a_store_that_a_stranger_has_spoilt_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with socket.create_connection(("127.0.0.1", store.port)) as stranger:
        # Overwrite the store's count of processes.
        text = [struct.pack("<Q", len(part)) + part for part in (b"init/", b"none")]
        stranger.sendall(b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x01" + b"".join(text))
        with pytest.raises(ValueError, match=f"127.0.0.1:{store.port}.*MASTER_PORT"), explained_store_errors():
            TCPStore("127.0.0.1", store.port, 2, timeout=timedelta(seconds=PATIENCE_S))


@pytest.mark.slow
def test_rank_0_names_the_missing_ranks_and_the_next_attempt_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "--help")
    store = HashStore()
    broken = [start(store, 0, 4, seconds=1), start(store, 2, 4, seconds=1)]
    with pytest.raises(ValueError, match=r"2 of 4 ranks have not come within 1 s \(rank 1, rank 3\): "):
        broken[0].result(PATIENCE_S)
    with pytest.raises(ValueError, match="not all ranks have come"):
        broken[1].result(PATIENCE_S)
    assert len(come(store, [2, 1, 0], 3)) == 1
    assert scontrol_show("hostnames", "--help") == []
    assert host_of(5, Launch(0, 8, 0, 2)) == " on node 2 from 0"
