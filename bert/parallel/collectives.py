"""Reductions, broadcasts and barriers over all ranks. In a run of one rank, they do nothing."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bert.parallel.mesh import Mesh


def all_reduce_(tensor: Tensor, operation: Literal["sum", "min", "max"] = "sum") -> Tensor:
    """Replace each value by its sum, minimum or maximum over all ranks, in place, and return the tensor."""
    if dist.is_initialized():
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation.upper()))
    return tensor


def broadcast_(tensor: Tensor) -> Tensor:
    """Overwrite ``tensor`` on every rank with rank 0's values, and return the tensor."""
    if dist.is_initialized():
        dist.broadcast(tensor, src=0)
    return tensor


def agreed_integer(value: int, mesh: Mesh) -> int:
    """Return rank 0's ``value`` on every rank. Call this only at start-up, because the host waits for the device."""
    return int(broadcast_(torch.tensor([value], dtype=torch.int64, device=mesh.device)).item())


def agreed_text(text: str, mesh: Mesh) -> str:
    """Return rank 0's ``text`` on every rank. Call this only at start-up, because the host waits for the device."""
    # Broadcast the length, then the bytes: broadcast_object_list would unpickle what it receives.
    content = text.encode()
    size = agreed_integer(len(content), mesh)
    numbers = list(content) if mesh.is_main else [0] * size
    return bytes(broadcast_(torch.tensor(numbers, dtype=torch.uint8, device=mesh.device)).tolist()).decode()


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank, or for the ranks of a group."""
    if dist.is_initialized():
        # NCCL's barrier is a sum on a device, and PyTorch warns if it has to guess the device.
        devices = [torch.cuda.current_device()] if dist.get_backend() == "nccl" else None
        dist.barrier(group, device_ids=devices)
