"""The watchdog on one rank, with a socket in place of the hub. tests/distributed/faults tests real ranks."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bert.parallel.mesh import Mesh
from bert.parallel.watchdog import watchdog as module
from bert.parallel.watchdog.judge import FAULT_STATUS, LINE, encoded
from bert.parallel.watchdog.watchdog import Watchdog
from bert.timing.phases import PhaseTracker
from tests.programs import PATIENCE_S

SECONDS = 60.0
BRISK = 5.0
"""Timeout in seconds for a rank that must report several times in a test. It reports ten times in this period."""


class PlayedHub:
    """Listener in place of rank 0, with the watchdog of one rank connected to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connection = self.listener
        self.status: int | None = None
        self.ended, self._over = threading.Event(), threading.Event()
        self._watchdogs: list[Watchdog] = []
        self._received = b""
        texts = ["secret", "h0"]
        monkeypatch.setattr(module, "agreed_integer", lambda *_: self.listener.getsockname()[1])
        monkeypatch.setattr(module, "agreed_text", lambda *_: texts.pop(0))
        monkeypatch.setattr(os, "_exit", self._end)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def watch(self, nodes: tuple[tuple[int, ...], ...] = (), seconds: float = SECONDS, rank: int = 1) -> Watchdog:
        answering = threading.Thread(target=self.answer)
        answering.start()
        self._watchdogs.append(Watchdog(Mesh(rank, 4, rank, torch.device("cpu"), nodes), seconds))
        answering.join(PATIENCE_S)
        return self._watchdogs[-1]

    def answer(self) -> None:
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(PATIENCE_S)
        self.say(heard=True)
        assert self._line().startswith(b"secret ")

    def say(self, **message: object) -> None:
        self.connection.sendall(encoded(message))

    def hear(self, wanted: str) -> dict[str, Any]:
        """Return the next message with this key."""
        while wanted not in (message := json.loads(self._line())):
            pass
        return message

    def _line(self) -> bytes:
        while b"\n" not in self._received:
            data = self.connection.recv(4096)
            assert data, "the rank is gone"
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def ends(self) -> int | None:
        """Return the status with which the process would exit."""
        assert self.ended.wait(PATIENCE_S)
        return self.status

    def close(self) -> None:
        for watchdog in self._watchdogs:  # otherwise the watchdog's threads would end the test process
            watchdog._closing.set()
        self._over.set()
        self.listener.close()
        self.connection.close()
        for watchdog in self._watchdogs:
            watchdog._thread.join(PATIENCE_S)

    def _end(self, status: int) -> None:
        self.status = status
        self.ended.set()
        self._over.wait()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedHub]:
    hub = PlayedHub(monkeypatch)
    yield hub
    hub.close()


def test_a_rank_reports_its_phase_and_how_long_that_may_take(hub: PlayedHub) -> None:
    watchdog, tracker = hub.watch(seconds=BRISK), PhaseTracker()
    assert hub.hear("phase") == {"phase": "start", "step": 0, "entered": -1, "limit": None}
    hub.say(heard=True)
    tracker.longest = {"data_wait": 1e6}  # starting the clock discards this value
    with watchdog.expect_progress(tracker):
        tracker.step = 3
        tracker.enter("data_wait")
        for longest, limit in ((None, 10 * BRISK), (0.01, BRISK), (BRISK, 10 * BRISK)):
            tracker.longest |= {} if longest is None else {"data_wait": longest}
            while (told := hub.hear("phase"))["phase"] != "data_wait" or told["limit"] != limit:
                hub.say(heard=True)
    threading.Thread(target=watchdog.close).start()
    assert hub.hear("left") is not None


def test_a_hub_that_is_slow_to_read_gets_whole_lines(hub: PlayedHub) -> None:
    """Send more than the buffers hold from one thread while the other reports."""
    hub.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LINE)
    watchdog = hub.watch(seconds=BRISK)
    watchdog._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINE)
    sent: list[dict[str, object]] = [{"filler": f"{number} {'x' * LINE}"} for number in range(20)]
    sending = threading.Thread(target=lambda: [watchdog._send(message) for message in sent])
    sending.start()
    sending.join(3 * BRISK / 10)
    assert sending.is_alive(), "buffers hold less"
    assert [hub.hear("filler") for _ in sent] == sent
    sending.join(PATIENCE_S)


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}", "\x00", "\udc80"])
def test_the_message_of_an_error_is_bounded(hub: PlayedHub, letter: str) -> None:
    threading.Thread(target=hub.watch().failed, args=(letter * 100_000,), daemon=True).start()
    told = hub.hear("failed")
    assert told["failed"] == letter * 1024
    assert len(encoded(told)) < LINE


@pytest.mark.parametrize(
    ("rank", "nodes", "speaks"),
    [
        (1, ((0, 1), (2, 3)), True),
        (3, ((0, 1), (2, 3)), False),
        (0, ((0,), (1,), (2,), (3,)), True),
    ],
)
def test_when_rank_0_is_lost_one_rank_of_each_host_speaks(
    hub: PlayedHub, capfd: pytest.CaptureFixture[str], rank: int, nodes: tuple[tuple[int, ...], ...], speaks: bool
) -> None:
    """Rank 0 itself reports if it is alone on its host."""
    watchdog = hub.watch()
    watchdog._mesh = Mesh(rank, 4, 0, torch.device("cpu"), nodes)
    hub.connection.close()
    assert hub.ends() == FAULT_STATUS
    expected = "error: rank 0 on host h0: ended without a word\n" if speaks else ""
    assert capfd.readouterr().err == expected


def test_a_rank_that_is_sent_away_comes_again(hub: PlayedHub) -> None:
    """The hub rejects ranks when many strangers connect or when it has no file descriptor left."""

    def send_away_then_answer() -> None:
        for _ in range(2):
            hub.listener.accept()[0].close()
        hub.answer()

    crowded = threading.Thread(target=send_away_then_answer)
    crowded.start()
    hub._watchdogs.append(Watchdog(Mesh(1, 4, 1, torch.device("cpu")), SECONDS))
    crowded.join(PATIENCE_S)
    hub.say(over=True)
    hub._watchdogs[-1]._thread.join(PATIENCE_S)
    hub.connection.close()  # closing after the end of the watch is not a fault
    assert hub.status is None


def test_last_words_that_do_not_end_hold_nobody_up(hub: PlayedHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    hub.watch()._on_fault = lambda _: [threading.Event().wait()].clear()
    hub.say(verdict="v", status=3, rank=None)
    assert hub.ends() == 3


def test_a_hub_that_never_answers_is_an_error_that_says_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(OSError, match=f"127.0.0.1:{address[1]} does not answer"):
        module._join(address, b"greeting\n", 0.0)
