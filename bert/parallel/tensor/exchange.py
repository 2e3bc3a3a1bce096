"""Collectives of a tensor group during a forward or backward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from bert.parallel.single import all_gather_single, reduce_scatter_single

Waiting = Callable[[], AbstractContextManager[object]]
"""Function that returns a context manager for a collective. The time in it includes the wait for the last rank."""


class Exchange:
    """Collectives of a tensor group. They run in the context that ``waiting`` returns.

    Shape legend: R ranks of the group, W rows of each.
    """

    def __init__(self, group: dist.ProcessGroup, waiting: Waiting = nullcontext) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._waiting = group, waiting

    def gathered(self, own: Tensor) -> Tensor:
        """Gather all rows [R W, ...] from each rank's rows [W, ...]."""
        rows = own.new_empty((self.size * len(own), *own.shape[1:]))
        with self._waiting():
            # Collectives on one tensor need contiguous memory, and gradients from autograd may not be contiguous.
            all_gather_single(rows, own.contiguous(), group=self._group)
        return rows

    def scattered(self, rows: Tensor) -> Tensor:
        """Sum ``rows`` [R W, ...] over the ranks, and return this rank's rows [W, ...] of the sum: a reduce-scatter."""
        # ``SharedPlacement`` has already padded the rows to a multiple of the ranks.
        own = rows.new_empty((len(rows) // self.size, *rows.shape[1:]))
        with self._waiting():
            if rows.device.type == "cpu":
                # Gloo implements a reduce-scatter as an all-reduce, which waits for other ranks several times as often. All
                # ranks of the group are on one host, so each rank's part can be sent to it directly at no extra cost.
                received = torch.empty_like(rows, memory_format=torch.contiguous_format)
                dist.all_to_all_single(received, rows.contiguous(), group=self._group)
                torch.sum(received.view(self.size, *own.shape), 0, out=own)
            else:
                reduce_scatter_single(own, rows.contiguous(), group=self._group)
        return own

    def all_reduce_(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        with self._waiting():
            dist.all_reduce(values, operation, group=self._group)
