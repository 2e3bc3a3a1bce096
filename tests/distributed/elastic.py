"""Programs of ``test_adaptive.py``: torchrun's agents and ranks of a run that loses a host and gets it back."""

import ctypes
import os
import runpy
import socket
import sys
import time
from pathlib import Path

from tests.distributed.worker import before_each

CLONE_NEWUTS = 0x04000000
HOSTS = 4
AT_STEP = 12
"""Step at which rank 0 waits. Every process counts from 1 and includes warm-up steps."""


def be_on(host: str) -> None:
    """Give this process its own host name, in a new UTS namespace, if it has the permission."""
    if ctypes.CDLL(None).unshare(CLONE_NEWUTS) == 0:
        socket.sethostname(host)


def agent(host: str, folder: str, *arguments: str) -> None:
    """Run torchrun's agent under the given host name.

    The agent writes its process id to ``folder`` and starts each rank by calling ``rank``.
    """
    be_on(host)
    Path(folder, f"{host}.agent").write_text(str(os.getpid()))
    place = arguments.index("bert.train")
    ranks = ["tests.distributed.worker", "tests.distributed.elastic:rank", host, folder]
    sys.argv = ["agent", *arguments[:place], *ranks, *arguments[place + 1 :]]
    runpy.run_module("bert.launch.agent", run_name="__main__", alter_sys=True)


def rank(host: str, folder: str, *arguments: str) -> int:
    """Run ``bert.train``. At step ``AT_STEP``, rank 0 creates a file for the test and waits for a signal to stop.

    Before that, it waits until a checkpoint of this attempt is on disk, from which the next attempt can go on. The file's
    name is "whole" if all hosts take part, and "fewer" otherwise. If "whole-is-done" or "fewer-is-done" exists, rank 0
    creates no file of the corresponding name and does not wait.
    """
    import bert.train
    from bert.guards.interruption import Interruption
    from bert.step import TrainingStep

    be_on(host)
    made: list[Interruption] = []
    checkpoints = Path(folder, "checkpoints")
    earlier = {*checkpoints.glob("step_*")}

    def at_step(count: int, _: TrainingStep) -> None:
        name = "whole" if int(os.environ["WORLD_SIZE"]) == HOSTS else "fewer"
        if count == AT_STEP and os.environ["RANK"] == "0" and not Path(folder, f"{name}-is-done").exists():
            while {*checkpoints.glob("step_*")} <= earlier:
                time.sleep(0.05)
            Path(folder, name).touch()
            while made[0].number is None:
                time.sleep(0.05)

    before_each(Interruption, "__init__", lambda _, interruption: made.append(interruption))
    before_each(TrainingStep, "__call__", at_step)
    return bert.train.main(arguments)
