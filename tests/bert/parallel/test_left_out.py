"""Hosts that sit out: who takes part, under which rank, how the others end, and files of names that are none."""

import json
import socket
import threading
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from bert.parallel.joining import left_out
from bert.parallel.joining.launch import Launch
from bert.parallel.joining.left_out import FILE, Absent, LeftOut, leave_out, left_out_hosts, take_part
from bert.parallel.watchdog.hub import FAULT_STATUS

HOSTS = ["a", "a", "b", "b", "c", "c"]
PATIENCE_S = 30


def come(names: list[str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Launch, Absent] | LeftOut]:
    """Collect what each of the ranks gets."""
    own = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: HOSTS[own.rank])
    store, found = HashStore(), dict[int, tuple[Launch, Absent] | LeftOut]()

    def take(rank: int) -> None:
        own.rank = rank
        try:
            found[rank] = take_part(
                store, Launch(rank, len(HOSTS), rank % 2, 2), names if rank == 0 else ["all others"]
            )
        except LeftOut as out:
            found[rank] = out

    threads = [threading.Thread(target=take, args=(rank,), daemon=True) for rank in range(len(HOSTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [found[rank] for rank in range(len(HOSTS))]


def test_the_others_are_counted_anew_and_those_wait_for_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_out, "_PAUSE_S", 0.01)
    found = come(["b", "elsewhere"], monkeypatch)
    parts = [each for each in found if not isinstance(each, LeftOut)]
    waiting = [each for each in found if isinstance(each, LeftOut)]
    assert [each in waiting for each in found] == [False, False, True, True, False, False]
    assert [launch for launch, _ in parts] == [Launch(rank, 4, rank % 2, 2) for rank in range(4)]
    assert {(absent.ranks, absent.hosts) for _, absent in parts} == {((2, 3), ("b",))}
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda out=out: statuses.append(out.wait()), daemon=True) for out in waiting]
    for thread in threads:
        thread.start()
    parts[0][1].release()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert statuses == [0, 0]


@pytest.mark.parametrize("names", [[], ["a"], ["elsewhere"]])
def test_the_host_of_rank_0_always_takes_part(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = come(names, monkeypatch)
    assert [each[0].rank for each in found if not isinstance(each, LeftOut)] == list(range(len(HOSTS)))


def test_who_waits_ends_as_at_a_fault_when_rank_0_goes_without_a_word() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    out = LeftOut(TCPStore("127.0.0.1", server.port, is_master=False), 3)
    del server
    assert out.wait() == FAULT_STATUS


def test_a_host_is_noted_once_and_taken_out_by_hand(tmp_path: Path) -> None:
    assert left_out_hosts(tmp_path) == []
    for host in ("h2", "h5", "h2"):
        leave_out(tmp_path, host)
    assert left_out_hosts(tmp_path) == json.loads((tmp_path / FILE).read_text()) == ["h2", "h5"]


@pytest.mark.parametrize("content", ["{", "{}", "[1]", '"h2"', "[" * 100_000, "[" + '"h",' * 300_000 + '"h"]'])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=r"left_out\.json.*remove it") as error:
        left_out_hosts(tmp_path)
    assert "\n" not in str(error.value)
