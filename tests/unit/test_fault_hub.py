"""The hub that hears every rank and decides, and a rank's own thread, each with its other side played over a socket."""

import contextlib
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

from bert import faults
from bert.faults import FAULT_STATUS, FaultWatch, _Hub
from bert.metrics import Stage
from bert.parallel.mesh import Mesh

SECONDS = 0.6
BEAT = 0.06
TOKEN = "secret"


class Line:
    """One end of a connection that speaks in lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.received = b""

    def say(self, **message: object) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, wanted: str, seconds: float = 5.0) -> dict[str, Any] | None:
        """The next message with this key, or None if there is none in time or the connection ends."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            line, end, rest = self.received.partition(b"\n")
            if end:
                self.received = rest
                if wanted in (message := json.loads(line)):
                    return message
                continue
            self.socket.settimeout(left)
            try:
                data = self.socket.recv(4096)
            except (TimeoutError, ConnectionError):
                return None
            if not data:
                return None
            self.received += data
        return None


class Rank(Line):
    """A rank as the hub sees it, which goes on saying where it is until it is told otherwise."""

    def __init__(self, port: int, rank: int, host: str) -> None:
        super().__init__(socket.create_connection(("127.0.0.1", port)))
        self.say(token=TOKEN, rank=rank, host=host)
        self.place: dict[str, object] = {"phase": "start", "step": 0, "entered": -1, "limit": None}
        self._silent = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def at(self, phase: str, step: int, entered: int = 1, limit: float | None = SECONDS) -> None:
        self.place = {"phase": phase, "step": step, "entered": entered, "limit": limit}
        self.say(**self.place)

    def be_silent(self) -> None:
        self._silent.set()
        self._thread.join()

    def end(self) -> None:
        self.be_silent()
        self.socket.close()

    def verdict(self, seconds: float = 5.0) -> dict[str, Any] | None:
        return self.hear("verdict", seconds)

    def _beat(self) -> None:
        while not self._silent.wait(BEAT):
            try:
                self.say(**self.place)
            except OSError:
                return


@pytest.fixture
def hub() -> Iterator[Callable[..., tuple[_Hub, list[Rank], int]]]:
    hubs: list[_Hub] = []
    everybody: list[Rank] = []

    def make(count: int = 3, joined: int | None = None) -> tuple[_Hub, list[Rank], int]:
        listener = faults._listen(count)
        port = listener.getsockname()[1]
        hub = _Hub(listener, count, SECONDS, BEAT, TOKEN)
        hub.start()
        hubs.append(hub)
        ranks = [Rank(port, rank, f"h{rank // 2}") for rank in range(count if joined is None else joined)]
        everybody.extend(ranks)
        wait_until(lambda: hub.hosts[: len(ranks)] == [f"h{rank // 2}" for rank in range(len(ranks))])
        return hub, ranks, port

    yield make
    for rank in everybody:
        rank.end()
    for hub in hubs:
        hub.close()


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


MakeHub = Callable[..., tuple[_Hub, list[Rank], int]]


def test_an_end_without_a_word_is_told_to_all_others(hub: MakeHub) -> None:
    _, ranks, _ = hub(4)
    ranks[3].at("reduce", 1201)
    time.sleep(3 * BEAT)
    ranks[3].end()
    expected = "rank 3 on host h1: ended without a word, last in reduce of step 1201"
    for rank in ranks[:3]:
        verdict = rank.verdict()
        assert verdict is not None
        assert (verdict["verdict"], verdict["status"], verdict["rank"]) == (expected, FAULT_STATUS, 3)


def test_who_said_good_bye_may_go(hub: MakeHub) -> None:
    made, ranks, _ = hub()
    ranks[2].be_silent()
    ranks[2].say(left=True)
    ranks[2].socket.close()
    assert ranks[0].verdict(1.5 * SECONDS) is None
    threading.Thread(target=made.close).start()
    assert ranks[1].hear("over") is not None


def test_silence_is_an_end_in_its_time_and_not_before(hub: MakeHub) -> None:
    _, ranks, _ = hub()
    ranks[1].at("forward_backward", 7, limit=100)
    ranks[1].be_silent()
    begin = time.monotonic()
    verdict = ranks[0].verdict()
    assert 0.8 * SECONDS < time.monotonic() - begin < 3 * SECONDS
    assert verdict is not None
    assert verdict["verdict"] == (
        "rank 1 on host h0: not heard of for 1 s, last in forward_backward of step 7: stopped, or cut off"
    )
    assert (verdict["status"], verdict["rank"]) == (FAULT_STATUS, 1)


