"""The watchdog's hub on rank 0: hears every rank, and decides which of them is to blame.

Its port is open to whoever reaches the host. A connection is a stranger's until its first line is the run's token with a
rank; nothing else that it sends is looked at. Strangers have a deadline, a number, and a few hundred bytes; where they use
up the descriptors, they go first.

Time is what the thread's own turns add up to, each worth a bounded time, so that a machine that was stopped as a whole
blames nobody when it goes on.
"""

import contextlib
import errno
import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bert.timing.phases import EXCHANGE, PHASES

FAULT_STATUS = 3
"""Exit status of every rank after a fault."""
LINE = 8192
"""Bytes of a message at most; longer ones come from no rank."""

_GATHER_S = 0.5
"""After an error, news of a lost rank is awaited for so long: its end is why the others have errors."""
_GREETING = 512
"""Bytes that a stranger may send before it is known: token, rank and host."""
_GREETING_S = 10.0
"""How long a stranger may take to say who it is."""
_STRANGERS = 256
"""Those waiting to be known at most; of more, the oldest are sent away."""
_ACCEPTED = 128
"""Connections taken in one turn at most, or a flood of them would keep the hub from its ranks."""
_DEAF_S = 1.0
"""Without a free descriptor, nobody is let in for so long."""


@dataclass(frozen=True)
class Ending:
    """Reason for the end of the run, and its exit status."""

    text: str
    status: int = FAULT_STATUS
    rank: int | None = None
    """Of whom it speaks, if of one."""


