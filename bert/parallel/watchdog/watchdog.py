"""Watchdog on every rank: ends the whole run with one message if any rank dies, stops or hangs.

Collectives alone would wait forever, or fail on the surviving ranks without naming the cause. A thread on every rank
therefore connects to a hub on rank 0 (``bert.parallel.watchdog.hub``) and regularly reports the rank's position to the hub.
A closed connection means that the process has ended. The hub decides which rank is to blame, and then all ranks end.
"""

import contextlib
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from bert.execution.phases import PhaseTracker
from bert.parallel.environment import lost_launcher
from bert.parallel.mesh import Mesh, agreed_integer, agreed_text
from bert.parallel.watchdog.hub import Hub, listen
from bert.parallel.watchdog.judge import FAULT_STATUS, LINE, Ending, encoded, parsed
from console.program import complain

_GRACE_S = 5.0
"""Seconds that a rank has for its last work before it ends, such as closing the log or waiting for the verdict."""
_FIRST = 10
"""A phase may take this many times its longest duration so far, or this many times ``seconds`` if it has never ended."""
_ANSWER_S = 10.0
"""After this many seconds without an answer from the hub, a rank connects again."""


class Watchdog:
    """This rank's watchdog thread, and on rank 0 also the hub. In a run of one rank, it only watches the launcher.

    Every rank must create it at the same time. A rank may be silent for ``seconds``, and may keep all others waiting at
    least as long. If a fault ends the run, ``on_fault`` is first called with the message. It may take a few seconds, and
    runs in its own thread, because the main thread may be stuck. Raises ``OSError`` if the hub cannot be reached.
    """

    def __init__(self, mesh: Mesh, seconds: float, on_fault: Callable[[str], None] = lambda _: None) -> None:
        self._on_fault = on_fault
        self._tracker: PhaseTracker | None = None
        self._mesh = mesh
        self._seconds = seconds
        # The hub can read only a few hundred messages per second, so ranks report less often if there are many.
        self._beat_s = min(seconds / 10, max(1.0, mesh.world_size / 500))
        self._closing = threading.Event()
        self._decided = threading.Event()
        self._sending = threading.Lock()  # the main thread sends as well, and lines must not be interleaved
        self._error: BaseException | None = None
        self._hub: Hub | None = None
        launcher_watch = threading.Thread(target=self._watch_launcher, name="launcher-watch", daemon=True)
        if mesh.world_size == 1:
            launcher_watch.start()
            return
        alone = len(mesh.node_ranks) == mesh.world_size  # if all ranks are on this host, listen on the loopback only
        listener = listen("127.0.0.1" if alone else "") if mesh.is_main else None
        port = agreed_integer(listener.getsockname()[1] if listener else 0, mesh)
        # The port is open to the network: the hub ignores anyone who does not know this token.
        token = agreed_text(os.urandom(16).hex() if mesh.is_main else "", mesh)
        if listener:
            self._hub = Hub(listener, mesh.names(), seconds, self._beat_s, token)
        address = "127.0.0.1" if mesh.is_main or alone else os.environ["MASTER_ADDR"]
        greeting = f"{token} {mesh.rank}\n".encode()
        self._connection, self._received = _join((address, port), greeting, max(_ANSWER_S, seconds))
        self._readable = select.poll()
        self._readable.register(self._connection, select.POLLIN)
        self._silence_s = 0.0
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        # Start both threads only now, because both send through the connection.
        self._thread.start()
        launcher_watch.start()

    @contextlib.contextmanager
    def expect_progress(self, tracker: PhaseTracker) -> Iterator[None]:
        """Report this rank's phases while the block runs, so that the run ends if the rank stays in a phase for too long."""
        tracker.forget()
        self._tracker = tracker
        if self._mesh.world_size > 1:
            self._send(self._place())  # report at once, because the rank may be lost before the next regular report
        try:
            yield
        finally:
            self._tracker = None

    def failed(self, text: str, status: int = FAULT_STATUS, error: BaseException | None = None) -> None:
        """Report that this rank has failed, which ends the run on all ranks. Returns only in a run of one rank.

        ``status`` is the exit status of all ranks. The traceback of ``error`` is printed if this rank is blamed.
        """
        if self._closing.is_set():
            return
        if self._mesh.world_size == 1:
            self._on_fault(text)
            return
        self._error = error
        # Truncate the text, because escaping lengthens the text, and the hub ignores lines longer than LINE.
        self._send({"failed": text[: LINE // 8], "status": status})
        if self._decided.wait(2 * _GRACE_S):
            threading.Event().wait()  # the other thread ends the process

    def close(self) -> None:
        """Stop watching this rank, which has had no fault. On rank 0, stop watching all ranks."""
        if self._closing.is_set():
            return
        # Set this first, so that the thread does not mistake the closed connection for a lost hub.
        self._closing.set()
        if self._mesh.world_size == 1:
            return
        self._send({"left": True})
        if self._hub:
            self._hub.close(_GRACE_S)
        self._thread.join(_GRACE_S)
        self._connection.close()

    def _watch_launcher(self) -> None:
        """End the run when this rank's launcher has ended, for example because it was killed when memory ran out."""
        while not self._closing.wait(self._beat_s):
            if lost := lost_launcher():
                self.failed(lost)
                # ``failed`` returns only if there are no other ranks. Then shut down in order, as after any other signal.
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _run(self) -> None:
        before, due = time.monotonic(), 0.0
        while True:
            if before >= due:
                self._send(self._place())
                due = before + self._beat_s
            data = self._receive(max(0.01, due - before))
            now = time.monotonic()
            # Count at most two intervals between reports, so that no rank is blamed after the whole machine was suspended.
            if self._closing.is_set() or self._take_in(data, min(now - before, 2 * self._beat_s)):
                return
            before = now

    def _take_in(self, data: bytes | None, elapsed_s: float) -> bool:
        """Handle what the hub has sent in the last ``elapsed_s`` seconds. Return whether the watch is over."""
        self._silence_s += elapsed_s
        if data:
            self._silence_s = 0.0
            *lines, self._received = (self._received + data).split(b"\n")
            for message in map(parsed, lines):
                if "verdict" in message:
                    verdict = Ending(message["verdict"], message["status"], message["rank"])
                    self._end(verdict, self._mesh.is_main)
                if "over" in message:
                    return True
        elif data is not None:
            self._lost_hub("ended without a word")
        elif self._silence_s > self._seconds:
            self._lost_hub(f"not heard of for {self._silence_s:.0f} s: stopped, or cut off")
        return False

    def _receive(self, timeout_s: float) -> bytes | None:
        """Return the hub's bytes, None if there are none yet, or b"" if the connection was closed."""
        # Poll, because the socket's own timeout also applies to sending, and a short timeout could cut off half a line.
        if not self._readable.poll(1000 * timeout_s):
            return None
        try:
            return self._connection.recv(LINE)
        except OSError:
            return b""

    def _place(self) -> dict[str, object]:
        tracker = self._tracker
        if tracker is None:
            # No limit before training: compiling and tuning may take any amount of time.
            return {"phase": "start", "step": 0, "entered": -1, "limit": None}
        longest = tracker.longest.get(tracker.phase)
        limit = max(self._seconds, _FIRST * (self._seconds if longest is None else longest))
        return {"phase": tracker.phase, "step": tracker.step, "entered": tracker.entered, "limit": limit}

    def _lost_hub(self, what: str) -> None:
        # One rank of each host prints the message: the last one, because rank 0, which is lost, is the first on its host.
        self._end(
            Ending(f"{self._mesh.names()[0]}: {what}", rank=0),
            self._mesh.rank == self._mesh.node_ranks[-1],
        )

    def _end(self, verdict: Ending, speaks: bool) -> None:
        # Set this first, so that a main thread in ``failed`` stays there and does not end the process itself.
        self._decided.set()

        def last_words() -> None:
            if speaks:
                complain(verdict.text)
            if self._error is not None and verdict.rank == self._mesh.rank:
                traceback.print_exception(self._error)
            self._on_fault(verdict.text)
            sys.stdout.flush()

        words = threading.Thread(target=last_words, name="last-words", daemon=True)
        # Limit the time, because a full disk or a stuck file system must not keep this process alive.
        words.start()
        words.join(_GRACE_S)
        if self._hub:
            self._hub.join(1.0)  # wait until all ranks have the verdict
        # End at once: sys.exit would end only this thread, and the interpreter's exit would wait for a stuck main thread.
        os._exit(verdict.status)

    def _send(self, message: dict[str, object]) -> None:
        with self._sending, contextlib.suppress(OSError):  # no error is needed: ``_receive`` notices a lost connection
            self._connection.sendall(encoded(message))


def _join(address: tuple[str, int], greeting: bytes, patience_s: float) -> tuple[socket.socket, bytes]:
    """Connect to the hub and return the connection and the hub's answer.

    Connecting may take several attempts, because the hub also closes connections if too many strangers connect.
    """
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.ExitStack() as attempt:
            try:
                connection = socket.create_connection(address, timeout=_ANSWER_S)
                attempt.callback(connection.close)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(greeting)
                if answer := connection.recv(LINE):
                    # Leaving the block would close the connection, so cancel this.
                    attempt.pop_all()
                    return connection, answer
                error: OSError = ConnectionError("it closes the connection")
            except OSError as refused:
                error = refused
        if time.monotonic() > deadline:
            raise OSError(f"rank 0's watchdog at {address[0]}:{address[1]} does not answer: {error}")
        time.sleep(random.uniform(0.01, 0.2))  # so that not all ranks retry at once
