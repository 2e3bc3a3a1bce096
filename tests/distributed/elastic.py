"""Agents and ranks of a run that loses a host and gets it back."""

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
"""Of each process, counted from its start, those of its warm-up among them."""


def be_on(host: str) -> None:
    """Take a host name that nobody else sees, where the system lets this user."""
    if ctypes.CDLL(None).unshare(CLONE_NEWUTS) == 0:
        socket.sethostname(host)


def agent(host: str, folder: str, *arguments: str) -> None:
    """Run torchrun's agent on a host of that name, which notes its number in ``folder`` and starts ranks by ``rank``."""
    be_on(host)
    Path(folder, f"{host}.agent").write_text(str(os.getpid()))
    place = arguments.index("bert.train")
    ranks = ["tests.distributed.worker", "tests.distributed.elastic:rank", host, folder]
    sys.argv = ["torchrun", *arguments[:place], *ranks, *arguments[place + 1 :]]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


def rank(host: str, folder: str, *arguments: str) -> int:
    """Run ``bert.train``, where rank 0 waits for what a test is to do.

    On all hosts it waits once for its end, which the file "whole" in ``folder`` asks for; on fewer hosts until its agent
    stops it, as one does when a host has come, which "fewer" asks for.
    """
    import bert.train
    from bert.guards.interruption import Interruption
    from bert.step import TrainingStep

    be_on(host)
    made: list[Interruption] = []

    def at_step(count: int, _: TrainingStep) -> None:
        name = "whole" if int(os.environ["WORLD_SIZE"]) == HOSTS else "fewer"
        if count == AT_STEP and os.environ["RANK"] == "0" and not Path(folder, f"{name}-is-done").exists():
            Path(folder, name).touch()
            while made[0].number is None:
                time.sleep(0.05)

    before_each(Interruption, "__init__", lambda _, interruption: made.append(interruption))
    before_each(TrainingStep, "__call__", at_step)
    return bert.train.main(arguments)
