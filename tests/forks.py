"""Run ranks as forks of the test's own process."""

import gc
import multiprocessing
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from bert.parallel.master_port import free_port
from tests.programs import PATIENCE_S


def on_forks(
    hosts: Sequence[str], action: Callable[[int], Any], statuses: Sequence[int] = (), **variables: object
) -> list[Any]:
    """Fork a rank for each host name, call ``action(rank)`` in each fork, and return the results by rank.

    ``statuses`` are the expected exit statuses, by default 0. ``variables`` are added to the environment.
    """
    launched = {"WORLD_SIZE": len(hosts), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} | variables

    def work(rank: int) -> None:
        gc.freeze()  # a finalizer of the parent's garbage might wait for a thread that the fork does not have
        os.environ.update({name: str(value) for name, value in (launched | {"RANK": rank}).items()})
        socket.gethostname = lambda: hosts[rank]
        torch.set_num_threads(1)  # a fork must not use the threads of its parent
        Path(folder, f"{rank:03}").write_bytes(pickle.dumps(action(rank)))

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        forks = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(len(hosts))]
        for fork in forks:
            fork.start()
        try:
            while running := [fork.sentinel for fork in forks if fork.exitcode is None]:
                assert wait(running, PATIENCE_S), "ranks hang"
                assert statuses or not any(fork.exitcode for fork in forks), "a rank has failed"
        finally:
            for fork in forks:
                fork.kill()
        assert [fork.exitcode for fork in forks] == (list(statuses) or [0] * len(hosts))
        return [pickle.loads(each.read_bytes()) for each in sorted(Path(folder).iterdir())]
