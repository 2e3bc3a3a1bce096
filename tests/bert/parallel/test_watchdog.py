"""The watchdog of forked ranks: the positions that the hub records, and the end of all ranks if one fails, ends or stops."""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bert.execution.phases import PhaseTracker
from bert.parallel.mesh import Mesh, agreed_integer, barrier
from bert.parallel.watchdog import watchdog
from bert.parallel.watchdog.judge import FAULT_STATUS, LINE
from bert.parallel.watchdog.watchdog import Watchdog, _join
from tests.bert.parallel.forked import on_ranks
from tests.bert.small_models import CPU
from tests.programs import wait_for

HOSTS, SITES = ("h0", "h0", "h1", "h1"), ("a", "a", "b", "b")
LONG = 120.0
"""Time limit in seconds that no rank reaches in these tests."""


def stay() -> None:
    threading.Event().wait()


@pytest.mark.slow
def test_the_hub_knows_a_ranks_phase_and_the_phases_time_limit() -> None:
    """A phase's limit is ten times its longest duration, but at least 120 s, or 1,200 s until the phase has ended once."""

    def report(mesh: Mesh) -> list[str]:
        faults: list[str] = []
        own, tracker = Watchdog(mesh, LONG, faults.append), PhaseTracker()
        found: list[Any] = []

        def note(limit_s: float | None) -> None:
            """Wait until the hub has this limit for rank 1, and record the rank's phase as the hub knows it."""
            if own._hub is not None:
                member = own._hub._judge.members[1]
                wait_for(lambda: member.beating and member.limit_s == limit_s)
                found.append((member.name, member.place, member.entered == tracker.entered))
            barrier()

        note(None)
        tracker.step = 7
        tracker.enter("reduce")
        with own.expect_progress(tracker):
            note(10 * LONG)
            for longest, limit in ((11.0, LONG), (13.0, 130.0)):
                tracker.longest["reduce"] = longest
                note(limit)
        note(None)
        if mesh.rank == 1:
            own.close()
            own.failed("too late to end anything")
        barrier()
        own.close()
        own.close()
        name, there = "rank 1 on host h1 (site b)", "reduce of step 7"
        places = [(name, "start", False), *[(name, there, True)] * 3, (name, "start", False)]
        assert found == (places if mesh.is_main else [])
        return faults

    assert on_ranks(2, report, HOSTS[1:3], SITES[1:3]) == [[], []]


