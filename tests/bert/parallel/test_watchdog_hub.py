"""The watchdog's hub with simulated ranks, and with unauthorized clients, connected over sockets."""

import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from bert.parallel.watchdog import hub
from bert.parallel.watchdog.hub import Hub, listen
from bert.parallel.watchdog.judge import encoded
from tests.programs import PATIENCE_S

TOKEN = "secret"
START = {"phase": "start", "step": 0, "entered": -1, "limit": None}


class Peer:
    """Simulated rank or unauthorized client that is connected to the hub."""

    def __init__(self, port: int, said: bytes = b"") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._lines = self.socket.makefile("rb")
        self.say(said)

    def say(self, said: bytes) -> None:
        self.socket.sendall(said)

    def hear(self, wanted: str) -> dict[str, Any]:
        """Receive messages until one has the given key, and return it."""
        return next(message for line in self._lines if wanted in (message := json.loads(line)))

    def is_sent_away(self) -> bool:
        """Wait until the hub closes the connection, and return whether it had sent nothing."""
        with suppress(ConnectionError):
            return self._lines.read() == b""
        return True


class Played:
    """A hub and its simulated ranks, at first only rank 0."""

    def __init__(self, count: int) -> None:
        listener = listen("127.0.0.1")
        self.port = listener.getsockname()[1]
        self.hub = Hub(listener, [f"rank {rank} on host h0" for rank in range(count)], 2 * PATIENCE_S, 1.0, TOKEN)
        self.ranks = [self.rank(0)]

    def rank(self, rank: int) -> Peer:
        peer = Peer(self.port, f"{TOKEN} {rank}\n".encode())
        assert peer.hear("heard") == {"heard": True}
        peer.say(encoded(START))
        return peer


@pytest.fixture
def play() -> Iterator[Callable[[int], Played]]:
    with ExitStack() as stack:

        def make(count: int) -> Played:
            played = Played(count)
            stack.callback(played.hub.close, PATIENCE_S)
            return played

        yield make


def test_only_ranks_that_know_the_token_are_accepted(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A greeting may arrive in pieces. A rank that has reported cannot connect a second time."""
    played = play(3)
    for greeting in (
        *(b"guess 1\n", b"1\n", TOKEN.encode() + b"\n"),
        *(f"{TOKEN} {rank}\n".encode() for rank in ("3", "-1", "one", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 5000)),
        b"x" * 20_000,
    ):
        assert Peer(played.port, greeting).is_sent_away(), greeting[:20]
    monkeypatch.setattr(hub, "_GREETING_S", 0.1)
    assert Peer(played.port).is_sent_away(), "in time"
    late = Peer(played.port, f"{TOKEN} 1\n".encode()[:7])
    late.say(f"{TOKEN} 1\n".encode()[7:] + b"not json\n" + b"[" * 5000 + b"\n" + encoded(START))
    late.hear("heard")
    assert Peer(played.port, f"{TOKEN} 1\n".encode()).is_sent_away()
    played.rank(2).say(encoded({"left": True}))
    late.socket.shutdown(socket.SHUT_RDWR)
    text = "rank 1 on host h0: ended without a word, last in start"
    assert played.ranks[0].hear("verdict") == {"verdict": text, "status": 3, "rank": 1}


def test_a_rank_may_reconnect_before_it_reports_and_all_ranks_learn_that_the_run_is_over(play: Any) -> None:
    played = play(2)
    first = Peer(played.port, f"{TOKEN} 1\n".encode())
    first.hear("heard")
    played.ranks.append(played.rank(1))
    assert first.is_sent_away()
    played.ranks[0].hear("heard")
    assert played.hub.verdict is None
    played.hub.close(PATIENCE_S)
    assert [rank.hear("over") for rank in played.ranks] == [{"over": True}] * 2


def test_the_oldest_unauthorized_connections_are_closed_if_there_are_too_many(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_STRANGERS", 3)
    played = play(2)
    crowd = [Peer(played.port) for _ in range(5)]
    assert all(peer.is_sent_away() for peer in crowd[:2])
    crowd[2].say(f"{TOKEN} 1\n".encode())
    crowd[2].hear("heard")


@pytest.mark.slow
def test_a_hub_without_free_descriptors_keeps_its_ranks_and_accepts_others_later(play: Any) -> None:
    played = play(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        crowd = [stack.enter_context(socket.socket()) for _ in range(8)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(each.fileno() for each in crowd) + 3, hard))
        for each in crowd:
            each.connect(("127.0.0.1", played.port))
        time.sleep(0.5)
        played.ranks[0].hear("heard")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        played.rank(1)
        assert played.hub.verdict is None


@pytest.mark.slow
def test_a_hub_of_1200_ranks_reports_a_lost_rank_to_the_others(play: Any) -> None:
    count, lost = 1200, 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * count + 1000:
        pytest.skip(f"the hard limit of open files is {hard}")
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        played = play(count)
        ranks = [*played.ranks, *(played.rank(rank) for rank in range(1, count))]
        ranks[lost].socket.shutdown(socket.SHUT_RDWR)
        assert {rank.hear("verdict")["rank"] for rank in ranks[:lost]} == {lost}
        for rank in ranks:
            stack.enter_context(rank.socket)
