"""Who this process is among the others, from the launcher's environment."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """This process's place in the run."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that logs."""
        return self.rank == 0


def join_mesh(device: str) -> Mesh:
    """Join the run that torchrun describes in the environment; without one, a run of a single process.

    NCCL between GPUs, gloo between CPUs. Raises ``ValueError`` when the environment or the device does not fit.
    """
    rank, world_size, local_rank = (_environment(name, default) for name, default in _VARIABLES)
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} with WORLD_SIZE={world_size}: start the run with torchrun or unset both")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("training.device is cuda, but PyTorch sees no GPU here: set training.device to cpu")
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK={local_rank}, but PyTorch sees {torch.cuda.device_count()} GPUs here: "
                "start at most one process a GPU"
            )
        torch.cuda.set_device(local_rank)
    place = torch.device(device, local_rank) if device == "cuda" else torch.device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world_size)
    return Mesh(rank, world_size, local_rank, place)


def launched_world_size() -> int:
    """The number of processes that the launcher announces, known before joining them. Raises as ``join_mesh``."""
    return _environment("WORLD_SIZE", 1)


def leave_mesh() -> None:
    """Say good-bye to the other processes, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


_VARIABLES = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.lstrip("-").isdigit():
        raise ValueError(f"{name}={text!r} in the environment: expected a whole number")
    return int(text)