@pytest.mark.slow
def test_a_failed_rank_ends_all_ranks_with_its_status_and_only_its_error_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 prints the verdict. Rank 3 fails too, but later."""

    def fail(mesh: Mesh) -> None:
        def note(text: str) -> None:
            os.write(1, f"{mesh.rank} was told {len(text)}\n".encode())  # unlike print, writes a line at once

        own = Watchdog(mesh, LONG, note)
        match mesh.rank:
            case 0:
                assert own._hub is not None
                wait_for(lambda: own._hub and own._hub._judge._failed)
                (tmp_path / "failed").touch()
            case 2:
                own.failed("x" * LINE, 5, ZeroDivisionError("mine"))
            case 3:
                wait_for((tmp_path / "failed").exists)
                own.failed("late", 7, ValueError("its own"))
        stay()

    on_ranks(4, fail, HOSTS, SITES, statuses=[5] * 4)
    said = capfd.readouterr()
    message = f"rank 2 on host h1 (site b): {'x' * (LINE // 8)}"
    errors = [line for line in said.err.splitlines() if "rror: " in line]
    assert sorted(errors) == ["ZeroDivisionError: mine", f"error: {message}"]
    assert sorted(said.out.splitlines()) == [f"{rank} was told {len(message)}" for rank in range(4)]


def test_losing_the_hub_ends_all_ranks_and_one_rank_of_each_host_reports_it(capfd: pytest.CaptureFixture[str]) -> None:
    def lose(mesh: Mesh) -> None:
        own = Watchdog(mesh, LONG)
        barrier()
        if mesh.is_main:
            assert own._hub is not None
            os._exit(9 if own._hub._listener.getsockname()[0] in ("::", "0.0.0.0") else 1)
        stay()

    on_ranks(4, lose, HOSTS, SITES, statuses=[9, *[FAULT_STATUS] * 3])
    assert capfd.readouterr().err == "error: rank 0 on host h0 (site a): ended without a word\n" * 2


@pytest.mark.slow
def test_a_rank_ends_if_its_hub_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank adds at most two beats, 0.4 s, to the silence at a time, so it reports a silence of less than 2.5 s."""

    def stop(mesh: Mesh) -> None:
        hub = agreed_integer(os.getpid(), mesh)
        Watchdog(mesh, 2.0, lambda _: os.kill(hub, signal.SIGKILL))
        barrier()
        if mesh.is_main:
            os.kill(hub, signal.SIGSTOP)
        stay()

    on_ranks(2, stop, statuses=[-signal.SIGKILL, FAULT_STATUS])
    assert capfd.readouterr().err == "error: rank 0 on host h0: not heard of for 2 s: stopped, or cut off\n"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_ends_if_its_launcher_is_lost(count: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A single rank then sends itself SIGTERM. If there are two ranks, the watchdog reports the loss and ends both."""

    def lose(mesh: Mesh) -> None:
        own = Watchdog(mesh, 5.0)
        barrier()
        assert own._hub is None or own._hub._listener.getsockname()[0] == "127.0.0.1", "no other host can reach it"
        if mesh.rank == mesh.world_size - 1:
            os.getppid = lambda: 1
        stay()

    launcher = os.getpid()
    on_ranks(count, lose, statuses=[-signal.SIGTERM] if count == 1 else [FAULT_STATUS] * 2, TORCHELASTIC_RUN_ID="job")
    said = (
        f"error: rank 1 on host h0: its launcher, process {launcher}, is gone: killed, perhaps because memory ran out\n"
    )
    assert capfd.readouterr().err == ("" if count == 1 else said)


def test_the_watchdog_of_a_single_rank_only_passes_on_a_failure() -> None:
    faults: list[str] = []
    own = Watchdog(CPU, LONG, faults.append)
    with own.expect_progress(PhaseTracker()):
        own.failed("a disk is full")
    own.close()
    assert faults == ["a disk is full"]


def test_a_rank_connects_again_until_the_hub_answers_or_the_time_is_over() -> None:
    """The rank retries if a stranger that listens on the port, or a hub that rejects the greeting, closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as hub:

        def answer() -> None:
            for answered in (b"", b"you", b""):
                member, _ = hub.accept()
                with member:
                    member.sendall(answered if member.recv(LINE) == b"me" else b"")

        threading.Thread(target=answer, daemon=True).start()
        connection, answered = _join(hub.getsockname(), b"me", LONG)
        connection.close()
        assert answered == b"you"
        with pytest.raises(OSError, match=r"watchdog at 127.0.0.1:\d+ does not answer: it closes the connection"):
            _join(hub.getsockname(), b"me", 0.0)


def test_losing_the_launcher_before_ranks_have_joined_raises_no_error_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that watches the launcher reports to the hub, so it must start after the rank has connected."""
    broken: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda fault: broken.append(fault.exc_value))
    monkeypatch.setattr(watchdog, "lost_launcher", lambda: "the launcher is gone")

    def join_late(*_: object) -> int:
        time.sleep(0.2)  # several heartbeats of the thread
        raise ConnectionError("no other rank came")

    monkeypatch.setattr(watchdog, "agreed_integer", join_late)
    with pytest.raises(ConnectionError, match="no other rank came"):
        Watchdog(Mesh(1, 2, 1, torch.device("cpu"), ((0, 1),)), seconds=0.2)
    assert broken == []