def test_all_who_are_silent_are_named() -> None:
    """Those of a host that is cut off fall silent within a beat, and who has missed none is not one of them."""
    with faults._listen(4) as listener:
        hub = _Hub(listener, 4, SECONDS, BEAT, TOKEN)
        for member, silence in zip(hub._members, (0.9 * BEAT, 2 * BEAT, SECONDS + 0.01, SECONDS - BEAT), strict=True):
            member.host, member.silence_s = f"h{member.rank // 2}", silence
        verdict = hub._check()
    assert verdict is not None
    assert verdict.text.startswith("rank 2 on host h1, rank 3 on host h1: not heard of for 1 s")


def test_a_rank_that_never_comes_is_silent_too(hub: MakeHub) -> None:
    _, ranks, _ = hub(3, joined=2)
    verdict = ranks[1].verdict()
    assert verdict is not None
    assert verdict["verdict"].startswith("rank 2 on host unknown: not heard of for ")


def test_more_than_eight_are_counted(hub: MakeHub) -> None:
    _, ranks, _ = hub(12, joined=1)
    verdict = ranks[0].verdict()
    assert verdict is not None
    assert verdict["verdict"].count(" on host ") == 8
    assert "rank 8 on host unknown and 3 more: not heard" in verdict["verdict"]


@pytest.mark.parametrize(
    ("behind", "ahead"),
    [
        (("data_wait", 5), ("forward_backward", 5)),
        (("forward_backward", 5), ("reduce", 5)),
        (("update", 5), ("statistics", 5)),
        (("statistics", 5), ("evaluation", 5)),
        (("update", 5), ("data_wait", 6)),
    ],
)
def test_who_stands_still_furthest_behind_is_named(
    hub: MakeHub, behind: tuple[str, int], ahead: tuple[str, int]
) -> None:
    _, ranks, _ = hub()
    for rank in (ranks[0], ranks[2]):
        rank.at(*ahead)
    ranks[1].at(*behind)
    verdict = ranks[2].verdict()
    assert verdict is not None
    assert verdict["verdict"] == (
        f"rank 1 on host h0: standing still for 1 s in {behind[0]} of step {behind[1]}, "
        f"and the others wait for it in {ahead[0]} of step {ahead[1]}"
    )
    assert (verdict["status"], verdict["rank"]) == (FAULT_STATUS, 1)


def test_all_in_the_same_place_blames_nobody(hub: MakeHub) -> None:
    _, ranks, _ = hub()
    for rank in ranks:
        rank.at("reduce", 9)
    verdict = ranks[0].verdict()
    assert verdict is not None
    assert verdict["verdict"] == "no rank gets on: all 3 stand still for 1 s in reduce of step 9"
    assert (verdict["status"], verdict["rank"]) == (FAULT_STATUS, None)


def test_a_rank_that_does_not_end_when_the_others_have_is_named(hub: MakeHub) -> None:
    _, ranks, _ = hub()
    ranks[1].at("checkpoint_write", 9)
    verdict = ranks[0].verdict()
    assert verdict is not None
    assert verdict["verdict"] == "rank 1 on host h0: standing still for 1 s in checkpoint_write of step 9"


def test_a_rank_has_the_time_that_it_asks_for(hub: MakeHub) -> None:
    """The others' time is up long before, but it is not for them that anybody waits."""
    _, ranks, _ = hub()
    for rank in (ranks[0], ranks[2]):
        rank.at("reduce", 5)
    ranks[1].at("data_wait", 5, limit=2.5 * SECONDS)
    assert ranks[0].verdict(1.5 * SECONDS) is None
    verdict = ranks[0].verdict()
    assert verdict is not None
    assert verdict["verdict"].startswith("rank 1 on host h0: standing still for 2 s in data_wait")


def test_whoever_gets_on_is_left_alone(hub: MakeHub) -> None:
    """In the same phase of the same step again, as with several micro-batches: entered counts."""
    _, ranks, _ = hub()
    for rank in (ranks[0], ranks[2]):
        rank.at("reduce", 5, limit=100)
    for entered in range(5):
        ranks[1].at("data_wait", 5, entered=entered)
        assert ranks[0].verdict(SECONDS / 3) is None


def test_the_hub_is_heard_as_long_as_all_is_well(hub: MakeHub) -> None:
    _, ranks, _ = hub()
    for rank in ranks:
        for _ in range(5):
            assert rank.hear("heard", SECONDS) is not None


def test_before_the_clock_only_signs_of_life_count(hub: MakeHub) -> None:
    _, ranks, _ = hub()
    ranks[0].at("reduce", 1, limit=100)
    assert ranks[0].verdict(1.5 * SECONDS) is None
    ranks[1].end()
    verdict = ranks[0].verdict()
    assert verdict is not None
    assert verdict["verdict"] == "rank 1 on host h0: ended without a word, last in start"


