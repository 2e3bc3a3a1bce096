"""The watchdog's hub, turn by turn, with ranks and strangers played over sockets. Time is what the tests say has passed."""

import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert.parallel.watchdog import hub as watchdog_hub
from bert.parallel.watchdog.hub import FAULT_STATUS, LINE, Ending, Hub, _Member, encoded
from bert.parallel.watchdog.watchdog import listen
from tests.programs import PATIENCE_S

SECONDS = 60.0
BEAT = 6.0
TOKEN = "secret"


class Peer:
    """Rank or stranger that has connected to the hub."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def hear(self, wanted: str) -> dict[str, Any]:
        """The next message with this key."""
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
        """Wait for the end of the connection."""
        with suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True

    def may_stay(self) -> bool:
        """Tell whether the connection has not ended."""
        self.socket.setblocking(False)
        try:
            return self.socket.recv(1) != b""
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        finally:
            self.socket.settimeout(PATIENCE_S)


class Rank(Peer):
    """A rank as the hub sees it."""

    def __init__(self, port: int, member: _Member) -> None:
        super().__init__(port)
        self.member = member
        self.place: dict[str, object] = {"phase": "start", "step": 0, "entered": -1, "limit": None}

    def greet(self) -> None:
        self.socket.sendall(f"{TOKEN} {self.member.rank} h{self.member.rank // 2}\n".encode())

    def say(self, **message: object) -> None:
        self.socket.sendall(encoded(message))

    def verdict(self) -> tuple[str, int, int | None]:
        told = self.hear("verdict")
        return told["verdict"], told["status"], told["rank"]


class Played:
    """A hub and its ranks. It takes turns as the tests say."""

    def __init__(self, count: int, joined: int | None = None) -> None:
        self._listener = listen()
        self.port = self._listener.getsockname()[1]
        self.hub = Hub(self._listener, [""] * count, SECONDS, BEAT, TOKEN)
        self.ranks: list[Rank] = []
        for member in self.hub._members[:joined]:
            self.ranks.append(Rank(self.port, member))
            self.ranks[-1].greet()
            self.hub.listen(0.0)  # the system queues some thousand connections at most, or some hundred
        self.beating = list(self.ranks)
        self.until(lambda: all(rank.member.connection for rank in self.ranks))
        self.beat()

    def until(self, condition: Callable[[], object]) -> None:
        """Let the hub listen until ``condition()`` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            self.hub.listen(0.1)

    def beat(self, *ranks: Rank) -> None:
        """Let these ranks, or all that beat, say where they are, and the hub hear it."""
        for rank in ranks or self.beating:
            rank.member.heard_s = -1.0
            rank.say(**rank.place)
        self.until(lambda: all(rank.member.heard_s >= 0 for rank in ranks or self.beating))

    def at(self, rank: Rank, phase: str, step: int, entered: int = 1, limit: float | None = SECONDS) -> None:
        rank.place = {"phase": phase, "step": step, "entered": entered, "limit": limit}
        self.beat(rank)

    def after(self, seconds: float) -> Ending | None:
        """The verdict, if there is one within so much time, in which all that beat do."""
        passed_s = 0.0
        while self.hub.verdict is None and passed_s < seconds:
            passed_s += BEAT / 4
            self.hub.decide(BEAT / 4)
            if self.hub.verdict is None:
                self.beat()
        return self.hub.verdict

    def ended(self, seconds: float = SECONDS + BEAT) -> Ending:
        """The verdict, which comes within so much time."""
        verdict = self.after(seconds)
        assert verdict is not None
        return verdict

    def silence(self, *ranks: Rank) -> None:
        self.beating = [rank for rank in self.beating if rank not in ranks]

    def end(self, rank: Rank) -> None:
        """The rank's process ends, and the hub notices."""
        self.silence(rank)
        rank.socket.close()
        self.until(lambda: rank.member.connection is None)

    def stranger(self, said: bytes = b"") -> Peer:
        """Somebody who has connected, said something and been noticed."""
        known = dict(self.hub._strangers)
        peer = Peer(self.port)
        with suppress(ConnectionError):
            peer.socket.sendall(said)
        self.until(lambda: self.hub._strangers != known or not peer.may_stay())
        return peer

    def close(self) -> None:
        for member in self.hub._members:
            if member.connection is not None:
                member.connection.close()
        for stranger in list(self.hub._strangers):
            stranger.close()
        for rank in self.ranks:
            rank.socket.close()
        self._listener.close()


