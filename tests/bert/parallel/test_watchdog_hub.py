"""The watchdog's hub with simulated ranks, and with unauthorized clients, connected over sockets."""

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from bert.parallel.watchdog.hub import Hub, listen
from bert.parallel.watchdog.judge import encoded
from tests.programs import PATIENCE_S

TOKEN = "secret"


class Peer:
    """Simulated rank or unauthorized client that is connected to the hub."""

    def __init__(self, port: int, said: bytes = b"") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._received = b""
        self.socket.sendall(said)

    def say(self, **message: object) -> None:
        self.socket.sendall(encoded(message))

    def hear(self, wanted: str) -> dict[str, Any]:
        """Receive messages until one has the given key, and return it."""
        while True:
            line, end, rest = self._received.partition(b"\n")
            if not end:
                data = self.socket.recv(1 << 16)
                assert data, "sent away"
                self._received += data
                continue
            self._received = rest
            if wanted in (message := json.loads(line)):
                return message

    def is_sent_away(self) -> bool:
        with suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True


class Played:
    """A hub with some of its ranks connected."""

    def __init__(self, count: int, joined: int | None = None) -> None:
        listener = listen("127.0.0.1")
        self.port = listener.getsockname()[1]
        self.hub = Hub(listener, [""] * count, 2 * PATIENCE_S, 1.0, TOKEN)
        self.ranks = [self.rank(rank) for rank in range(count if joined is None else joined)]

    def rank(self, rank: int, host: str = "h0") -> Peer:
        peer = Peer(self.port, f"{TOKEN} {rank} {host}\n".encode())
        peer.hear("heard")
        peer.say(phase="start", step=0, entered=-1, limit=None)
        return peer

    def end(self, rank: int) -> str:
        """Close a rank's connection and return the verdict that rank 0 receives."""
        self.ranks[rank].socket.close()
        return self.ranks[0].hear("verdict")["verdict"]


@pytest.fixture
def play() -> Iterator[Any]:
    with ExitStack() as stack:

        def make(*counts: int) -> Played:
            played = Played(*counts)
            stack.callback(played.hub.close, PATIENCE_S)
            return played

        yield make


def test_a_greeting_in_pieces_is_one_and_a_replayed_one_is_none(play: Any) -> None:
    hub = play(2, 1)
    greeting = f"{TOKEN} 1 pieces\n".encode()
    late = Peer(hub.port, greeting[:9])
    late.socket.sendall(greeting[9:] + b'not json\n{"phase": "start", "step": 0, "entered": -1, "limit": null}\n')
    late.hear("heard")
    hub.ranks.append(late)
    assert Peer(hub.port, f"{TOKEN} 1 elsewhere\n".encode()).is_sent_away()
    assert hub.end(1).startswith("rank 1 on host pieces: ended without a word")


def test_a_rank_that_was_not_answered_may_come_once_more(play: Any) -> None:
    hub = play(2, 1)
    first = Peer(hub.port, f"{TOKEN} 1 h0\n".encode())
    first.hear("heard")
    hub.ranks.append(hub.rank(1))
    assert first.is_sent_away()
    hub.ranks[0].hear("heard")
    assert hub.hub.verdict is None


@pytest.mark.slow
def test_a_hub_without_descriptors_keeps_its_ranks_and_lets_others_in_later(play: Any) -> None:
    hub = play(2, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        probe = socket.socket()
        stack.callback(probe.close)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        crowd = [socket.socket() for _ in range(8)]
        for each in crowd:
            stack.callback(each.close)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(each.fileno() for each in crowd) + 3, hard))
        for each in crowd:
            each.connect(("127.0.0.1", hub.port))
        time.sleep(0.5)
        hub.ranks[0].hear("heard")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        hub.ranks.append(hub.rank(1))
        assert hub.hub.verdict is None


@pytest.mark.slow
def test_a_hub_of_1200_ranks(play: Any) -> None:
    count = 1200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * count + 1000:
        pytest.skip(f"the hard limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        hub = play(count)
        hub.ranks[1100].socket.close()
        for rank in hub.ranks[:1100]:
            assert rank.hear("verdict")["rank"] == 1100
    finally:
        for rank in hub.ranks:
            rank.socket.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
