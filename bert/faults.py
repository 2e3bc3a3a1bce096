"""A rank that dies, stops or hangs ends the run on every rank, with one message.

Collectives cannot tell: they wait, or fail on the survivors with the address of a connection. So every rank keeps a thread
with a connection of its own to a hub on rank 0, beside everything that training uses. A few times in ``seconds`` it says
where the rank is; the end of the connection says that the process is gone. The hub finds who is to blame, everybody ends.

Silence is counted in turns of a thread's own loop, each worth a bounded time, so that a machine that was stopped as a whole
blames nobody when it goes on.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bert.metrics import PHASES, Stage
from bert.parallel.collectives import agreed_integer, agreed_text
from bert.parallel.mesh import Mesh

FAULT_STATUS = 3
"""Exit status of every rank after a fault."""

_LINE = 4096
"""Bytes of a message at most; longer ones come from no rank."""
_GRACE_S = 5.0
"""For what a rank still has to do before it ends: closing the log, or waiting for the verdict."""
_GATHER_S = 0.5
"""After an error, news of a lost rank is awaited for so long: its end is why the others have errors."""
_FIRST = 10
"""A phase that has never ended yet may take so many times ``seconds``, and any other so many times its longest."""


@dataclass
class _Member:
    """What the hub knows of a rank."""

    rank: int
    host: str = "unknown"
    connection: socket.socket | None = None
    received: bytes = b""
    left: bool = False
    """It said good-bye."""
    silence_s: float = 0.0
    place: str = "start"
    order: tuple[int, int] = (0, 0)
    """Of its place: the lesser, the further behind."""
    entered: int = -1
    still_s: float = 0.0
    limit_s: float | None = None
    """How long it may stay where it is, or None while that is nobody's business."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on host {self.host}"


@dataclass(frozen=True)
class _Verdict:
    text: str
    status: int = FAULT_STATUS
    rank: int | None = None
    """Of whom it speaks, if of one."""


