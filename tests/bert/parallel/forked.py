"""Ranks of a run as forks of the test's process. They meet over gloo."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bert.parallel import environment
from bert.parallel.environment import SITE
from bert.parallel.mesh import Mesh, barrier, join_mesh
from tests.forks import on_forks

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

    By default, all ranks are on one host and at one site, and must end with the status 0. ``variables`` are added to the
    environment.
    """

    def work(rank: int) -> Any:
        os.environ[SITE] = sites[rank] if sites else ""
        environment._parent.cache_clear()  # the cached parent is that of the test's process
        result = action(join_mesh("cpu"))
        if not statuses:
            barrier()  # wait, because other ranks may still connect to this one
        return result

    return on_forks(hosts or ("h0",) * count, work, statuses, **variables)
