"""A rank's watchdog, with a hub that the test plays."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch

from bert.execution.phases import PhaseTracker
from bert.parallel.mesh import Mesh
from bert.parallel.watchdog import watchdog
from bert.parallel.watchdog.judge import LINE, encoded
from tests.programs import PATIENCE_S

MESH = Mesh(2, 4, 0, torch.device("cpu"), ((0, 1), (2, 3)), sites=("a", "a", "b", "b"))
PLACE = {"phase": "start", "step": 0, "entered": -1, "limit": None}


class Played:
    """The watchdog of rank 2, the connection of its hub, and the statuses with which the process would have ended."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float) -> None:
        self.statuses: Queue[int] = Queue()
        self.faults: list[str] = []

        def end(status: int) -> None:
            self.statuses.put(status)
            threading.Event().wait()

        texts = iter(("token", "h0"))
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            patch.setattr(watchdog.os, "_exit", end)
            patch.setattr(watchdog, "agreed_integer", lambda *_: listener.getsockname()[1])
            patch.setattr(watchdog, "agreed_text", lambda *_: next(texts))
            patch.setenv("MASTER_ADDR", "127.0.0.1")
            greeting = pool.submit(self._meet, listener)
            self.own = watchdog.Watchdog(MESH, seconds, self.faults.append)
            assert greeting.result() == f"token 2 {socket.gethostname()}\n".encode()

    def _meet(self, listener: socket.socket) -> bytes:
        self.connection, _ = listener.accept()
        self._lines = self.connection.makefile("rb")
        greeting = self._lines.readline()
        self.connection.sendall(encoded({"heard": True}))
        return greeting

    def hear(self, **wanted: object) -> dict[str, Any]:
        """Return the next message that has these values."""
        return next(found for line in self._lines if wanted.items() <= (found := json.loads(line)).items())

    def ended(self) -> int:
        return self.statuses.get(timeout=PATIENCE_S)


def test_a_rank_reports_where_it_is_and_how_long_it_may_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is ten times the phase's longest duration, or ten times 2 s before it has ever ended, and at least 2 s."""
    rank, tracker = Played(monkeypatch, 2.0), PhaseTracker()
    assert rank.hear() == PLACE
    with rank.own.expect_progress(tracker):
        tracker.step = 7
        tracker.enter("reduce")
        assert rank.hear(phase="reduce") == {"phase": "reduce", "step": 7, "entered": tracker.entered, "limit": 20.0}
        for longest, limit in ((0.15, 2.0), (0.5, 5.0)):
            tracker.longest["reduce"] = longest
            assert rank.hear(limit=limit)["phase"] == "reduce"
    assert rank.hear(phase="start") == PLACE
    closing = threading.Thread(target=rank.own.close)
    closing.start()
    rank.hear(left=True)
    rank.connection.sendall(encoded({"over": True}))
    closing.join(PATIENCE_S)
    assert (rank.faults, rank.statuses.empty()) == ([], True)


@pytest.mark.parametrize(("blamed", "shown"), [(2, 1), (1, 0)])
def test_a_rank_that_fails_waits_for_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], blamed: int, shown: int
) -> None:
    """Rank 0 prints the verdict. Only the rank to blame prints the traceback of its error."""
    rank = Played(monkeypatch, 60.0)
    told = ("x" * LINE, 5, ZeroDivisionError("mine"))
    threading.Thread(target=rank.own.failed, args=told, daemon=True).start()
    assert rank.hear(status=5) == {"failed": "x" * (LINE // 8), "status": 5}
    verdict = encoded({"verdict": "it is over", "status": 5, "rank": blamed})
    for part in (encoded({"heard": True}) + verdict[:9], verdict[9:]):
        rank.connection.sendall(part)
    assert (rank.ended(), rank.faults) == (5, ["it is over"])
    assert capfd.readouterr().err.count("ZeroDivisionError: mine\n") == shown


def test_a_hub_that_is_lost_ends_the_rank_and_one_rank_of_each_host_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = Played(monkeypatch, 60.0)
    rank.connection.shutdown(socket.SHUT_RDWR)
    assert rank.ended() == watchdog.FAULT_STATUS
    said = "rank 0 on host h0 (site a): ended without a word"
    assert (rank.faults, capfd.readouterr().err) == ([said], f"error: {said}\n")
    silent = Played(monkeypatch, 0.6)
    assert silent.ended() == watchdog.FAULT_STATUS
    assert silent.faults == ["rank 0 on host h0 (site a): not heard of for 1 s: stopped, or cut off"]