class FaultWatch:
    """This rank's thread, and on rank 0 the hub. Without other ranks it does nothing.

    Every rank must create it at the same time. ``seconds`` is how long a rank may be silent, or all may wait for one. When
    the run ends by a fault, ``on_fault`` gets the message first and has some seconds; it runs in a thread of its own, as
    the main one may be stuck for good.
    """

    def __init__(self, mesh: Mesh, seconds: float) -> None:
        self.on_fault: Callable[[str], None] | None = None
        self._stage: Stage | None = None
        self._mesh = mesh
        self._seconds = seconds
        self._beat_s = min(seconds / 10, max(1.0, mesh.world_size / 500))  # the hub can hear some hundreds a second
        self._closing = threading.Event()
        self._decided = threading.Event()
        self._sending = threading.Lock()
        self._error: BaseException | None = None
        self._hub: _Hub | None = None
        if mesh.world_size == 1:
            return
        listener = _listen(mesh.world_size) if mesh.is_main else None
        port = agreed_integer(listener.getsockname()[1] if listener else 0, mesh)
        token = agreed_text(os.urandom(16).hex() if mesh.is_main else "", mesh)
        self._main_host = agreed_text(socket.gethostname(), mesh)
        if listener:
            self._hub = _Hub(listener, mesh.world_size, seconds, self._beat_s, token)
            self._hub.start()
        address = "127.0.0.1" if mesh.is_main else os.environ["MASTER_ADDR"]
        self._connection = socket.create_connection((address, port), timeout=max(10.0, seconds))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send({"token": token, "rank": mesh.rank, "host": socket.gethostname()})
        self._thread = threading.Thread(target=self._run, name="fault-watch", daemon=True)
        self._thread.start()

    @property
    def hosts(self) -> list[str]:
        """On rank 0: the host of every rank."""
        return self._hub.hosts if self._hub else [socket.gethostname()]

    @contextlib.contextmanager
    def getting_on(self, stage: Stage) -> Iterator[None]:
        """In the body this rank must get on, from ``stage`` to stage."""
        stage.forget()
        self._stage = stage
        try:
            yield
        finally:
            self._stage = None

    def failed(self, text: str, status: int = FAULT_STATUS, error: BaseException | None = None) -> None:
        """Tell all ranks that this one ends with an error, and end with them. Returns only where nobody is there to ask.

        ``status`` is the exit status of all. The traceback of ``error`` is shown if it is what the run ends for.
        """
        if self._mesh.world_size == 1 or self._closing.is_set():
            return
        self._error = error
        self._send({"failed": text[: _LINE // 2], "status": status})
        self._decided.wait(2 * _GRACE_S)
        if self._decided.is_set():
            threading.Event().wait()  # the other thread ends the process

    def close(self) -> None:
        """Part from the others in good order; on rank 0, with the end of the watch for all."""
        if self._mesh.world_size == 1 or self._closing.is_set():
            return
        self._closing.set()
        self._send({"left": True})
        if self._hub:
            self._hub.close()
        self._thread.join(_GRACE_S)
        self._connection.close()

    def _run(self) -> None:
        """Say where this rank is; end the process when the hub says so, or says nothing."""
        received, silence_s, turn = b"", 0.0, time.monotonic()
        due = turn
        while not self._closing.is_set():
            if turn >= due:
                self._send(self._place())
                due = turn + self._beat_s
            data = self._receive(max(0.01, due - turn))
            now = time.monotonic()
            silence_s, turn = silence_s + min(now - turn, 2 * self._beat_s), now
            if self._closing.is_set():
                break
            if data:
                silence_s = 0.0
                *lines, received = (received + data).split(b"\n")
                for message in filter(None, map(_parsed, lines)):
                    if "verdict" in message:
                        verdict = _Verdict(message["verdict"], message["status"], message["rank"])
                        self._end(verdict, self._mesh.is_main)
                    if "over" in message:
                        return
            elif data is not None:
                self._lost_hub("ended without a word")
            elif silence_s > self._seconds:
                self._lost_hub(f"not heard of for {silence_s:.0f} s: stopped, or cut off")

    def _receive(self, timeout_s: float) -> bytes | None:
        """What the hub says; None if nothing, and no bytes if it never will again."""
        self._connection.settimeout(timeout_s)
        try:
            return self._connection.recv(_LINE)
        except TimeoutError:
            return None
        except OSError:
            return b""

    def _place(self) -> dict[str, object]:
        stage = self._stage
        if stage is None:
            return {"phase": "start", "step": 0, "entered": -1, "limit": None}
        longest = stage.longest.get(stage.phase)
        limit = max(self._seconds, _FIRST * (self._seconds if longest is None else longest))
        return {"phase": stage.phase, "step": stage.step, "entered": stage.entered, "limit": limit}

    def _lost_hub(self, what: str) -> None:
        """Nobody speaks for all now: the first rank of each host does, without rank 0."""
        first = next(rank for rank in self._mesh.node_ranks if rank != 0)
        self._end(_Verdict(f"rank 0 on host {self._main_host}: {what}", rank=0), self._mesh.rank == first)

    def _end(self, verdict: _Verdict, speaks: bool) -> None:
        self._decided.set()

        def last_words() -> None:
            if speaks:
                print(f"error: {verdict.text}", file=sys.stderr, flush=True)
            if self._error is not None and verdict.rank == self._mesh.rank:
                traceback.print_exception(self._error)
            sys.stderr.flush()
            if self.on_fault is not None:
                self.on_fault(verdict.text)
            sys.stdout.flush()

        words = threading.Thread(target=last_words, name="last-words", daemon=True)
        words.start()
        words.join(_GRACE_S)
        if self._hub:
            self._hub.join(1.0)  # the verdict is out
        os._exit(verdict.status)

    def _send(self, message: dict[str, object]) -> None:
        with self._sending, contextlib.suppress(OSError):  # that the connection is lost is for the reader to notice
            self._connection.sendall(json.dumps(message).encode() + b"\n")


class _Hub(threading.Thread):
    """Hears every rank, and decides."""

    def __init__(self, listener: socket.socket, world_size: int, seconds: float, beat_s: float, token: str) -> None:
        super().__init__(name="fault-hub", daemon=True)
        self._listener = listener
        self._seconds = seconds
        self._beat_s = beat_s
        self._token = token
        self._members = [_Member(rank) for rank in range(world_size)]
        self._elapsed_s = 0.0
        self._failed: list[tuple[float, _Verdict]] = []
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def hosts(self) -> list[str]:
        return [member.host for member in self._members]

    def close(self) -> None:
        """End the watch for all."""
        self._closing.set()
        self.join(2 * self._beat_s)

    def run(self) -> None:
        turn = checked = time.monotonic()
        verdict = None
        while verdict is None:
            events = self._selector.select(min(self._beat_s, 0.2))
            lost = [member for key, _ in events if (member := self._read(key)) is not None]
            now = time.monotonic()
            self._elapsed_s, turn = self._elapsed_s + min(now - turn, 2 * self._beat_s), now
            if self._closing.is_set():
                self._tell({"over": True})
                return
            verdict = self._blame(lost)
            if verdict is None and now - checked >= self._beat_s / 2:
                checked = now
                verdict = self._check()
                self._tell({"heard": True})
        self._tell({"verdict": verdict.text, "status": verdict.status, "rank": verdict.rank})

    def _tell(self, message: dict[str, object]) -> None:
        for member in self._members:
            if member.connection is not None and not member.left:
                with contextlib.suppress(OSError):  # lost, or its buffer is full: its silence will tell
                    member.connection.send(json.dumps(message).encode() + b"\n")

    def _read(self, key: selectors.SelectorKey) -> _Member | None:
        """Take in what came; returns a rank whose connection ended without a word."""
        source: Any = key.fileobj
        if source is self._listener:
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, bytearray())
            return None
        try:
            data = source.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if isinstance(key.data, bytearray):
            self._introduce(source, key.data, data)
            return None
        member: _Member = key.data
        if not data:
            self._selector.unregister(source)
            member.connection = None
            return None if member.left else member
        self._hear(member, data)
        return None

    def _hear(self, member: _Member, data: bytes) -> None:
        *lines, member.received = (member.received + data).split(b"\n")
        for message in filter(None, map(_parsed, lines)):
            self._take(member, message)

    def _introduce(self, stranger: socket.socket, said: bytearray, data: bytes) -> None:
        """A connection becomes a rank's by its first line. Whoever does not know the token is sent away."""
        said += data
        first, end, rest = bytes(said).partition(b"\n")
        message = (_parsed(first) if end else None) or {}
        if message.get("token") == self._token:
            member = self._members[message["rank"]]
            member.host, member.connection = message["host"], stranger
            self._selector.modify(stranger, selectors.EVENT_READ, member)
            self._hear(member, rest)
        elif end or not data or len(said) > _LINE:
            self._selector.unregister(stranger)
            stranger.close()

    def _take(self, member: _Member, message: dict[str, Any]) -> None:
        member.silence_s = 0.0
        if "left" in message:
            member.left = True
        elif "failed" in message:
            verdict = _Verdict(f"{member.name}: {message['failed']}", message["status"], member.rank)
            self._failed.append((time.monotonic() + _GATHER_S, verdict))
        else:
            member.limit_s = message["limit"]
            member.place = f"{message['phase']} of step {message['step']}" if member.limit_s else message["phase"]
            member.order = message["step"], _ORDER.get(message["phase"], len(_ORDER))
            if message["entered"] != member.entered:
                member.entered, member.still_s = message["entered"], 0.0

    def _blame(self, lost: list[_Member]) -> _Verdict | None:
        """A lost rank before an error: its end is why others have errors."""
        if lost:
            return _Verdict(f"{_names(lost)}: ended without a word, last in {lost[0].place}", rank=lost[0].rank)
        if self._failed and time.monotonic() > self._failed[0][0]:
            return self._failed[0][1]
        return None

    def _check(self) -> _Verdict | None:
        """A rank that is silent, or one that stands still."""
        elapsed_s, self._elapsed_s = self._elapsed_s, 0.0
        present = [member for member in self._members if not member.left]
        for member in present:
            member.silence_s += elapsed_s
            member.still_s += elapsed_s
        if any(member.silence_s > self._seconds for member in present):
            # With all of whom a sign is overdue too: where a link was cut, they fell silent within a beat.
            silent = [member for member in present if member.silence_s > self._seconds - 2 * self._beat_s]
            text = f"{_names(silent)}: not heard of for {silent[0].silence_s:.0f} s, last in {silent[0].place}: "
            return _Verdict(text + "stopped, or cut off", rank=silent[0].rank)
        return self._standstill([member for member in present if member.limit_s is not None])

    @staticmethod
    def _standstill(present: list[_Member]) -> _Verdict | None:
        """Those furthest behind have not moved for too long: for them the others wait."""
        if not present:
            return None
        least = min(member.order for member in present)
        behind = [member for member in present if member.order == least]
        if not all(member.limit_s is not None and member.still_s > member.limit_s for member in behind):
            return None
        where = f"for {behind[0].still_s:.0f} s in {behind[0].place}"
        if len(behind) == len(present) > 1:
            return _Verdict(f"no rank gets on: all {len(present)} stand still {where}")
        ahead = next((f", and the others wait for it in {m.place}" for m in present if m.order != least), "")
        return _Verdict(f"{_names(behind)}: standing still {where}{ahead}", rank=behind[0].rank)


_ORDER = {phase: place for place, phase in enumerate((*PHASES, "statistics", "checkpoint", "evaluation"))}


def _names(members: list[_Member]) -> str:
    names = ", ".join(member.name for member in members[:8])
    return names + (f" and {len(members) - 8} more" if len(members) > 8 else "")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _listen(backlog: int) -> socket.socket:
    """On any free port, of all addresses: ranks know the one that they reach rank 0 by."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)
