"""The start of a rank's watchdog, while other ranks have not joined yet."""

import threading
import time

import pytest
import torch

from bert.parallel.mesh import Mesh
from bert.parallel.watchdog import watchdog


def test_a_launcher_that_is_lost_before_the_ranks_have_joined_breaks_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch of the launcher reports through the connection to the hub, so it starts when there is one."""
    broken: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda fault: broken.append(fault.exc_value))
    monkeypatch.setattr(watchdog, "lost_launcher", lambda: "the launcher is gone")

    def join_late(*_: object) -> int:
        time.sleep(0.5)  # several of the watch's beats
        raise ConnectionError("no other rank came")

    monkeypatch.setattr(watchdog, "agreed_integer", join_late)
    with pytest.raises(ConnectionError, match="no other rank came"):
        watchdog.Watchdog(Mesh(1, 2, 1, torch.device("cpu"), ((0, 1),)), seconds=0.5)
    assert broken == []