@dataclass
class _Member:
    """Rank as the hub knows it. Times are the hub's own."""

    rank: int
    host: str = "unknown"
    in_mesh: str = ""
    """Its place there, as a name goes on with it."""
    connection: socket.socket | None = None
    received: bytes = b""
    beating: bool = False
    """It has said where it is since it came."""
    left: bool = False
    """It said good-bye."""
    heard_s: float = 0.0
    place: str = "start"
    order: tuple[int, int] = (0, 0)
    """Of its place: the lesser, the further behind."""
    entered: int = -1
    moved_s: float = 0.0
    limit_s: float | None = None
    """How long it may stay where it is, or None while that is nobody's business."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on host {self.host}{self.in_mesh}"


@dataclass
class _Stranger:
    connection: socket.socket
    deadline_s: float
    received: bytes = b""


class Hub:
    """Hub that hears every rank, and decides. ``listen`` and ``decide`` are one turn; ``start`` takes turns in a thread."""

    def __init__(
        self, listener: socket.socket, places: Sequence[str], seconds: float, beat_s: float, token: str
    ) -> None:
        """``places`` are those of the ranks in the mesh, as a name goes on with them; ``seconds`` is how long a rank may be
        silent; every ``beat_s`` it says where it is.
        """
        self.verdict: Ending | None = None
        self._listener = listener
        self._seconds = seconds
        self._beat_s = beat_s
        self._token = token.encode()
        self._members = [_Member(rank, in_mesh=place) for rank, place in enumerate(places)]
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._now_s = 0.0
        self._check_s = 0.0
        self._deaf_until_s: float | None = None
        self._lost: list[_Member] = []
        self._failed: list[tuple[float, Ending]] = []
        self._closing = threading.Event()
        # A daemon, as nothing may keep a process alive whose run is over.
        self._thread = threading.Thread(target=self._run, name="watchdog-hub", daemon=True)
        self._selector = selectors.DefaultSelector()
        # Who has connected may be gone before it is accepted, and accept would then wait for the next.
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def hosts(self) -> list[str]:
        """The host of every rank that has come, by rank."""
        return [member.host for member in self._members]

    def start(self) -> None:
        """Take turns in a thread, until there is a verdict or the end."""
        self._thread.start()

    def close(self, patience_s: float) -> None:
        """End the watch for all."""
        self._closing.set()
        self.join(patience_s)

    def join(self, patience_s: float) -> None:
        """Wait for the thread's last word."""
        self._thread.join(patience_s)

    def _run(self) -> None:
        turn = time.monotonic()
        while self.verdict is None and not self._closing.is_set():
            self.listen(min(self._beat_s, 0.2))
            now = time.monotonic()
            self.decide(min(now - turn, 2 * self._beat_s))
            turn = now
        if self.verdict is None:
            self._tell({"over": True})

    def listen(self, timeout_s: float) -> None:
        """Take in what has come, waiting for the first of it at most so long."""
        for key, _ in self._selector.select(timeout_s):
            source: Any = key.fileobj
            if source is self._listener:
                self._accept()
            elif isinstance(key.data, _Member):
                self._hear(key.data, source)
            elif source in self._strangers:  # else it was sent away in this very turn
                self._greet(key.data)

    def decide(self, elapsed_s: float) -> None:
        """Let so much time pass, and come to a ``verdict`` if there is reason for one. All ranks are told."""
        self._now_s += elapsed_s
        for stranger in [who for who in self._strangers.values() if who.deadline_s < self._now_s]:
            self._send_away(stranger)
        if self._deaf_until_s is not None and self._now_s >= self._deaf_until_s:
            self._deaf_until_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        self.verdict = self._blame()
        if self.verdict is None and self._now_s >= self._check_s:
            # Not in every turn, since each of these sends a message to every rank.
            self._check_s = self._now_s + self._beat_s / 2
            self.verdict = self._check()
            self._tell({"heard": True})  # ranks judge the hub by it, as it judges them
        if self.verdict is not None:
            self._tell({"verdict": self.verdict.text, "status": self.verdict.status, "rank": self.verdict.rank})

    # --- who comes -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._turn_deaf()
                    return
                continue  # it is gone already
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # beats are small
            stranger = _Stranger(connection, self._now_s + _GREETING_S)
            self._strangers[connection] = stranger
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            if len(self._strangers) > _STRANGERS:
                # A dictionary keeps its order: the first is the oldest.
                self._send_away(next(iter(self._strangers.values())))
            self._greet(stranger)  # a rank speaks at once: it does not wait in the crowd

    def _turn_deaf(self) -> None:
        """Free what strangers hold, and let nobody in for a while: the listener would wake every turn for nothing."""
        self._deaf_until_s = self._now_s + _DEAF_S
        self._selector.unregister(self._listener)
        for stranger in list(self._strangers.values()):
            self._send_away(stranger)

    def _greet(self, stranger: _Stranger) -> None:
        """Make a connection a rank's by its first line. Whoever does not know the token is sent away."""
        data = _read(stranger.connection, _GREETING)
        if data is None:
            return
        # A greeting may come in pieces, and the first messages with it.
        stranger.received += data
        greeting, end, rest = stranger.received.partition(b"\n")
        found = self._known(greeting) if end else None
        # A rank that has been answered greets no more: it is a stranger who has overheard the greeting.
        if found and not found[0].beating:
            self._introduce(stranger, *found, rest)
        elif end or not data or len(stranger.received) >= _GREETING:
            self._send_away(stranger)

    def _known(self, greeting: bytes) -> tuple[_Member, str] | None:
        """The rank and the host that a greeting names, if it is one."""
        token, _, who = greeting.partition(b" ")
        # In a time that does not tell how much of the token was right.
        if not hmac.compare_digest(token, self._token):
            return None
        rank, _, host = who.decode(errors="replace").partition(" ")
        # Bounded, as int() raises at thousands of digits.
        number = int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 10 else -1
        return (self._members[number], host) if 0 <= number < len(self._members) else None

    def _introduce(self, stranger: _Stranger, member: _Member, host: str, rest: bytes) -> None:
        del self._strangers[stranger.connection]
        if member.connection is not None:  # it gave up waiting for an answer, and has come once more
            self._selector.unregister(member.connection)
            member.connection.close()
        member.host, member.connection, member.received, member.beating = host, stranger.connection, b"", False
        member.heard_s = self._now_s
        self._selector.modify(stranger.connection, selectors.EVENT_READ, member)
        # The rank waits for this answer, and comes once more if there is none.
        _send(member, {"heard": True})
        self._take_lines(member, rest)

    def _send_away(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection]
        self._selector.unregister(stranger.connection)
        stranger.connection.close()

    # --- what ranks say --------------------------------------------------------------------------------------------

    def _hear(self, member: _Member, source: socket.socket) -> None:
        if member.connection is not source:  # it came once more in this very turn
            return
        data = _read(source, 1 << 16)
        if data is None:
            return
        if data:
            self._take_lines(member, data)
            return
        self._selector.unregister(source)
        source.close()
        member.connection = None
        # One that has not said where it is may have given up waiting for an answer, and comes again.
        if member.beating and not member.left:
            self._lost.append(member)

    def _take_lines(self, member: _Member, data: bytes) -> None:
        *lines, member.received = (member.received + data).split(b"\n")
        # A line without end would take memory for ever.
        if len(member.received) > LINE:
            member.received = b""
        for line in lines:
            message = parsed(line)
            # What is none of a rank's messages is passed over, and is no sign of life either.
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                self._take(member, message)

    def _take(self, member: _Member, message: dict[str, Any]) -> None:
        if "left" in message:
            member.left = True
        elif "failed" in message:
            verdict = Ending(f"{member.name}: {message['failed']}", int(message["status"]), member.rank)
            self._failed.append((self._now_s + _GATHER_S, verdict))  # by then a lost rank would be known
        else:
            step, entered, phase = int(message["step"]), int(message["entered"]), str(message["phase"])
            limit_s = None if message["limit"] is None else float(message["limit"])
            member.limit_s = limit_s
            member.place = f"{phase} of step {step}" if limit_s else phase
            place = _ORDER.get(phase.removeprefix(EXCHANGE), len(_ORDER))
            member.order = step, 2 * place + phase.startswith(EXCHANGE)
            if entered != member.entered:
                member.entered, member.moved_s = entered, self._now_s
            member.beating = True
        member.heard_s = self._now_s

    def _tell(self, message: dict[str, object]) -> None:
        for member in self._members:
            if member.connection is not None and not member.left:
                _send(member, message)

    # --- who is to blame -------------------------------------------------------------------------------------------

    def _blame(self) -> Ending | None:
        """A lost rank before an error: its end is why others have errors."""
        if self._lost:
            return Ending(
                f"{_names(self._lost)}: ended without a word, last in {self._lost[0].place}", rank=self._lost[0].rank
            )
        if self._failed and self._now_s > self._failed[0][0]:
            return self._failed[0][1]
        return None

    def _check(self) -> Ending | None:
        """A rank that is silent, or one that stands still."""
        present = [member for member in self._members if not member.left]
        if any(self._silence(member) > self._seconds for member in present):
            # With all of whom a sign is overdue too: where a link was cut, they fell silent within a beat.
            silent = [member for member in present if self._silence(member) > self._seconds - 2 * self._beat_s]
            text = f"{_names(silent)}: not heard of for {self._silence(silent[0]):.0f} s, last in {silent[0].place}: "
            return Ending(text + "stopped, or cut off", rank=silent[0].rank)
        return self._standstill([member for member in present if member.limit_s is not None])

    def _silence(self, member: _Member) -> float:
        return self._now_s - member.heard_s

    def _standstill(self, present: list[_Member]) -> Ending | None:
        """Judge ranks furthest behind that have not moved for too long: for them the others wait."""
        if not present:
            return None
        least = min(member.order for member in present)
        behind = [member for member in present if member.order == least]
        still_s = {member.rank: self._now_s - member.moved_s for member in behind}
        # While one of those furthest behind may still move, the others may be waiting for it.
        if not all(member.limit_s is not None and still_s[member.rank] > member.limit_s for member in behind):
            return None
        where = f"for {still_s[behind[0].rank]:.0f} s in {behind[0].place}"
        if len(behind) == len(present) > 1:
            return Ending(f"no rank gets on: all {len(present)} stand still {where}")
        ahead = next((f", and the others wait for it in {m.place}" for m in present if m.order != least), "")
        return Ending(f"{_names(behind)}: standing still {where}{ahead}", rank=behind[0].rank)


