"""Run ``python -m bert.train`` with a rank that fails on purpose."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import bert.run
import bert.train
from bert.parallel.pipeline.stages import PipelineModel
from bert.step import TrainingStep
from dataloading.batches.loader import NumpyLoader
from tests.distributed.worker import before_each

AT_STEP = 50
"""Number of the call of a patched method at which the rank fails, some evaluations after the start."""


def faulty(breaks: str, *arguments: str) -> int:
    """Run ``bert.train`` with faults given as WAY:RANK[,WAY:RANK], where WAY is a key of ``WAYS``."""
    for way, _, rank in (part.partition(":") for part in breaks.split(",")):
        if os.environ.get("RANK", "0") == rank:
            WAYS[way]()
    return bert.train.main(arguments)


def at_step(owner: type, name: str, act: Callable[[], object]) -> None:
    """Call ``act`` before the ``AT_STEP``-th call of a method."""
    before_each(owner, name, lambda count, _: act() if count == AT_STEP else None)


def hang() -> None:
    while True:
        time.sleep(1)


def delay(owner: type, name: str, times: int, first: int = 1) -> None:
    """Delay each call of a method, from call number ``first``, by ``times`` the time since the previous call."""
    came = time.monotonic()

    def late(count: int, _: object) -> None:
        nonlocal came
        if count >= first:
            time.sleep(times * (time.monotonic() - came))
        came = time.monotonic()

    before_each(owner, name, late)


def hurry() -> None:
    """When another rank reports a signal, wait only one second for a signal to this rank."""
    bert.run._OWN_SIGNAL_S = 1.0


def fill_disk() -> None:
    """Fill the disk at ``$DISK`` with a large file at step 8."""

    def filled(count: int, _: object) -> None:
        disk = Path(os.environ["DISK"])
        if count != 8:
            return
        with (disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))

    before_each(TrainingStep, "__call__", filled)


WAYS: dict[str, Callable[[], None]] = {
    "hang": lambda: at_step(NumpyLoader, "__next__", hang),
    "compute": lambda: at_step(PipelineModel, "through", hang),
    "slow": lambda: delay(NumpyLoader, "__next__", 10, first=6),
    "hurry": hurry,
    "fill": fill_disk,
}
