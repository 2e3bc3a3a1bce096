"""Forks of the test's own process as ranks, whose clocks advance by one step at every reading."""

import gc
import itertools
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bert.parallel.master_port import free_port


def clock(step: float) -> SimpleNamespace:
    """Return a module ``time`` in which each reading of a clock is ``step`` seconds later than the previous one."""
    wall, processor = itertools.count(), itertools.count()
    return SimpleNamespace(perf_counter=lambda: step * next(wall), process_time=lambda: 8 * step * next(processor))


def on_forks(folder: Path, hosts: Sequence[str], action: Callable[[int], Any]) -> list[Any]:
    """Call ``action`` with its rank in a fork for each name of a host, and return the results. A failure ends all forks."""
    launched = {"WORLD_SIZE": len(hosts), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}

    def work(rank: int) -> None:
        gc.freeze()  # finalizers of the parent's garbage may wait for threads that a fork lacks
        os.environ.update({name: str(value) for name, value in (launched | {"RANK": rank}).items()})
        socket.gethostname = lambda: hosts[rank]
        torch.set_num_threads(1)  # a fork must not use the threads of its parent
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(action(rank)))

    context = multiprocessing.get_context("fork")
    forks = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(len(hosts))]
    for fork in forks:
        fork.start()
    try:
        while running := [fork.sentinel for fork in forks if fork.exitcode is None]:
            assert wait(running, 30)
            assert all(not fork.exitcode for fork in forks)
    finally:
        for fork in forks:
            fork.kill()
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(len(hosts))]
