"""Run ``python -m bert.train`` with a rank that fails on purpose."""

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import bert.run
import bert.train
from bert.layers import EncoderLayer
from bert.parallel.pipeline.stages import PipelineModel
from bert.parallel.watchdog import watchdog
from bert.step import TrainingStep
from dataloading.batches.loader import NumpyLoader
from tests.distributed.worker import before_each

AT_STEP = int(os.environ.get("AT_STEP", "50"))
"""Step at which the rank fails, some evaluations after the start."""


def faulty(breaks: str, *arguments: str) -> int:
    """Run ``bert.train`` with the faults ``breaks``, given as WAY:RANK[,WAY:RANK]."""
    for way, _, rank in (part.partition(":") for part in breaks.split(",")):
        if os.environ.get("RANK", "0") == rank:
            WAYS[way]()
    return bert.train.main(arguments)


def raise_in_step() -> None:
    """Raise an error between two collectives."""

    def broken(count: int, _: object) -> None:
        if count == AT_STEP:
            raise RuntimeError("broken on purpose" + 100_000 * "\N{GRINNING FACE}")  # a message too long for one line

    before_each(TrainingStep, "__call__", broken)


def die() -> None:
    """Kill the process. A resumed run of fewer than 2 * ``AT_STEP`` steps ends before it is killed again."""

    def killed(count: int, _: object) -> None:
        if count == AT_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each(TrainingStep, "__call__", killed)


def hang_in_loader() -> None:
    """Hang in a read of the data loader."""

    def stuck(count: int, _: object) -> None:
        while count == AT_STEP:
            time.sleep(1)

    before_each(NumpyLoader, "__next__", stuck)


def hang_in_stage() -> None:
    """Hang in a pipeline stage."""

    def stuck(count: int, _: object) -> None:
        while count == AT_STEP:
            time.sleep(1)

    before_each(PipelineModel, "through", stuck)


def slow_down() -> None:
    """After some steps, delay each batch by ten times the duration of the previous step."""
    came = time.monotonic()

    def late(count: int, _: object) -> None:
        nonlocal came
        if count > 5:
            time.sleep(10 * (time.monotonic() - came))
        came = time.monotonic()

    before_each(NumpyLoader, "__next__", late)


def drag() -> None:
    """Delay each layer by four times the duration of the previous one."""
    came = time.monotonic()

    def late(*_: object) -> None:
        nonlocal came
        time.sleep(4 * (time.monotonic() - came))
        came = time.monotonic()

    before_each(EncoderLayer, "forward", late)


def overflow() -> None:
    """After ``AT_STEP``, make gradients infinite in every step, as on a rank that has lost its weights."""

    def infinite(count: int, step: TrainingStep) -> None:
        if count > AT_STEP:
            step.flat.gradients_P[-1] = float("inf")

    before_each(TrainingStep, "_forward_backward", infinite)


def hurry() -> None:
    """Shorten a wait: if another host's ranks got a signal, this rank waits only one second for its own."""
    bert.run._OWN_SIGNAL_S = 1.0


def fill_disk() -> None:
    """Fill the disk at ``$DISK`` with another file at step 8. If there are checkpoints, wait for that of step 4 first."""

    def filled(count: int, _: object) -> None:
        disk = Path(os.environ["DISK"])
        if count != 8:
            return
        while "--checkpoint.folder" in sys.argv and not (disk / "step_00000004").exists():
            time.sleep(0.01)
        with (disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))

    before_each(TrainingStep, "__call__", filled)


def show_port() -> None:
    """Print the port of the watchdog. Nothing fails."""
    listen = watchdog.listen

    def shown(address: str) -> socket.socket:
        listener = listen(address)
        print(f"the watchdog's port: {listener.getsockname()[1]}", flush=True)
        return listener

    watchdog.listen = shown


WAYS = {
    "fill": fill_disk,
    "show": show_port,
    "raise": raise_in_step,
    "die": die,
    "hang": hang_in_loader,
    "compute": hang_in_stage,
    "slow": slow_down,
    "drag": drag,
    "overflow": overflow,
    "hurry": hurry,
}