def test_an_error_ends_all_with_its_status(hub: MakeHub) -> None:
    _, ranks, _ = hub()
    begin = time.monotonic()
    ranks[2].say(failed="no such file", status=2)
    ranks[0].say(failed="Connection closed by peer", status=FAULT_STATUS)
    for rank in ranks:
        verdict = rank.verdict()
        assert verdict is not None
        found = verdict["verdict"], verdict["status"], verdict["rank"]
        assert found == ("rank 2 on host h1: no such file", 2, 2)
    assert time.monotonic() - begin > 0.4  # it has waited for news of a lost rank


def test_a_lost_rank_is_why_others_have_errors(hub: MakeHub) -> None:
    _, ranks, _ = hub()
    ranks[0].say(failed="Connection closed by peer", status=2)
    time.sleep(0.2)
    ranks[1].end()
    verdict = ranks[2].verdict()
    assert verdict is not None
    assert verdict["verdict"].startswith("rank 1 on host h0: ended without a word")
    assert verdict["status"] == FAULT_STATUS


def test_who_does_not_know_the_token_is_sent_away_whatever_it_says(hub: MakeHub) -> None:
    _, ranks, port = hub(2)
    for said in (
        b'{"token": "guess", "rank": 1, "host": "x"}\n{"failed": "no", "status": 0}\n',
        b"[1]\n",
        b"\xff\xfe\n",
        b"x" * 10_000,
        b"",
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
            if not said:
                stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100) == b""
    assert ranks[0].verdict(SECONDS) is None


def test_messages_may_come_in_pieces_or_together(hub: MakeHub) -> None:
    made, _, port = hub(2, joined=1)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        text = json.dumps({"token": TOKEN, "rank": 1, "host": "pieces"}).encode()
        connection.sendall(text[:9])
        time.sleep(2 * BEAT)
        connection.sendall(text[9:] + b'\nnot json\n{"failed": "in a row", "status": 2}\n')
        verdict = Line(connection).hear("verdict")
    assert made.hosts[1] == "pieces"
    assert verdict is not None
    assert verdict["verdict"] == "rank 1 on host pieces: in a row"


