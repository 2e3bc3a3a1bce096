"""Program that runs a named function: ``python -m tests.distributed.worker MODULE:FUNCTION ARGUMENT...``.

``tests.distributed.ranks`` starts it on every rank of a run. This module also has helpers that such functions use.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from bert.parallel.mesh import Mesh, join_mesh, leave_mesh


def call(name: str, *arguments: Any) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)(*arguments)


def joined(out: str, name: str, *arguments: str) -> None:
    """Join the other ranks, call the function ``name`` with the mesh, and save rank 0's result to ``out``."""
    torch.set_num_threads(1)
    mesh = join_mesh("cpu")
    found = call(name, mesh, *arguments)
    if mesh.is_main:
        torch.save(found, out)
    leave_mesh()


def regrouped(mesh: Mesh, order: str, local_size: int) -> Mesh:
    """Return a mesh in which ``local_size`` ranks share a node, numbered in block or cyclic order."""
    ranks = torch.arange(mesh.world_size)
    nodes = ranks.view(-1, local_size) if order == "block" else ranks.view(local_size, -1).T
    return replace(mesh, nodes=tuple(map(tuple, nodes.tolist())))


def end_groups() -> None:
    """Destroy all process groups but the default one, as each has a gloo thread that wakes a hundred times a second.

    Close the reduction of a ``TrainingStep`` first, because its hooks keep the groups alive.
    """
    if (world := dist.group.WORLD) is None:
        return
    dist.barrier()
    groups = dist.distributed_c10d._world.pg_map
    for group in groups.keys() - {world}:
        dist.destroy_process_group(group)
    gc.collect()
    backend, store = groups[world]
    groups[world] = (
        backend,
        PrefixStore("next", store),
    )  # a new group may have an old group's name, so hide the old keys


def on_all(condition: bool) -> bool:
    agreed = torch.tensor([int(condition)])
    if dist.is_initialized():
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def before_each(owner: type, name: str, act: Callable[[int, Any], object]) -> None:
    """Patch a method to call ``act`` before each call, with the number of the call (from 1) and the object."""
    original, count = getattr(owner, name), 0

    def changed(self: object, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        act(count, self)
        return original(self, *arguments, **options)

    setattr(owner, name, changed)


if __name__ == "__main__":
    sys.exit(call(*sys.argv[1:]))
