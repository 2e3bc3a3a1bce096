"""A rank's own side of the watchdog, with the hub played over a socket."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bert.parallel.mesh import Mesh
from bert.parallel.watchdog import watchdog as module
from bert.parallel.watchdog.hub import LINE, encoded
from bert.parallel.watchdog.watchdog import FAULT_STATUS, Watchdog
from bert.timing.phases import PhaseTracker
from tests.programs import PATIENCE_S

SECONDS = 60.0
BRISK = 5.0
"""The same, where a rank has to beat for the test to get on: ten times in it."""
BEAT = 6.0
TOKEN = "secret"


class PlayedHub:
    """Listener where rank 0 would be, and the rank's connection to it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connection: socket.socket | None = None
        self._received = b""

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]

    def answer(self) -> str:
        """Let a rank in; returns its greeting."""
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(PATIENCE_S)
        self.say(heard=True)
        return self._line().decode()

    def say(self, **message: object) -> None:
        assert self.connection is not None
        self.connection.sendall(encoded(message))

    def hear(self, wanted: str) -> dict[str, Any]:
        """The next message with this key."""
        while wanted not in (message := json.loads(self._line())):
            pass
        return message

    def close(self) -> None:
        self.listener.close()
        if self.connection is not None:
            self.connection.close()

    def _line(self) -> bytes:
        assert self.connection is not None
        while b"\n" not in self._received:
            data = self.connection.recv(4096)
            assert data, "the rank is gone"
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


