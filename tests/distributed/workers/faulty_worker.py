"""A rank of a run that breaks on purpose.

python -m tests.distributed.workers.faulty_worker WAY:RANK[,WAY:RANK] RECIPE ...
"""

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import bert.train
from bert.layers import EncoderLayer
from bert.log.mllog import MLLog
from bert.parallel.pipeline.stages import PipelineModel
from bert.parallel.watchdog import watchdog
from bert.step import TrainingStep
from dataloading.batches.loader import NumpyLoader

AT_STEP = int(os.environ.get("AT_STEP", "50"))
"""The step at which it happens: some evaluations after the start."""


def main() -> int:
    breaks, *arguments = sys.argv[1:]
    for way, _, rank in (part.partition(":") for part in breaks.split(",")):
        if os.environ.get("RANK", "0") == rank:
            WAYS[way]()
    return bert.train.main(arguments)


def raise_in_step() -> None:
    """An error between two collectives."""

    def broken(count: int) -> None:
        if count == AT_STEP:
            raise RuntimeError("broken on purpose")

    _before_each(TrainingStep, "__call__", broken)


def die() -> None:
    """Killed. A run of fewer than two times ``AT_STEP`` steps that goes on from a checkpoint comes to its end."""

    def killed(count: int) -> None:
        if count == AT_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    _before_each(TrainingStep, "__call__", killed)


def hang_in_loader() -> None:
    """A read that never returns."""

    def stuck(count: int) -> None:
        while count == AT_STEP:
            time.sleep(1)

    _before_each(NumpyLoader, "__next__", stuck)


def hang_in_stage() -> None:
    """A stage of a pipeline that never comes to its end."""

    def stuck(count: int) -> None:
        while count == AT_STEP:
            time.sleep(1)

    _before_each(PipelineModel, "through", stuck)


def slow_down() -> None:
    """Data that come late, from a step on: each time, ten times as late as the step before took."""
    came = time.monotonic()

    def late(count: int) -> None:
        nonlocal came
        if count > 5:
            time.sleep(10 * (time.monotonic() - came))
        came = time.monotonic()

    _before_each(NumpyLoader, "__next__", late)


def drag() -> None:
    """Layers that begin late: each time, four times as late as the one before took."""
    came = time.monotonic()

    def late(_: int) -> None:
        nonlocal came
        time.sleep(4 * (time.monotonic() - came))
        came = time.monotonic()

    _before_each(EncoderLayer, "forward", late)


def overflow() -> None:
    """Gradients that are not finite, from a step on: those of a rank that has lost its weights."""
    original, count = TrainingStep._forward_backward, 0

    def changed(self: TrainingStep, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count > AT_STEP:
            self.flat.gradients_P[-1] = float("inf")
        original(self, *arguments)

    owner: Any = TrainingStep
    owner._forward_backward = changed


def linger() -> None:
    """Last words that take their time."""
    _before_each(MLLog, "abort", lambda _: time.sleep(3))


def fill_disk() -> None:
    """Somebody else's file takes what is left of the disk at ``$DISK``, once the checkpoint of step 4, if any, is there."""

    def filled(count: int) -> None:
        disk = Path(os.environ["DISK"])
        if count != 8:
            return
        while "--checkpoint.folder" in sys.argv and not (disk / "step_00000004").exists():
            time.sleep(0.01)
        with (disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))

    _before_each(TrainingStep, "__call__", filled)


def show_port() -> None:
    """Nothing breaks; the port of the watchdog is told."""
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
    "linger": linger,
}


def _before_each(owner: type, name: str, act: Any) -> None:
    original, count = getattr(owner, name), 0

    def changed(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        act(count)
        return original(*arguments, **options)

    setattr(owner, name, changed)


if __name__ == "__main__":
    sys.exit(main())
