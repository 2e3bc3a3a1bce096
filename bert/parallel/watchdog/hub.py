"""Hub of the watchdog on rank 0: it receives the reports of every rank and sends all ranks the verdict.

The hub's port is open to anyone who can reach the host. A connection counts as a stranger until its first line contains the
token of the run and a rank. The hub limits the number of strangers and the time that each may stay connected. If file
descriptors run out, the hub disconnects all strangers.
"""

import asyncio
import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from bert.parallel.watchdog.judge import LINE, Ending, Judge, Member, encoded

BACKLOG = 4096
"""Length of the system's queue of new connections. It is long, because all ranks connect at once."""
_GREETING_S = 10.0
"""Seconds within which a new connection must send the token."""
_STRANGERS = 256
"""Maximum number of connections that have not sent the token; if there are more, the oldest is closed."""
_UNREAD_BYTES = 1 << 16
"""The hub sends nothing more to a rank that has left this many bytes unread. ``Judge`` notices if the rank hangs."""
_LINGER_S = 5.0
"""Seconds that connections stay open after the last message."""


class Hub:
    """Hub in a separate thread. The thread ends after the verdict or after ``close``."""

    def __init__(
        self, listener: socket.socket, names: Sequence[str], seconds: float, beat_s: float, token: str
    ) -> None:
        """``names``, ``seconds`` and ``beat_s`` have the same meaning as in ``Judge``. The thread starts at once."""
        self.verdict: Ending | None = None
        self._judge = Judge(names, seconds, beat_s)
        self._members = {str(member.rank).encode(): member for member in self._judge.members}
        """Members by their rank as it is written in a greeting."""
        self._listener, self._beat_s, self._token = listener, beat_s, token.encode()
        self._connected: dict[int, asyncio.StreamWriter] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._closing, self._done = threading.Event(), threading.Event()
        # Use a daemon thread, because nothing may keep the process alive when its run is over.
        threading.Thread(target=lambda: asyncio.run(self._run()), name="watchdog-hub", daemon=True).start()

    def close(self, patience_s: float) -> None:
        """Tell all ranks that the run is over. Wait at most ``patience_s`` seconds until they have been told."""
        self._closing.set()
        self.join(patience_s)

    def join(self, patience_s: float) -> None:
        """Wait until all ranks have been sent the last message, at most ``patience_s`` seconds."""
        self._done.wait(patience_s)

    async def _run(self) -> None:
        # asyncio calls the handler when file descriptors have run out, and then accepts no connections for a second. Closing
        # the strangers' connections frees descriptors. Other errors concern only one connection.
        asyncio.get_running_loop().set_exception_handler(lambda *_: self._send_strangers_away())
        await asyncio.start_server(self._serve, sock=self._listener, limit=LINE, backlog=BACKLOG)
        before, told = time.monotonic(), 0.0
        while self.verdict is None and not self._closing.is_set():
            await asyncio.sleep(min(self._beat_s / 4, 0.2))
            now = time.monotonic()
            # Let at most two report intervals pass at once. Otherwise ranks would be blamed after the machine was suspended.
            self.verdict = self._judge.pass_time(min(now - before, 2 * self._beat_s))
            before = now
            if now - told > self._beat_s / 2:  # each rank expects a message from the hub regularly
                told = now
                self._tell({"heard": True})
        verdict = self.verdict
        if verdict is None:
            self._tell({"over": True})
        else:
            self._tell({"verdict": verdict.text, "status": verdict.status, "rank": verdict.rank})
        self._done.set()
        await asyncio.sleep(_LINGER_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            try:
                self._strangers[writer] = None
                if len(self._strangers) > _STRANGERS:
                    oldest = next(iter(self._strangers))  # keys are in the order of their insertion
                    del self._strangers[oldest]
                    oldest.transport.abort()
                greeting = await asyncio.wait_for(reader.readuntil(b"\n"), _GREETING_S)
            finally:
                self._strangers.pop(writer, None)
            member = self._known(greeting)
            # Ignore greetings for a rank that has reported: they come from strangers who have overheard the first greeting.
            if member is not None and not member.beating:
                await self._hear(member, reader, writer)
        writer.transport.abort()

    def _known(self, greeting: bytes) -> Member | None:
        token, _, rank = greeting.rstrip(b"\n").partition(b" ")
        # Compare in constant time, so that the duration does not reveal how much of the token was right.
        return self._members.get(rank) if hmac.compare_digest(token, self._token) else None

    async def _hear(self, member: Member, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = self._connected.get(member.rank)
        self._connected[member.rank] = writer
        if before is not None:  # the rank gave up waiting for an answer on its old connection
            before.transport.abort()
        self._judge.greet(member)
        _send(writer, {"heard": True})  # the rank waits for this answer
        try:
            while True:
                self._judge.hear(member, await reader.readuntil(b"\n"))
        finally:
            if self._connected.get(member.rank) is writer:
                del self._connected[member.rank]
                self._judge.lose(member)

    def _tell(self, message: dict[str, object]) -> None:
        for rank, writer in self._connected.items():
            if not self._judge.members[rank].left:
                _send(writer, message)

    def _send_strangers_away(self) -> None:
        for writer in list(self._strangers):
            writer.transport.abort()


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    if writer.transport.get_write_buffer_size() < _UNREAD_BYTES:
        writer.write(encoded(message))


def listen(address: str = "") -> socket.socket:
    """Return a socket that listens on a free port.

    By default it listens on all addresses, because only the other ranks know the address at which they reach rank 0.
    """
    # Listen on both IPv4 and IPv6, because MASTER_ADDR may resolve to either.
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server((address, 0), backlog=BACKLOG)