Play = Callable[..., Played]


@pytest.fixture
def play() -> Iterator[Play]:
    with ExitStack() as stack:

        def make(count: int = 3, joined: int | None = None) -> Played:
            played = Played(count, joined)
            stack.callback(played.close)
            return played

        yield make


# --- who is to blame -------------------------------------------------------------------------------------------------


def test_an_end_without_a_word_is_told_to_all_others(play: Play) -> None:
    hub = play(4)
    hub.at(hub.ranks[3], "reduce", 1201)
    hub.end(hub.ranks[3])
    hub.after(BEAT)
    expected = "rank 3 on host h1: ended without a word, last in reduce of step 1201"
    for rank in hub.ranks[:3]:
        assert rank.verdict() == (expected, FAULT_STATUS, 3)


def test_who_said_good_bye_may_go(play: Play) -> None:
    hub = play()
    hub.ranks[2].say(left=True)
    hub.until(lambda: hub.ranks[2].member.left)
    hub.end(hub.ranks[2])
    assert hub.after(2 * SECONDS) is None
    hub.hub.start()
    hub.hub.close(PATIENCE_S)
    assert hub.ranks[1].hear("over") == {"over": True}


def test_a_greeting_that_is_replayed_changes_nothing(play: Play) -> None:
    hub = play()
    assert hub.stranger(f"{TOKEN} 1 elsewhere\n".encode()).is_sent_away()
    assert hub.after(2 * SECONDS) is None
    assert hub.ranks[1].member.host == "h0"
    hub.end(hub.ranks[1])
    assert hub.stranger(f"{TOKEN} 1 elsewhere\n".encode()).is_sent_away()
    assert hub.ended(BEAT).text.startswith("rank 1 on host h0: ended without a word")


def test_silence_is_an_end_in_its_time_and_not_before(play: Play) -> None:
    hub = play()
    hub.at(hub.ranks[1], "forward_backward", 7, limit=1000)
    hub.silence(hub.ranks[1])
    assert hub.after(SECONDS) is None
    expected = "rank 1 on host h0: not heard of for 62 s, last in forward_backward of step 7: stopped, or cut off"
    assert hub.ended(BEAT) == Ending(expected, FAULT_STATUS, 1)


def test_all_who_are_silent_are_named(play: Play) -> None:
    """Those of a host that is cut off fall silent within a beat, and who has missed none is not one of them."""
    hub = play(4)
    hub.silence(hub.ranks[2])
    hub.after(BEAT)
    hub.silence(hub.ranks[3])
    hub.after(SECONDS - 2 * BEAT)
    hub.silence(hub.ranks[1])
    verdict = hub.ended(2 * BEAT)
    assert verdict.text.startswith("rank 2 on host h1, rank 3 on host h1: not heard of for 6")


def test_a_rank_that_never_comes_is_silent_too(play: Play) -> None:
    """Of more than eight, the others are counted."""
    assert play(3, joined=2).ended().text.startswith("rank 2 on host unknown: not heard of for ")
    text = play(12, joined=1).ended().text
    assert text.count(" on host ") == 8
    assert "rank 8 on host unknown and 3 more: not heard" in text