class Watched:
    """A rank's watchdog, the hub that is played for it, and the exit status once it would end the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hub = PlayedHub()
        self.status: int | None = None
        self.ended = threading.Event()
        self._over = threading.Event()
        self._watchdogs: list[Watchdog] = []
        self._texts = [TOKEN, "h0"]
        monkeypatch.setattr(module, "agreed_integer", lambda *_: self.hub.port)
        monkeypatch.setattr(module, "agreed_text", lambda *_: self._texts.pop(0))
        monkeypatch.setattr(os, "_exit", self._end)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def make(
        self,
        rank: int = 1,
        nodes: tuple[tuple[int, ...], ...] = (),
        seconds: float = SECONDS,
        on_fault: Callable[[str], None] = lambda _: None,
    ) -> Watchdog:
        greetings: list[str] = []
        answering = threading.Thread(target=lambda: greetings.append(self.hub.answer()))
        answering.start()
        watchdog = Watchdog(Mesh(rank, 4, rank, torch.device("cpu"), nodes), seconds, on_fault)
        self._watchdogs.append(watchdog)
        answering.join(PATIENCE_S)
        assert greetings == [f"{TOKEN} {rank} {socket.gethostname()}"]
        return watchdog

    def ends(self) -> int | None:
        """The status with which the process would end now."""
        assert self.ended.wait(PATIENCE_S)
        return self.status

    def close(self) -> None:
        for watchdog in self._watchdogs:  # or their threads end the process of the tests
            watchdog._closing.set()
        self._over.set()
        self.hub.close()
        for watchdog in self._watchdogs:
            watchdog._thread.join(PATIENCE_S)

    def _end(self, status: int) -> None:
        self.status = status
        self.ended.set()
        self._over.wait()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(monkeypatch)
    yield watched
    watched.close()


def test_a_rank_says_where_it_is_and_how_long_that_may_take(watched: Watched) -> None:
    watchdog, tracker = watched.make(), PhaseTracker()
    start = {"phase": "start", "step": 0, "entered": -1, "limit": None}
    assert watched.hub.hear("phase") == start
    tracker.longest = {"data_wait": 1e6}  # forgotten when the clock starts
    with watchdog.getting_on(tracker):
        tracker.step = 3
        tracker.enter("data_wait")
        first_time = {"phase": "data_wait", "step": 3, "entered": 1, "limit": 10 * SECONDS}
        assert watchdog._place() == first_time
        tracker.longest["data_wait"] = 0.01
        assert watchdog._place() == first_time | {"limit": SECONDS}
        tracker.longest["data_wait"] = SECONDS
        assert watchdog._place() == first_time
    assert watchdog._place() == start
    threading.Thread(target=watchdog.close).start()
    assert watched.hub.hear("left") is not None


def test_a_rank_goes_on_saying_where_it_is(watched: Watched) -> None:
    watched.make(seconds=BRISK)
    for _ in range(3):
        watched.hub.hear("phase")
        watched.hub.say(heard=True)


def test_a_hub_that_is_slow_to_read_gets_whole_lines(watched: Watched) -> None:
    """More than buffers hold, sent by one thread, while the other waits for what the hub says from beat to beat."""
    watched.hub.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LINE)
    watchdog = watched.make(seconds=BRISK)
    watchdog._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINE)
    sent: list[dict[str, object]] = [{"filler": f"{number} {'x' * LINE}"} for number in range(20)]
    sending = threading.Thread(target=lambda: [watchdog._send(message) for message in sent])
    sending.start()
    sending.join(3 * BRISK / 10)
    assert sending.is_alive(), "buffers hold less"
    assert [watched.hub.hear("filler") for _ in sent] == sent
    sending.join(PATIENCE_S)


def test_a_verdict_ends_the_rank_with_its_status_and_no_word_of_its_own(
    watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    watched.make(on_fault=told.append)
    watched.hub.say(verdict="rank 3 on host h1: broken", status=2, rank=3)
    assert watched.ends() == 2
    assert told == ["rank 3 on host h1: broken"]
    assert capfd.readouterr().err == ""  # rank 0 speaks for all


@pytest.mark.parametrize("blamed", [1, 2])
def test_only_the_rank_that_broke_shows_its_traceback(
    watched: Watched, capfd: pytest.CaptureFixture[str], blamed: int
) -> None:
    watchdog = watched.make(rank=1)
    thread = threading.Thread(target=watchdog.failed, args=("it broke", 3, RuntimeError("it broke")), daemon=True)
    thread.start()
    assert watched.hub.hear("failed") == {"failed": "it broke", "status": 3}
    watched.hub.say(verdict=f"rank {blamed} on host h0: it broke", status=3, rank=blamed)
    watched.ends()
    assert ("RuntimeError: it broke" in capfd.readouterr().err) == (blamed == 1)
    thread.join(0.1)
    assert thread.is_alive()  # the main thread does nothing more


@pytest.mark.parametrize(
    ("rank", "nodes", "speaks"),
    [
        (1, ((0, 1), (2, 3)), True),
        (2, ((0, 1), (2, 3)), True),
        (3, ((0, 1), (2, 3)), False),
        (0, ((0,), (1,), (2,), (3,)), True),
        (3, ((0,), (1,), (2,), (3,)), True),
    ],
)
def test_when_rank_0_is_lost_one_rank_of_each_host_speaks(
    watched: Watched, capfd: pytest.CaptureFixture[str], rank: int, nodes: tuple[tuple[int, ...], ...], speaks: bool
) -> None:
    """Rank 0 itself where it is alone on its host."""
    watchdog = watched.make(1)
    watchdog._mesh = Mesh(rank, 4, 0, torch.device("cpu"), nodes)
    assert watched.hub.connection is not None
    watched.hub.connection.close()
    assert watched.ends() == FAULT_STATUS
    expected = "error: rank 0 on host h0: ended without a word\n" if speaks else ""
    assert capfd.readouterr().err == expected


@pytest.mark.parametrize("letter", ["x", "\N{SNOWMAN}", "\N{GRINNING FACE}", "\x00", "\udc80"])
def test_what_is_told_of_an_error_is_bounded(watched: Watched, letter: str) -> None:
    threading.Thread(target=watched.make().failed, args=(letter * 100_000,), daemon=True).start()
    told = watched.hub.hear("failed")
    assert told["failed"] == letter * 1024
    assert len(encoded(told)) < LINE


def test_when_the_hub_falls_silent_the_rank_ends_in_time(watched: Watched, capfd: pytest.CaptureFixture[str]) -> None:
    watchdog = watched.make()
    ending = threading.Thread(target=watchdog._take_in, args=(None, 2.0), daemon=True)
    for _ in range(3):
        assert not watchdog._take_in(None, SECONDS - 1)
        assert not watchdog._take_in(encoded({"heard": True}), 1.0)  # as long as it hears this, it stays
    assert not watchdog._take_in(None, SECONDS - 1)
    assert watched.status is None
    ending.start()
    assert watched.ends() == FAULT_STATUS
    assert "error: rank 0 on host h0: not heard of for 61 s: stopped, or cut off\n" in capfd.readouterr().err


def test_a_leap_of_the_clock_is_no_silence_of_the_hub(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    leap = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + leap[0]))
    watchdog = watched.make()
    turns: list[float] = []
    take_in = watchdog._take_in
    monkeypatch.setattr(
        watchdog, "_take_in", lambda data, elapsed_s: turns.append(elapsed_s) or take_in(data, elapsed_s)
    )
    watched.hub.hear("phase")
    leap[0] = 3600.0
    watched.hub.say(heard=True)
    watched.hub.hear("phase")
    assert max(turns, default=0.0) <= 2 * BEAT
    assert watched.status is None


def test_the_end_of_the_watch_is_no_fault(watched: Watched) -> None:
    watchdog = watched.make()
    watched.hub.say(over=True)
    watchdog._thread.join(PATIENCE_S)
    assert watched.hub.connection is not None
    watched.hub.connection.close()
    watchdog.close()
    watchdog.failed("afterwards nothing is told, and it returns")
    assert watched.status is None


def test_last_words_that_do_not_end_hold_nobody_up(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    forever = threading.Event()

    def linger(_: str) -> None:
        forever.wait()

    watched.make(on_fault=linger)
    watched.hub.say(verdict="v", status=3, rank=None)
    assert watched.ends() == 3
    forever.set()


def test_a_rank_that_is_sent_away_comes_again(watched: Watched) -> None:
    """As happens among many strangers, or when the hub has no descriptor left."""

    def send_away_twice() -> None:
        for _ in range(2):
            watched.hub.listener.accept()[0].close()

    crowded = threading.Thread(target=send_away_twice)
    crowded.start()
    joined: list[tuple[socket.socket, bytes]] = []
    address = "127.0.0.1", watched.hub.port
    joining = threading.Thread(target=lambda: joined.append(module._join(address, b"greeting\n", PATIENCE_S)))
    joining.start()
    crowded.join(PATIENCE_S)
    assert watched.hub.answer() == "greeting"
    joining.join(PATIENCE_S)
    [(connection, answer)] = joined
    connection.close()
    assert answer == encoded({"heard": True})


def test_a_hub_that_never_answers_is_an_error_that_says_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(OSError, match=f"rank 0's watchdog at 127.0.0.1:{address[1]} does not answer"):
        module._join(address, b"greeting\n", 0.0)


def test_one_rank_needs_no_thread() -> None:
    watchdog = Watchdog(Mesh(0, 1, 0, torch.device("cpu")), SECONDS)
    watchdog.failed("nobody is told")
    watchdog.close()
