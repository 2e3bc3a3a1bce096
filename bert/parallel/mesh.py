"""Place of this process among the ranks: its host, the neighbours there, and the ranks that share its copy of the model.

The launcher's environment gives rank and world size; ``bert.parallel.rendezvous`` finds out which ranks share a host.

Ranks are dealt host by host: first the shards of a stage, which exchange the most and stay on a host, then the stages of a
copy, neighbours on a host or on the next one, then the copies. A host holds whole copies, or a copy whole hosts; so the
ranks of a data group have the same local rank whenever there is one of them a host. PyTorch's DeviceMesh cannot describe
that: it assumes that neighbouring ranks share a host.
"""

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from bert.configuration.sections import ParallelConfig
from bert.parallel.launch import Launch
from bert.parallel.rendezvous import group_by_host, join_group
from console.text import counted
from kernels.precision import set_product_precision

# Longer than training.fault_seconds by default: the watchdog ends a run first, and says whose fault it is.
TIMEOUT = timedelta(minutes=10)
"""After this long in one collective, or in waiting for all ranks to join, a rank gives up."""


@dataclass(frozen=True)
class Mesh:
    """This process's place in the run: a grid of nodes by ranks of a node.

    ``tensor`` neighbours on a node share a stage of the model, ``pipeline`` such groups a copy of it, whose ranks get the
    same micro-batches. Ranks with the same place in their copies have the same shards of the same layers, and add up
    gradients: a data group, which does not leave its rail.
    """

    rank: int
    world_size: int
    local_rank: int
    """Of the process on its host, as the launcher numbers it: the device to use."""
    device: torch.device
    nodes: tuple[tuple[int, ...], ...] = ()
    """The ranks of each host, by local rank; ``()`` stands for one host. Neighbours need not have neighbouring ranks."""
    tensor: int = 1
    """Ranks that share a stage of the model, or the whole where there is one stage."""
    pipeline: int = 1
    """Groups of such ranks that a copy of the model is divided among, layer by layer."""
    hosts: tuple[str, ...] = ()
    """The name of every rank's host, by rank."""

    @property
    def is_main(self) -> bool:
        """Tell whether this is the process that logs."""
        return self.rank == 0

    @cached_property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks on this host, by local rank."""
        return next((ranks for ranks in self.nodes if self.rank in ranks), tuple(range(self.world_size)))

    @cached_property
    def rail_ranks(self) -> tuple[int, ...]:
        """The ranks with this one's place on their hosts and in their copies, ascending: they share a path, a rail."""
        place = self.node_ranks.index(self.rank)
        data = set(self.data_ranks)
        # Sorted, as PyTorch 2.11 makes no group in another order. None matters here: only all-reduces go along a rail.
        return tuple(sorted(ranks[place] for ranks in self.nodes if ranks[place] in data)) or (self.rank,)

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each copy of the model, stage after stage; copies by their lowest rank."""
        ranks = [rank for node in self.nodes for rank in node] or list(range(self.world_size))
        size = self.tensor * self.pipeline
        return tuple(sorted((tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)), key=min))

    @property
    def data_size(self) -> int:
        """Copies of the model: as many micro-batches are computed at a time, or begun where a copy has several stages."""
        return len(self.copies)

    @cached_property
    def data_rank(self) -> int:
        """The number of this rank's copy: which micro-batches it gets."""
        return next(copy for copy, ranks in enumerate(self.copies) if self.rank in ranks)

    @cached_property
    def copy_rank(self) -> int:
        """The number of this rank in its copy."""
        return self.copies[self.data_rank].index(self.rank)

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """The ranks that share this one's stage of its copy."""
        start = self.pipeline_rank * self.tensor
        return self.copies[self.data_rank][start : start + self.tensor]

    @property
    def tensor_rank(self) -> int:
        """The number of this rank's shard of its stage."""
        return self.copy_rank % self.tensor

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """The ranks that have this one's shard of each stage of its copy."""
        return self.copies[self.data_rank][self.tensor_rank :: self.tensor]

    @property
    def pipeline_rank(self) -> int:
        """The number of this rank among ``pipeline_ranks``: what it has of the layers."""
        return self.copy_rank // self.tensor

    @property
    def counts_losses(self) -> bool:
        """Tell whether this is the rank of its copy that counts losses, tokens and predictions, which its last stage has."""
        return self.tensor_rank == 0 and self.pipeline_rank == self.pipeline - 1

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks that have this one's shard, by copy."""
        return tuple(ranks[self.copy_rank] for ranks in self.copies)

    @property
    def node_data_ranks(self) -> tuple[int, ...]:
        """The ranks of ``data_ranks`` on this host, by local rank."""
        data = set(self.data_ranks)
        return tuple(rank for rank in self.node_ranks if rank in data)

    @property
    def dropout_stream(self) -> int:
        """The number of this rank among those that drop other elements, which stages of a copy do by their layers."""
        return self.data_rank * self.tensor + self.tensor_rank if self.pipeline > 1 else self.rank

    def stages(self) -> list[int]:
        """The place of every rank in its pipeline, by rank."""
        found = [0] * self.world_size
        for ranks in self.copies:
            for number, rank in enumerate(ranks):
                found[rank] = number // self.tensor
        return found

    def places(self) -> list[str]:
        """Say of every rank, by rank, which place it has in the grid; "" where each has a whole copy of the model."""
        said = [""] * self.world_size
        if self.tensor * self.pipeline > 1:
            for copy, ranks in enumerate(self.copies):
                for number, rank in enumerate(ranks):
                    pipeline = f", pipeline {number // self.tensor}" if self.pipeline > 1 else ""
                    said[rank] = f" (data {copy}{pipeline}, tensor {number % self.tensor})"
        return said

    def __str__(self) -> str:
        """Name the shape as a log does."""
        pipeline = f" x pipeline {self.pipeline}" if self.pipeline > 1 else ""
        return f"data {self.data_size}{pipeline} x tensor {self.tensor}"