@pytest.mark.parametrize(
    ("behind", "ahead"),
    [
        (("data_wait", 5), ("forward_backward", 5)),
        (("forward_backward", 5), ("reduce", 5)),
        (("forward_backward", 5), ("exchange in forward_backward", 5)),
        (("exchange in forward_backward", 5), ("reduce", 5)),
        (("exchange in evaluation", 5), ("data_wait", 6)),
        (("update", 5), ("statistics", 5)),
        (("statistics", 5), ("evaluation", 5)),
        (("update", 5), ("data_wait", 6)),
    ],
)
def test_who_stands_still_furthest_behind_is_named(play: Play, behind: tuple[str, int], ahead: tuple[str, int]) -> None:
    hub = play()
    for rank in (hub.ranks[0], hub.ranks[2]):
        hub.at(rank, *ahead)
    hub.at(hub.ranks[1], *behind)
    assert hub.after(SECONDS) is None
    expected = (
        f"rank 1 on host h0: standing still for 62 s in {behind[0]} of step {behind[1]}, "
        f"and the others wait for it in {ahead[0]} of step {ahead[1]}"
    )
    assert hub.ended(BEAT) == Ending(expected, FAULT_STATUS, 1)


def test_all_in_the_same_place_blames_nobody(play: Play) -> None:
    hub = play()
    for rank in hub.ranks:
        hub.at(rank, "reduce", 9)
    expected = "no rank gets on: all 3 stand still for 62 s in reduce of step 9"
    assert hub.ended() == Ending(expected, FAULT_STATUS, None)


def test_a_rank_that_does_not_end_when_the_others_have_is_named(play: Play) -> None:
    hub = play()
    hub.at(hub.ranks[1], "checkpoint_write", 9)
    assert hub.ended().text == "rank 1 on host h0: standing still for 62 s in checkpoint_write of step 9"


def test_a_rank_has_the_time_that_it_asks_for(play: Play) -> None:
    """The others' time is up long before, but it is not for them that anybody waits."""
    hub = play()
    for rank in (hub.ranks[0], hub.ranks[2]):
        hub.at(rank, "reduce", 5)
    hub.at(hub.ranks[1], "data_wait", 5, limit=2.5 * SECONDS)
    assert hub.after(2.4 * SECONDS) is None
    verdict = hub.ended(SECONDS)
    assert verdict.text.startswith("rank 1 on host h0: standing still for 152 s in data_wait")


def test_whoever_gets_on_is_left_alone(play: Play) -> None:
    """In the same phase of the same step again, as with several micro-batches: entered counts."""
    hub = play()
    for rank in (hub.ranks[0], hub.ranks[2]):
        hub.at(rank, "reduce", 5, limit=1000)
    for entered in range(5):
        hub.at(hub.ranks[1], "data_wait", 5, entered=entered)
        assert hub.after(SECONDS / 2) is None


def test_the_hub_is_heard_as_long_as_all_is_well(play: Play) -> None:
    hub = play()
    for _ in range(5):
        assert hub.after(BEAT) is None
        for rank in hub.ranks:
            assert rank.hear("heard") == {"heard": True}


def test_before_the_clock_only_signs_of_life_count(play: Play) -> None:
    hub = play()
    hub.at(hub.ranks[0], "reduce", 1, limit=1000)
    assert hub.after(2 * SECONDS) is None
    hub.end(hub.ranks[1])
    verdict = hub.ended(BEAT)
    assert verdict.text == "rank 1 on host h0: ended without a word, last in start"


def test_an_error_ends_all_with_its_status(play: Play) -> None:
    hub = play()
    hub.ranks[2].say(failed="no such file", status=2)
    hub.until(lambda: hub.hub._failed)
    hub.ranks[0].say(failed="Connection closed by peer", status=FAULT_STATUS)
    hub.until(lambda: len(hub.hub._failed) == 2)
    hub.hub.decide(0.4)
    assert hub.hub.verdict is None  # it waits for news of a lost rank
    hub.hub.decide(0.2)
    for rank in hub.ranks:
        assert rank.verdict() == ("rank 2 on host h1: no such file", 2, 2)


def test_a_lost_rank_is_why_others_have_errors(play: Play) -> None:
    hub = play()
    hub.ranks[0].say(failed="Connection closed by peer", status=2)
    hub.until(lambda: hub.hub._failed)
    hub.hub.decide(0.4)
    hub.end(hub.ranks[1])
    verdict = hub.ended(BEAT)
    assert verdict.text.startswith("rank 1 on host h0: ended without a word")
    assert verdict.status == FAULT_STATUS


