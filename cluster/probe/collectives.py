"""Collectives as training uses them: in the node, along rails, over all ranks; what each costs, and whether it is right.

All nodes, and all rails, work at the same time, as in a step. Values are whole numbers that fp32 adds exactly, so every
element of every timed result is compared with the one right value.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import Tensor

from bert.parallel.collectives import barrier
from bert.parallel.mesh import Mesh
from bert.parallel.reduction.gradients import Communicators
from bert.parallel.single import all_gather_single, reduce_scatter_single
from cluster.probe.computing import gather_numbers
from cluster.view import Collective, Operation, Scope

SMALLEST_BYTES, LARGEST_BYTES = 64 * 2**10, 256 * 2**20
_FACTOR = 4
"""From one size to the next."""
# An odd number has a middle one; the first call, which connects, comes on top.
_REPEATS, _FEWEST_REPEATS = 5, 3
_FEWEST_SIZES = 3
"""Up to 1 MiB, whatever that takes: what shapers let through at once would pass for what a link carries."""
_PERIOD = 61
"""Values repeat after so many elements; a prime number, so that pieces of equal size differ."""


@dataclass(frozen=True)
class WrongResult:
    """Finding of a rank about a wrong collective; ``source``: whose data is wrong, where that can be told, else -1."""

    operation: Operation
    scope: Scope
    rank: int
    source: int
    elements: int


def measure_collectives(mesh: Mesh, seconds: float) -> tuple[list[Collective], list[WrongResult]]:
    """Time all collectives in all scopes. Every rank must call it at the same time; all get the same answer.

    The sizes of each go up from ``SMALLEST_BYTES``, at least three times, until the next would take longer than its part of
    ``seconds``.
    """
    groups = Communicators.create(mesh)
    every = list(range(mesh.world_size))
    # Every rank goes through scopes and operations in the same order, as all take part in each.
    scopes: dict[Scope, tuple[dist.ProcessGroup | None, list[int]]] = {"world": (groups.world, every)}
    # One node, or one rank in each, makes node and rail the same as world or trivial.
    if 1 < len(mesh.node_ranks) < mesh.world_size:
        scopes["node"] = (groups.node, list(mesh.node_ranks))
        scopes["rail"] = (groups.rail, list(mesh.rail_ranks))
    operations: tuple[Operation, ...] = get_args(Operation)
    measured: list[tuple[Scope, dist.ProcessGroup, list[int]]] = [
        (scope, group, ranks) for scope, (group, ranks) in scopes.items() if group is not None
    ]
    share = seconds / max(1, len(measured) * len(operations))
    collectives, wrong = [], []
    for scope, group, ranks in measured:
        for operation in operations:
            points, errors = _times(mesh, group, ranks, operation, scope, share)
            latency, rate, residual = fit([(size, seconds) for size, seconds, _ in points])
            collectives.append(Collective(operation, scope, len(ranks), latency, rate, residual, tuple(points)))
            wrong += errors
    return collectives, wrong


def fit(points: list[tuple[int, float]]) -> tuple[float, float, float]:
    """Latency, seconds a byte, and the relative residual (rms): least squares of relative errors, neither negative."""
    size_K, seconds_K = np.array(points, dtype=np.float64).T
    # Divided by the seconds, residuals are relative: otherwise the largest size would decide alone.
    coefficients, norm = nnls(np.stack([1 / seconds_K, size_K / seconds_K], axis=1), np.ones(len(points)))
    return float(coefficients[0]), float(coefficients[1]), float(norm / np.sqrt(len(points)))


def _times(
    mesh: Mesh, group: dist.ProcessGroup, ranks: list[int], operation: Operation, scope: Scope, seconds: float
) -> tuple[list[tuple[int, float, float]], list[WrongResult]]:
    points, wrong, spent, size = [], [], 0.0, SMALLEST_BYTES
    while size <= LARGEST_BYTES:
        # The next size is taken to need as many times longer as it is larger: bandwidth rules there.
        left, next_one = seconds - spent, _FACTOR * points[-1][1] if points else 0.0
        # `points` has the slowest rank's seconds, which all ranks have alike: so all of them stop at the same size.
        if len(points) >= _FEWEST_SIZES and left < _FEWEST_REPEATS * next_one:
            break
        trial = _Trial(mesh.device, group, ranks, mesh.rank, operation, size)
        # More repeats only where time for them is left after the next size.
        took, busy, bad = trial.run(mesh, _REPEATS if left > 2 * _REPEATS * next_one else _FEWEST_REPEATS)
        points.append((trial.bytes, float(np.median(took)), busy))
        spent += float(np.sum(took))
        wrong += [WrongResult(operation, scope, *each) for each in bad]
        size *= _FACTOR
    return points, wrong


class _Trial:
    """One collective at one size."""

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup,
        ranks: list[int],
        rank: int,
        operation: Operation,
        size: int,
    ) -> None:
        many, place = len(ranks), ranks.index(rank)
        piece = max(1, size // 4 // many)
        count = piece * many
        self.bytes = 4 * count
        self._ranks, self._rank, self._operation = ranks, rank, operation
        # Small whole numbers, whose sums over ranks are exact in fp32: any order of addition gives the same.
        whole = torch.arange(count, device=device) % _PERIOD
        mine = slice(place * piece, (place + 1) * piece)
        self._own = (whole + place % _PERIOD).float()
        # The sum over places of (element + place % period), which fp32 holds exactly.
        total = (whole * many + sum(other % _PERIOD for other in range(many))).float()
        self._run: Callable[[], object]
        # A closure for each operation, made outside of the timed part.
        if operation == "all-reduce":
            self._out, self._right = torch.empty_like(self._own), total
            self._run = lambda: dist.all_reduce(self._out, group=group)
        elif operation == "reduce-scatter":
            self._out, self._right = torch.empty_like(self._own[mine]), total[mine]
            # Through `single`, whose functions have the same names in old and new PyTorch.
            self._run = lambda: reduce_scatter_single(self._out, self._own, group=group)
        elif operation == "all-to-all":
            self._out = torch.empty_like(self._own)
            self._right = torch.cat([whole[mine] + other % _PERIOD for other in range(many)]).float()
            self._run = lambda: dist.all_to_all_single(self._out, self._own, group=group)
        else:
            self._out, self._right = torch.empty_like(self._own), whole.float()
            piece_of_mine = self._right[mine].clone()
            self._run = lambda: all_gather_single(self._out, piece_of_mine, group=group)

    def run(self, mesh: Mesh, repeats: int) -> tuple[list[float], float, list[tuple[int, int, int]]]:
        """Seconds of each repetition on the slowest rank; processor seconds of one, of all ranks together; and rank, source
        and wrong elements of what was wrong.
        """
        took, busy, wrong_elements, source = [], 0.0, 0, -1
        for repeat in range(repeats + 1):  # the first one connects
            # What the repetition before left there would pass for right.
            self._out.copy_(self._own) if self._operation == "all-reduce" else self._out.zero_()
            # All ranks begin together: otherwise the first one times how late the others are.
            barrier()
            start, before = time.perf_counter(), time.process_time()
            # process_time has all threads of the process: gloo's do the work of a collective.
            self._run()
            # Before the clock is read: NCCL only queues the work.
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            if repeat:
                took.append(time.perf_counter() - start)
                busy += (time.process_time() - before) / repeats
            # After every repetition: an error may come once.
            is_wrong = self._out != self._right
            found = int(is_wrong.sum().item())
            if found > wrong_elements:
                wrong_elements, source = found, self._source(is_wrong)
        return self._agreed(mesh, took, busy, wrong_elements, source)

    def _source(self, is_wrong: Tensor) -> int:
        """Name the rank whose piece is wrong: those of an all-gather and an all-to-all come from one rank each."""
        if self._operation not in ("all-gather", "all-to-all"):
            # Sums mix all ranks: a wrong element of them has no single source.
            return -1
        first = int(is_wrong.nonzero()[0].item())
        return self._ranks[first // (len(is_wrong) // len(self._ranks))]

    def _agreed(
        self, mesh: Mesh, took: list[float], busy: float, wrong: int, source: int
    ) -> tuple[list[float], float, list[tuple[int, int, int]]]:
        # fp64 holds seconds, counts and rank numbers exactly in one message.
        found = gather_numbers(np.array([*took, busy, wrong, source]), mesh)
        bad = [(rank, int(row[-1]), int(row[-2])) for rank, row in enumerate(found) if row[-2]]
        # The slowest rank's time of each repetition; processors are added up over all ranks.
        return found[:, : len(took)].max(axis=0).tolist(), float(found[:, len(took)].sum()), bad
