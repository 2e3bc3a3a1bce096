"""Timing of the collectives that training uses, within nodes, along rails and over all ranks. Every result is checked.

All nodes and all rails work at the same time, as in a step. The values are integers that fp32 adds exactly, so every
element of every result can be compared with the expected value.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bert.parallel.mesh import Mesh, barrier
from bert.parallel.reduction.gradients import Communicators
from bert.parallel.single import all_gather_single, reduce_scatter_single
from cluster.probe.computing import gather_numbers
from cluster.view import Collective, Operation, Scope

_SMALLEST_BYTES, _LARGEST_BYTES, _FACTOR = 64 * 2**10, 256 * 2**20, 4
_REPEATS, _FEWEST_REPEATS = 5, 3
_FEWEST_SIZES = 3
"""Number of message sizes that are always timed. The largest is 1 MiB, because traffic shapers delay only large messages."""
_PERIOD = 61
"""Number of elements after which the test values repeat. It is prime, so that pieces of equal size differ."""


@dataclass(frozen=True)
class WrongResult:
    """A wrong result of a collective on one rank, with its number of wrong elements."""

    operation: Operation
    scope: Scope
    rank: int
    elements: int


def measure_collectives(mesh: Mesh, seconds: float) -> tuple[list[Collective], list[WrongResult]]:
    """Time all collectives in all scopes. All ranks must call this function at the same time, and get the same result.

    Each collective gets an equal part of ``seconds``. The message size grows until the next size would take more time.
    """
    groups = Communicators.create(mesh)
    scopes: dict[Scope, dist.ProcessGroup | None] = {"world": groups.data}
    # With a single node, or one rank per node, any other scope has one rank or equals "world". Then time only "world".
    if 1 < len(mesh.node_ranks) < mesh.world_size:
        scopes |= {"node": groups.node, "rail": groups.rail}
    operations: tuple[Operation, ...] = get_args(Operation)
    share = seconds / (len(scopes) * len(operations))
    collectives, wrong = [], []
    for scope, group in scopes.items():
        for operation in operations:
            assert group is not None
            points, errors = _times(mesh, group, operation, share)
            collectives.append(Collective(operation, scope, group.size(), tuple(points)))
            wrong += [WrongResult(operation, scope, *each) for each in errors]
    return collectives, wrong


def _times(
    mesh: Mesh, group: dist.ProcessGroup, operation: Operation, seconds: float
) -> tuple[list[tuple[int, float, float]], list[tuple[int, int]]]:
    ranks = dist.get_process_group_ranks(group)
    points, wrong, spent, size = [], [], 0.0, max(_SMALLEST_BYTES, 4 * len(ranks))
    while size <= _LARGEST_BYTES:
        left, next_one = seconds - spent, _FACTOR * points[-1][1] if points else 0.0
        # `spent` and `points` hold the slowest rank's seconds on all ranks, so all ranks stop at the same size.
        if len(points) >= _FEWEST_SIZES and left < _FEWEST_REPEATS * next_one:
            break
        piece = size // 4 // len(ranks)
        trial = CollectiveTrial.of(operation, mesh, group, ranks, piece)
        repeats = _REPEATS if left > 2 * _REPEATS * next_one else _FEWEST_REPEATS
        took, busy, errors = _run(mesh, trial, repeats)
        points.append((4 * piece * len(ranks), float(np.median(took)), busy))
        spent += sum(took)
        wrong += errors
        size *= _FACTOR
    return points, wrong


@dataclass(frozen=True)
class CollectiveTrial:
    """A collective on one rank: its buffers, the call, and the expected result."""

    own: Tensor
    out: Tensor
    right: Tensor
    action: Callable[[], object]
    is_in_place: bool = False

    @classmethod
    def of(
        cls, operation: Operation, mesh: Mesh, group: dist.ProcessGroup | None, ranks: list[int], piece: int
    ) -> "CollectiveTrial":
        """Prepare a collective of a group's ``ranks`` on vectors of one piece for each rank, with ``piece`` elements."""
        many, place = len(ranks), ranks.index(mesh.rank)
        whole = torch.arange(piece * many, device=mesh.device) % _PERIOD
        mine = slice(place * piece, (place + 1) * piece)
        own = (whole + place % _PERIOD).float()
        # Element i of the rank at place p in the group is i % _PERIOD + p % _PERIOD. The sum covers all places.
        total = (whole * many + sum(other % _PERIOD for other in range(many))).float()
        out = torch.empty_like(own)
        if operation == "all-reduce":
            return cls(own, out, total, lambda: dist.all_reduce(out, group=group), is_in_place=True)
        if operation == "reduce-scatter":
            out = torch.empty_like(own[mine])
            return cls(own, out, total[mine], lambda: reduce_scatter_single(out, own, group=group))
        if operation == "all-to-all":
            right = torch.cat([whole[mine] + other % _PERIOD for other in range(many)]).float()
            return cls(own, out, right, lambda: dist.all_to_all_single(out, own, group=group))
        right = whole.float()
        sent = right[mine].clone()
        return cls(own, out, right, lambda: all_gather_single(out, sent, group=group))


def _run(mesh: Mesh, trial: CollectiveTrial, repeats: int) -> tuple[list[float], float, list[tuple[int, int]]]:
    """Return the slowest rank's seconds of each repetition, the processor seconds of one repetition summed over all ranks,
    and (rank, number of wrong elements) of each wrong result.
    """
    took, busy, wrong = [], 0.0, 0
    for repeat in range(repeats + 1):  # the first repetition connects the ranks and is not timed
        # Clear the output, because the previous result would pass the check.
        trial.out.copy_(trial.own) if trial.is_in_place else trial.out.zero_()
        barrier()
        start, before = time.perf_counter(), time.process_time()
        trial.action()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        if repeat:
            took.append(time.perf_counter() - start)
            # process_time() includes Gloo's threads, which do the work of a collective.
            busy += (time.process_time() - before) / repeats
        wrong = max(wrong, int((trial.out != trial.right).sum().item()))
    found_RK = gather_numbers(np.array([*took, busy, wrong]), mesh)
    errors = [(rank, int(row[-1])) for rank, row in enumerate(found_RK) if row[-1]]
    return found_RK[:, : len(took)].max(axis=0).tolist(), float(found_RK[:, len(took)].sum()), errors