def test_messages_may_come_in_pieces_or_together(play: Play) -> None:
    hub = play(2, joined=1)
    greeting = f"{TOKEN} 1 pieces\n".encode()
    late = hub.stranger(greeting[:9])
    late.socket.sendall(greeting[9:] + b'not json\n{"failed": "in a row", "status": 2}\n')
    hub.until(lambda: hub.hub._failed)
    assert hub.hub.hosts[1] == "pieces"
    hub.hub.decide(0.6)
    assert hub.ranks[0].verdict() == ("rank 1 on host pieces: in a row", 2, 1)


def test_a_machine_that_was_stopped_blames_nobody(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock makes a leap: what has passed meanwhile counts as one turn."""
    hub = play()
    leap = [0.0]
    monkeypatch.setattr(watchdog_hub, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + leap[0]))
    hub.hub.start()
    leap[0] = 3600.0
    deadline = time.monotonic() + PATIENCE_S
    while (now_s := hub.hub._now_s) < 2 * BEAT:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert now_s < 10 * BEAT
    assert hub.hub.verdict is None
    hub.hub.close(PATIENCE_S)


def test_a_rank_may_come_once_more(play: Play) -> None:
    """As one does that has had no answer; its first connection is not missed."""
    hub = play(2, joined=1)
    first, second = Rank(hub.port, hub.hub._members[1]), Rank(hub.port, hub.hub._members[1])
    for attempt in (first, second):
        attempt.greet()
        hub.until(lambda attempt=attempt: _is_connected(hub.hub._members[1], attempt))
    assert first.is_sent_away()
    hub.ranks = hub.beating = [hub.ranks[0], second]
    hub.beat()
    first.socket.close()
    assert hub.after(2 * SECONDS) is None


def _is_connected(member: _Member, rank: Rank) -> bool:
    return member.connection is not None and member.connection.getpeername()[1] == rank.socket.getsockname()[1]


def test_who_gives_up_before_it_was_answered_is_awaited(play: Play) -> None:
    hub = play(2, joined=1)
    early = Rank(hub.port, hub.hub._members[1])
    early.greet()
    hub.until(lambda: early.member.connection)
    early.socket.close()
    hub.until(lambda: early.member.connection is None)
    assert hub.after(BEAT) is None
    hub.ranks = hub.beating = [hub.ranks[0], again := Rank(hub.port, hub.hub._members[1])]
    again.greet()
    hub.until(lambda: again.member.connection)
    assert hub.after(SECONDS) is None


# --- strangers -------------------------------------------------------------------------------------------------------

GARBAGE = {
    "another token": b"guess 1 x\n" + b'{"failed": "no", "status": 0}\n',
    "no such rank": f"{TOKEN} 2 x\n".encode(),
    "a negative rank": f"{TOKEN} -1 x\n".encode(),
    "a long rank": f"{TOKEN} {'9' * 400} x\n".encode(),
    "digits that are none": f"{TOKEN} ² x\n".encode(),
    "token only": f"{TOKEN}\n".encode(),
    "json": b'{"token": "guess", "rank": 1}\n',
    "brackets": b"[" * 1100 + b"\n",
    "bytes": b"\xff\xfe\x00\n",
    "no end": b"x" * 10_000,
    "a web browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_who_does_not_know_the_token_is_sent_away_whatever_it_says(play: Play, said: bytes) -> None:
    hub = play(2)
    assert hub.stranger(said).is_sent_away()
    assert hub.after(SECONDS) is None


def test_who_hangs_up_is_forgotten(play: Play) -> None:
    hub = play(2)
    hub.stranger(b"some").socket.close()
    hub.until(lambda: not hub.hub._strangers)
    assert hub.after(BEAT) is None


def test_a_stranger_has_a_deadline(play: Play) -> None:
    """Silent or slow, and though it never ends a line."""
    hub = play(2)
    silent, slow = hub.stranger(), hub.stranger(b"s")
    for _ in range(9):
        hub.hub.decide(1.0)
        slow.socket.sendall(b"s")
        hub.beat()
    assert silent.may_stay()
    assert hub.hub.verdict is None
    hub.hub.decide(1.5)
    assert silent.is_sent_away()
    assert slow.is_sent_away()
    assert hub.hub._strangers == {}


def test_strangers_are_no_more_than_so_many_and_ranks_come_in_all_the_same(play: Play) -> None:
    hub = play(2, joined=1)
    with ExitStack() as stack:
        crowd = []
        for _ in range(watchdog_hub._STRANGERS + 50):
            crowd.append(Peer(hub.port))
            stack.callback(crowd[-1].socket.close)
            hub.hub.listen(0.0)
        late = Rank(hub.port, hub.hub._members[1])
        late.greet()
        hub.until(lambda: late.member.connection)
        assert len(hub.hub._strangers) <= watchdog_hub._STRANGERS
        assert all(peer.is_sent_away() for peer in crowd[:50])
        assert all(peer.may_stay() for peer in crowd[51:])
        late.socket.close()


def test_a_hub_without_descriptors_keeps_its_ranks_and_lets_others_in_later(play: Play) -> None:
    hub = play(2, joined=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        crowd = [Peer(hub.port) for _ in range(20)]
        for peer in crowd:
            stack.callback(peer.socket.close)
        late = Rank(hub.port, hub.hub._members[1])
        stack.callback(late.socket.close)
        late.greet()
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        highest = max(peer.socket.fileno() for peer in [*crowd, late])
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, hard))
        hub.hub.listen(PATIENCE_S)
        assert hub.hub._deaf_until_s is not None
        assert hub.hub._strangers == {}
        assert hub.after(0.9) is None
        assert late.member.connection is None
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        hub.hub.decide(1.1)
        hub.until(lambda: late.member.connection)
        hub.beat()
        assert hub.hub.verdict is None


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.one_of(
                st.binary(max_size=200),
                st.sampled_from([b"\n", b"[" * 1100 + b"\n", b"x" * (LINE + 1), f"{TOKEN} 1 ".encode()]),
                st.dictionaries(
                    st.sampled_from(["phase", "step", "entered", "limit", "left", "failed", "status"]),
                    st.recursive(
                        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
                        lambda inner: st.lists(inner, max_size=2),
                    ),
                ).map(lambda message: encoded(dict(message))),
            ),
        ),
        max_size=8,
    )
)
def test_nothing_that_is_said_ends_the_hub(said: list[tuple[bool, bytes]]) -> None:
    """By a stranger, or by a rank; of others than that rank it makes the hub believe nothing."""
    with ExitStack() as stack:
        hub = Played(3)
        stack.callback(hub.close)
        stranger = hub.stranger()
        stack.callback(stranger.socket.close)
        for by_stranger, data in said:
            with suppress(ConnectionError):
                (stranger if by_stranger else hub.ranks[1]).socket.sendall(data)
            hub.hub.listen(0.0)
            hub.hub.decide(BEAT / 2)
            if hub.hub.verdict is None:
                hub.beat(hub.ranks[0], hub.ranks[2])
        if hub.hub.verdict is not None:
            assert hub.hub.verdict.rank == 1


def test_a_hub_of_4096_members(play: Play) -> None:
    count = 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * count + 1000:
        pytest.skip(f"the hard limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        hub = play(count)
        assert hub.hub.hosts == [f"h{rank // 2}" for rank in range(count)]
        hub.at(hub.ranks[4000], "reduce", 7, limit=1000)
        assert hub.after(BEAT) is None
        hub.end(hub.ranks[4000])
        hub.after(BEAT)
        expected = "rank 4000 on host h2000: ended without a word, last in reduce of step 7"
        for rank in hub.beating:
            assert rank.verdict() == (expected, FAULT_STATUS, 4000)
    finally:
        hub.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
