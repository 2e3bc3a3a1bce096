"""Checks of what strangers may send to the ports of a run: to the watchdog's hub, and to the store where ranks meet."""

import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, TCPStore

from bert.parallel.environment import Launch
from bert.parallel.rendezvous import agree_on_attempt, explained_store_errors
from bert.parallel.watchdog.hub import Hub, listen
from bert.parallel.watchdog.judge import Judge, encoded

TOKEN = "ranks_know_it"


@cache
def hub() -> int:
    """Start a hub of two ranks, and return its port."""
    listener = listen("127.0.0.1")
    Hub(listener, ["rank 0", "rank 1"], 1e6, 1e5, TOKEN)
    return listener.getsockname()[1]


@cache
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def answer(port: int, content: bytes, patience_s: float = 5.0) -> bytes:
    """Send bytes to a port, and return the first bytes of its answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience_s) as connection, suppress(OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(100)
    return b""


def disturb_hub(said: Path) -> None:
    """Check that the hub does not answer a stranger, whatever it sends, and still answers a rank."""
    assert answer(hub(), said.read_bytes()) == b""
    assert answer(hub(), f"{TOKEN} 1\n".encode()) == encoded({"heard": True})


def disturb_meeting(said: Path) -> None:
    """Check that ranks meet, or explain why they cannot, although a stranger has written to their store."""
    content = said.read_bytes()
    answer(store().port, content, 0.01)
    own, complaint = PrefixStore(content.hex()[:9], store()), ""
    try:
        with explained_store_errors():
            assert len(agree_on_attempt(own, Launch(0, 1), 1.0)) == 16
            own.set("attempt", content.decode("latin-1"))
            agree_on_attempt(own, Launch(1, 2), 0.0)
    except ValueError as error:
        complaint = str(error)
    if "could not meet" in complaint:  # some messages make PyTorch's store close all connections
        store.cache_clear()
    assert "could not meet" in complaint or "not all ranks have arrived" in complaint


def judge_lines(said: Path) -> None:
    """Check that whatever two ranks report, their exit status is below 256. A process that exits with 256 ends as 0."""
    judge = Judge(["rank 0", "rank 1"], 60.0, 6.0)
    for number, line in enumerate(said.read_bytes().split(b"\n")):
        judge.hear(judge.members[number % 2], line)
    judge.lose(judge.members[0])
    verdicts = [verdict for _ in range(100) if (verdict := judge.pass_time(12.0))]
    assert all(0 <= verdict.status < 256 and verdict.text for verdict in verdicts)
