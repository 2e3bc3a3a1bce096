"""A rank of a run that loses a host and gets it back: ``python -m tests.distributed.workers.elastic_worker HOST ROLE ...``.

``HOST agent FOLDER ...`` is torchrun's agent on a host of that name, which notes its number in FOLDER, and starts ranks of
this program in the place of those of ``bert.train``. ``HOST rank FOLDER ...`` is a rank of ``bert.train`` there.
Under an agent, rank 0 waits where a test is to do something: on all hosts once, for its end, which the file "whole" in
FOLDER asks for; and on fewer hosts until its agent stops it, as one does when a host has come, which "fewer" asks for.
"""

import ctypes
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLONE_NEWUTS = 0x04000000
HOSTS = 4
AT_STEP = 12
"""Of each process, counted from its start, those of its warm-up among them."""


def be_on(host: str) -> None:
    """Take a host name that nobody else sees, where the system lets this user."""
    if ctypes.CDLL(None).unshare(CLONE_NEWUTS) == 0:
        socket.sethostname(host)


def main(folder: Path, arguments: list[str]) -> int:
    import bert.train
    from bert.guards.interruption import Interruption
    from bert.step import TrainingStep

    made: list[Interruption] = []
    steps = 0

    def made_one(interruption: Interruption) -> None:
        made.append(interruption)

    def at_step(_: TrainingStep) -> None:
        nonlocal steps
        steps += 1
        name = "whole" if int(os.environ["WORLD_SIZE"]) == HOSTS else "fewer"
        if steps == AT_STEP and os.environ["RANK"] == "0" and not (folder / f"{name}-is-done").exists():
            (folder / name).touch()
            while made[0].number is None:
                time.sleep(0.05)

    before_each(Interruption, "__init__", made_one)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        before_each(TrainingStep, "__call__", at_step)
    return bert.train.main(arguments)


def before_each(owner: type, name: str, act: Callable[[Any], None]) -> None:
    original = getattr(owner, name)

    def changed(self: object, *arguments: object) -> object:
        act(self)
        return original(self, *arguments)

    setattr(owner, name, changed)


if __name__ == "__main__":
    host, role, *rest = sys.argv[1:]
    be_on(host)
    folder, *arguments = rest
    if role != "agent":
        sys.exit(main(Path(folder), arguments))
    Path(folder, f"{host}.agent").write_text(str(os.getpid()))
    place = arguments.index("bert.train")
    arguments[place : place + 1] = ["tests.distributed.workers.elastic_worker", host, "rank", folder]
    sys.argv = ["torchrun", *arguments]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
