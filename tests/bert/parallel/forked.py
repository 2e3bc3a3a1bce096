"""Ranks of a run as forks of the test's own process, which meet over gloo."""

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

import pytest
import torch

from bert.parallel import environment
from bert.parallel.environment import SITE
from bert.parallel.master_port import free_port
from bert.parallel.mesh import Mesh, barrier, join_mesh

trains_in_forks = pytest.mark.skipif(
    torch.cuda.is_available(), reason="autograd has threads for GPUs, which a fork of the test's process would lack"
)


def on_ranks(
    count: int,
    action: Callable[[Mesh], Any],
    hosts: Sequence[str] = (),
    sites: Sequence[str] = (),
    statuses: Sequence[int] = (),
    **variables: object,
) -> list[Any]:
    """Call ``action`` with the mesh of each rank in a fork of its own, and return the results.

    By default, all ranks are on one host and at one site, and must end with the status 0. ``variables`` are those of the
    environment.
    """
    launched = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} | variables

    def work(rank: int) -> None:
        gc.freeze()  # finalizers of the parent's garbage may wait for threads that a fork lacks
        own = launched | {"RANK": rank, SITE: sites[rank] if sites else ""}
        os.environ.update({name: str(value) for name, value in own.items()})
        socket.gethostname = lambda: hosts[rank] if hosts else "h0"
        environment._parent.cache_clear()  # a fork has another parent
        torch.set_num_threads(1)  # a fork must not use the threads of its parent
        result = action(join_mesh("cpu"))
        Path(folder, str(rank)).write_bytes(pickle.dumps(result))
        if not statuses:
            barrier()  # others may still connect to this rank

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        forks = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(count)]
        for fork in forks:
            fork.start()
        try:
            while running := [fork.sentinel for fork in forks if fork.exitcode is None]:
                assert wait(running, 100), "ranks hang"
                assert statuses or not any(fork.exitcode for fork in forks), "a rank has failed"
        finally:
            for fork in forks:
                fork.kill()
        assert [fork.exitcode for fork in forks] == (list(statuses) or [0] * count)
        return [pickle.loads(each.read_bytes()) for each in sorted(Path(folder).iterdir())]