# In the order of a step, so that ranks compare as further ahead or behind; what is unknown counts as furthest ahead.
_ORDER = {phase: place for place, phase in enumerate((*PHASES, "statistics", "checkpoint", "evaluation"))}


def encoded(message: dict[str, object]) -> bytes:
    """A message as a line."""
    text = json.dumps(message, ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"  # for half a surrogate pair that is JSON's way, too


def parsed(line: bytes) -> dict[str, Any]:
    """The message of a line of at most ``LINE`` bytes; an empty one if it is none."""
    try:
        message = json.loads(line) if len(line) <= LINE else None
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _names(members: list[_Member]) -> str:
    names = ", ".join(member.name for member in members[:8])
    return names + (f" and {len(members) - 8} more" if len(members) > 8 else "")


def _read(connection: socket.socket, size: int) -> bytes | None:
    """Read what has come; None if nothing has, and no bytes if nothing will any more."""
    try:
        return connection.recv(size)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _send(member: _Member, message: dict[str, object]) -> None:
    """Send a message, but not to a rank that is lost or has not read for long: its silence will tell."""
    if member.connection is not None:
        with contextlib.suppress(OSError):
            # Not sendall: the hub waits for no rank, and drops what one that does not read has no room for.
            member.connection.send(encoded(message))