def test_a_machine_that_was_stopped_blames_nobody(hub: MakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock makes a leap: what has passed meanwhile counts as one turn."""
    _, ranks, _ = hub()
    leap = [0.0]
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + leap[0]))
    leap[0] = 3600.0
    assert ranks[0].verdict(SECONDS) is None


# --- a rank's own thread -------------------------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[..., FaultWatch], Line, list[int]]]:
    """A maker of the watch of one rank, its connection to a hub that the test plays, and the exit status when it ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        statuses: list[int] = []
        watches: list[FaultWatch] = []
        over = threading.Event()
        hub = Line(listener)

        def end(status: int) -> None:
            statuses.append(status)
            over.wait()

        def make(rank: int = 1, nodes: tuple[tuple[int, ...], ...] = ()) -> FaultWatch:
            watch = FaultWatch(Mesh(rank, 4, rank, torch.device("cpu"), nodes), SECONDS)
            watches.append(watch)
            hub.socket, _ = listener.accept()
            assert hub.hear("token") == {"token": TOKEN, "rank": rank, "host": socket.gethostname()}
            return watch

        texts = iter([TOKEN, "h0"])
        monkeypatch.setattr(faults, "agreed_integer", lambda *_: listener.getsockname()[1])
        monkeypatch.setattr(faults, "agreed_text", lambda *_: next(texts))
        monkeypatch.setattr(os, "_exit", end)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        yield make, hub, statuses
        for watch in watches:  # or their threads end the process of the tests
            watch._closing.set()
            over.set()
            watch._thread.join(5)
        if hub.socket is not listener:
            hub.socket.close()


Watched = tuple[Callable[..., FaultWatch], Line, list[int]]


def test_a_rank_says_where_it_is_and_how_long_that_may_take(watched: Watched) -> None:
    make, hub, _ = watched
    watch, stage = make(), Stage()
    assert hub.hear("phase") == {"phase": "start", "step": 0, "entered": -1, "limit": None}
    stage.longest = {"data_wait": 1e6}  # forgotten when the clock starts
    with watch.getting_on(stage):
        stage.step = 3
        stage.enter("data_wait")
        wait_until(lambda: (hub.hear("phase") or {}).get("phase") == "data_wait")
        said = hub.hear("phase")
        assert said == {"phase": "data_wait", "step": 3, "entered": 1, "limit": 10 * SECONDS}  # for the first time
        stage.longest["data_wait"] = 0.01
        wait_until(lambda: (hub.hear("phase") or {}).get("limit") == SECONDS)
        stage.longest["data_wait"] = SECONDS
        wait_until(lambda: (hub.hear("phase") or {}).get("limit") == 10 * SECONDS)
    wait_until(lambda: (hub.hear("phase") or {}).get("limit", 0) is None)
    threading.Thread(target=watch.close).start()
    assert hub.hear("left") is not None


def test_the_beats_are_several_in_the_time(watched: Watched) -> None:
    make, hub, _ = watched
    make()
    begin = time.monotonic()
    for _ in range(5):
        assert hub.hear("phase") is not None
    assert time.monotonic() - begin < SECONDS


def test_a_verdict_ends_the_rank_with_its_status_and_no_word_of_its_own(
    watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    make, hub, statuses = watched
    watch, told = make(), []
    watch.on_fault = told.append
    hub.say(verdict="rank 3 on host h1: broken", status=2, rank=3)
    wait_until(lambda: bool(statuses))
    assert statuses == [2]
    assert told == ["rank 3 on host h1: broken"]
    assert capfd.readouterr().err == ""  # rank 0 speaks for all


@pytest.mark.parametrize("blamed", [1, 2])
def test_only_the_rank_that_broke_shows_its_traceback(
    watched: Watched, capfd: pytest.CaptureFixture[str], blamed: int
) -> None:
    make, hub, statuses = watched
    watch = make(rank=1)
    thread = threading.Thread(target=watch.failed, args=("it broke", 3, RuntimeError("it broke")), daemon=True)
    thread.start()
    assert hub.hear("failed") == {"failed": "it broke", "status": 3}
    hub.say(verdict=f"rank {blamed} on host h0: it broke", status=3, rank=blamed)
    wait_until(lambda: bool(statuses))
    assert ("RuntimeError: it broke" in capfd.readouterr().err) == (blamed == 1)
    thread.join(0.2)
    assert thread.is_alive()  # the main thread does nothing more


@pytest.mark.parametrize(("rank", "speaks"), [(1, True), (2, True), (3, False)])
def test_when_rank_0_is_lost_one_rank_of_each_host_speaks(
    watched: Watched, capfd: pytest.CaptureFixture[str], rank: int, speaks: bool
) -> None:
    make, hub, statuses = watched
    make(rank, ((0, 1), (2, 3)))
    hub.socket.close()
    wait_until(lambda: bool(statuses))
    assert statuses == [FAULT_STATUS]
    expected = "error: rank 0 on host h0: ended without a word\n" if speaks else ""
    assert capfd.readouterr().err == expected


def test_what_is_told_of_an_error_is_bounded(watched: Watched) -> None:
    make, hub, _ = watched
    threading.Thread(target=make().failed, args=("x" * 100_000,), daemon=True).start()
    told = hub.hear("failed")
    assert told is not None
    assert len(told["failed"]) == 2048


def test_when_the_hub_falls_silent_the_rank_ends_in_time(watched: Watched, capfd: pytest.CaptureFixture[str]) -> None:
    make, hub, statuses = watched
    make()
    for _ in range(4):
        time.sleep(SECONDS / 3)
        hub.say(heard=True)  # as long as it hears this, it stays
    assert statuses == []
    begin = time.monotonic()
    wait_until(lambda: bool(statuses))
    assert 0.8 * SECONDS < time.monotonic() - begin < 3 * SECONDS
    assert "error: rank 0 on host h0: not heard of for 1 s: stopped, or cut off\n" in capfd.readouterr().err


def test_a_leap_of_the_clock_is_no_silence_of_the_hub(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    make, hub, statuses = watched
    make()
    assert hub.hear("phase") is not None
    leap = [0.0]
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + leap[0]))
    leap[0] = 3600.0
    time.sleep(SECONDS / 3)
    assert statuses == []


def test_the_end_of_the_watch_is_no_fault(watched: Watched) -> None:
    make, hub, statuses = watched
    watch = make()
    hub.say(over=True)
    watch._thread.join(5)
    hub.socket.close()
    time.sleep(2 * SECONDS)
    assert statuses == []
    watch.close()
    watch.failed("afterwards nothing is told, and it returns")


def test_last_words_that_do_not_end_hold_nobody_up(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    make, hub, statuses = watched
    monkeypatch.setattr(faults, "_GRACE_S", 0.3)
    watch = make()
    watch.on_fault = lambda _: time.sleep(10)
    hub.say(verdict="v", status=3, rank=None)
    wait_until(lambda: statuses == [3], 2)


def test_one_rank_needs_no_thread() -> None:
    watch = FaultWatch(Mesh(0, 1, 0, torch.device("cpu")), SECONDS)
    assert watch.hosts == [socket.gethostname()]
    watch.failed("nobody is told")
    watch.close()
