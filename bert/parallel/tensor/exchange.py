"""Collectives of a tensor group in the midst of a forward or backward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from bert.parallel.single import all_gather_single, reduce_scatter_single

Waiting = Callable[[], AbstractContextManager[object]]
"""Makes the context of a collective, in which a rank waits for the one that comes last."""


class Exchange:
    """Collectives of a group.

    Shape legend: R ranks of the group, W rows of each.
    """

    def __init__(self, group: dist.ProcessGroup, waiting: Waiting = nullcontext) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._waiting = group, waiting

    def gathered(self, own: Tensor) -> Tensor:
        """[R W, ...] of each rank's [W, ...]."""
        rows = own.new_empty((self.size * len(own), *own.shape[1:]))
        with self._waiting():
            # Collectives on one tensor take no gaps, which gradients from autograd may have.
            all_gather_single(rows, own.contiguous(), group=self._group)
        return rows

    def scattered(self, rows: Tensor) -> Tensor:
        """[W, ...] of the sum over ranks of [R W, ...]."""
        # Rows have been lengthened to a multiple of the ranks before (``SharedPlacement``).
        own = rows.new_empty((len(rows) // self.size, *rows.shape[1:]))
        with self._waiting():
            if rows.device.type == "cpu":
                # Gloo makes an all-reduce of a reduce-scatter, which waits for others several times as often. The
                # group is of one host, where it costs nothing to send each rank its part directly.
                received = torch.empty_like(rows, memory_format=torch.contiguous_format)
                dist.all_to_all_single(received, rows.contiguous(), group=self._group)
                torch.sum(received.view(self.size, *own.shape), 0, out=own)
            else:
                reduce_scatter_single(own, rows.contiguous(), group=self._group)
        return own

    def all_reduce_(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Leave the sum of the ranks' values on each, or what else is asked for."""
        with self._waiting():
            dist.all_reduce(values, operation, group=self._group)