def join_mesh(
    device: str,
    timeout: timedelta = TIMEOUT,
    parallel: ParallelConfig | None = None,
    arrival: timedelta | None = None,
) -> Mesh:
    """Join the run that the launcher describes in the environment, or make a run of a single process without one.

    GPUs communicate by NCCL, CPUs by gloo; ranks share copies of the model as ``parallel`` says. From here on matrix
    products are as precise as training asks (``set_product_precision``). ``arrival`` limits the wait for all ranks, by
    default like ``timeout``. Raises ``ValueError`` when the environment, the
    device, the hosts or the shape do not fit.
    """
    launch = Launch.from_environment()
    set_product_precision()
    if device == "cuda":
        require_gpus(launch.local_rank + 1)
        torch.cuda.set_device(launch.local_rank)  # NCCL takes the current device
    place = torch.device(device, launch.local_rank) if device == "cuda" else torch.device(device)
    nodes: tuple[tuple[int, ...], ...] = ()
    hosts: tuple[str, ...] = (socket.gethostname(),)
    if launch.world_size > 1:
        identities = join_group(launch, place, timeout, arrival or timeout)
        nodes = group_by_host(identities, one_launcher=device == "cuda")
        hosts = tuple(identity.host for identity in identities)
    a_host = len(nodes[0]) if nodes else 1  # all hosts have as many, says group_by_host
    parallel = parallel or ParallelConfig()
    require_whole_copies(parallel, launch.world_size // a_host, a_host)
    return Mesh(
        launch.rank,
        launch.world_size,
        launch.local_rank,
        place,
        nodes,
        parallel.tensor,
        parallel.pipeline,
        hosts,
    )


def require_gpus(processes: int) -> None:
    """Raise ``ValueError`` unless PyTorch sees a GPU here for each of so many processes."""
    if not torch.cuda.is_available():
        raise ValueError(
            "training.device is cuda, but PyTorch sees no GPU here: set training.device to cpu, or start the run where "
            "there are GPUs"
        )
    if processes > torch.cuda.device_count():
        raise ValueError(
            f"{processes} processes on this host need a GPU each, but PyTorch sees {torch.cuda.device_count()}: start at "
            "most one process a GPU"
        )


def are_whole_copies(parallel: ParallelConfig, hosts: int, a_host: int) -> bool:
    """Tell whether ``hosts`` of so many ranks hold whole copies of the model, or copies take whole hosts.

    Otherwise a data group would leave its rail.
    """
    groups, stages = a_host // parallel.tensor, parallel.pipeline
    return (
        a_host % parallel.tensor == 0
        and hosts * groups % stages == 0
        and (groups % stages == 0 or stages % groups == 0)
    )


def require_whole_copies(parallel: ParallelConfig, hosts: int, a_host: int) -> None:
    """Raise ``ValueError``, with sizes that fit, unless ``are_whole_copies``."""
    if are_whole_copies(parallel, hosts, a_host):
        return
    ranks = f"{counted(hosts, 'host')} of {counted(a_host, 'rank')}"
    tensor = parallel.tensor
    if a_host % tensor:
        raise ValueError(
            f"parallel.tensor is {tensor}, but {ranks} do not divide into groups of that size: set it to "
            f"{math.gcd(a_host, tensor)}, or start a multiple of {tensor} ranks on each host"
        )
    possible = range(1, hosts * a_host // tensor + 1)
    fitting = [each for each in possible if are_whole_copies(ParallelConfig(tensor, each), hosts, a_host)]
    near = sorted(sorted(fitting, key=lambda stages: abs(stages - parallel.pipeline))[:2])
    shared = f" with parallel.tensor {tensor}," if tensor > 1 else ""
    raise ValueError(
        f"parallel.pipeline is {parallel.pipeline}, but{shared} {ranks} do not divide into copies of the model: set it to "
        f"{' or '.join(map(str, near))}"
    )


def process_group(ranks: Sequence[int], *, in_network: bool = False) -> dist.ProcessGroup | None:
    """Create a group in this order; None for a rank alone. Every rank of it must call it at the same time.

    Args:
        in_network: Ask NCCL to let switches add what the ranks send (CollNet, SHARP).

    Raises:
        ValueError: this PyTorch cannot ask NCCL for it.
    """
    if len(ranks) == 1:
        return None
    # PyTorch 2.11 has no sort_ranks, and does not need it when ranks ascend.
    order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    # use_local_synchronization: otherwise every rank of the run would have to create every group, in the same order.
    options = _in_network_options() if in_network else None
    group = dist.new_group(list(ranks), timeout=TIMEOUT, pg_options=options, use_local_synchronization=True, **order)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _in_network_options() -> Any:
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options.config, "collnet_enable"):
        raise ValueError(f"training.sharp is on, but PyTorch {torch.__version__} cannot ask NCCL for it: turn it off")
    setattr(options.config, "collnet_enable", 1)  # noqa: B010  absent from PyTorch's type stubs
    return options


def leave_mesh() -> None:
    """Destroy the process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
