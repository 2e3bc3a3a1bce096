"""Position of this process among the ranks: which ranks share its host, and which ranks share its copy of the model.
The module also has reductions, broadcasts and barriers over all ranks. They do nothing in a run of one rank.

The launcher's environment gives rank and world size; ``bert.parallel.rendezvous`` finds out which ranks share a host.

Ranks are assigned host by host. The ranks that share a stage of the model are neighbours on one host, because they exchange
the most data. The other stages of the same copy follow, on the same host or the next one, and then the other copies. Each
host holds whole copies, or each copy takes whole hosts. If all ranks of a data group are on different hosts, they therefore
have the same local rank.
PyTorch's DeviceMesh cannot describe this order, because it assumes that neighbouring ranks share a host.
"""

import math
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bert.configuration.sections import ParallelConfig
from bert.parallel.environment import Launch, site
from bert.parallel.rendezvous import Identity, group_by_host, join_group
from console.text import counted
from kernels.products import set_product_precision

# This exceeds the default of training.fault_seconds, so that the watchdog ends a run first and names the rank to blame.
TIMEOUT = timedelta(minutes=10)
"""A rank gives up after waiting this long in one collective, or for all ranks to join."""


@dataclass(frozen=True)
class Mesh:
    """Position of this process in the run, whose ranks form a grid of nodes by ranks per node.

    ``tensor`` neighbouring ranks on a node share a stage of the model. ``pipeline`` such groups share a copy of the model,
    and all ranks of a copy get the same micro-batches. Ranks with the same position in their copies have the same shards
    of the same layers. They form a data group, which sums their gradients. Between nodes, a data group communicates only
    along rails. A rail consists of ranks with the same position on their nodes.
    """

    rank: int
    world_size: int
    local_rank: int
    """Index of the process on its host, as given by the launcher, and of the device that it uses."""
    device: torch.device
    nodes: tuple[tuple[int, ...], ...] = ((0,),)
    """Ranks of each host, ordered by local rank. A host's ranks need not be consecutive."""
    tensor: int = 1
    """Number of ranks that share a stage of the model, or the whole model if there is one stage."""
    pipeline: int = 1
    """Number of stages, each of consecutive layers, that form a copy of the model."""
    hosts: tuple[str, ...] = ()
    """Host name of each rank, in the order of the ranks."""
    sites: tuple[str, ...] = ()
    """Site of each rank, in the order of the ranks, or ``()`` if there is only one site."""

    @property
    def is_main(self) -> bool:
        """Tell whether this is rank 0, the process that logs."""
        return self.rank == 0

    @cached_property
    def own_site(self) -> "Mesh":
        """Mesh of this rank's site, without the nodes of other sites. Ranks keep their numbers."""
        if not self.sites:
            return self
        own = self.sites[self.rank]
        return replace(self, nodes=tuple(ranks for ranks in self.nodes if self.sites[ranks[0]] == own))

    def by_site(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return ``ranks`` divided by site, in the order of the sites' lowest ranks. Omit sites without any of them."""
        sites = {name: tuple(rank for rank in ranks if self.sites[rank] == name) for name in dict.fromkeys(self.sites)}
        return tuple(filter(None, sites.values())) or (tuple(ranks),)

    @cached_property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks on this host, ordered by local rank."""
        return next(ranks for ranks in self.nodes if self.rank in ranks)

    @cached_property
    def rail_ranks(self) -> tuple[int, ...]:
        """Ranks of this rank's rail, ascending. They have equal positions on their hosts and in their model copies."""
        place = self.node_ranks.index(self.rank)
        data = set(self.data_ranks)
        # Sort the ranks, because PyTorch 2.11 creates only groups of ascending ranks. An all-reduce works in any order.
        return tuple(sorted(ranks[place] for ranks in self.nodes if ranks[place] in data))

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each copy of the model, stage after stage; copies are ordered by their lowest rank."""
        ranks = [rank for node in self.nodes for rank in node]
        size = self.tensor * self.pipeline
        return tuple(sorted((tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)), key=min))

    @property
    def data_size(self) -> int:
        """Number of copies of the model. Each copy has its own micro-batches."""
        return len(self.copies)

    @cached_property
    def coordinates(self) -> dict[int, tuple[int, int, int]]:
        """Data, pipeline and tensor index of each rank, in the order of the ranks."""
        return dict(
            sorted(
                (rank, (copy, *divmod(number, self.tensor)))
                for copy, ranks in enumerate(self.copies)
                for number, rank in enumerate(ranks)
            )
        )

    @property
    def data_rank(self) -> int:
        """Index of this rank's copy, which determines its micro-batches."""
        return self.coordinates[self.rank][0]

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """Ranks that share this rank's stage of its copy."""
        start = self.pipeline_rank * self.tensor
        return self.copies[self.data_rank][start : start + self.tensor]

    @property
    def tensor_rank(self) -> int:
        """Index of this rank among ``tensor_ranks``, which determines its shards."""
        return self.coordinates[self.rank][2]

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Ranks of this rank's copy that have the same tensor index, one in each stage."""
        return self.copies[self.data_rank][self.tensor_rank :: self.tensor]

    @property
    def pipeline_rank(self) -> int:
        """Index of this rank among ``pipeline_ranks``. The index determines the rank's layers."""
        return self.coordinates[self.rank][1]

    @property
    def counts_losses(self) -> bool:
        """Tell whether this rank counts losses, tokens and predictions. One rank per copy, on the last stage, does so."""
        return self.tensor_rank == 0 and self.pipeline_rank == self.pipeline - 1

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """Ranks that have the same shard as this rank, one in each copy."""
        place = self.pipeline_rank * self.tensor + self.tensor_rank
        return tuple(ranks[place] for ranks in self.copies)

    @property
    def node_data_ranks(self) -> tuple[int, ...]:
        """Those of ``data_ranks`` that are on this host, ordered by local rank."""
        data = set(self.data_ranks)
        return tuple(rank for rank in self.node_ranks if rank in data)

    @property
    def dropout_stream(self) -> int:
        """Index of this rank's dropout seed. The stages of a copy can share a seed, because they have different layers."""
        return self.data_rank * self.tensor + self.tensor_rank if self.pipeline > 1 else self.rank

    def names(self) -> list[str]:
        """Return the name that messages use for each rank.

        It contains the rank's host, its site if there are several, and its place in the grid if ranks share copies.
        """
        names = []
        for rank, (copy, stage, shard) in self.coordinates.items():
            parts = [f"site {self.sites[rank]}"] if self.sites else []
            if self.tensor * self.pipeline > 1:
                stages = f", pipeline {stage}" if self.pipeline > 1 else ""
                parts.append(f"data {copy}{stages}, tensor {shard}")
            place = f" ({', '.join(parts)})" if parts else ""
            names.append(f"rank {rank} on host {self.hosts[rank]}{place}")
        return names

    def __str__(self) -> str:
        pipeline = f" x pipeline {self.pipeline}" if self.pipeline > 1 else ""
        return f"data {self.data_size}{pipeline} x tensor {self.tensor}"


def join_mesh(
    device: str,
    timeout: timedelta = TIMEOUT,
    parallel: ParallelConfig | None = None,
    arrival: timedelta | None = None,
) -> Mesh:
    """Join the run that the launcher describes in the environment, or create a run of one process if there is no launcher.

    GPUs communicate through NCCL, CPUs through gloo. Ranks share copies of the model according to ``parallel``. Afterwards,
    matrix products have the precision that training needs (``set_product_precision``). ``arrival`` limits the wait for all
    ranks and defaults to ``timeout``. Raises ``ValueError`` for an invalid environment, missing GPUs or unsuitable hosts.
    """
    launch, own_site = Launch.from_environment(), site()
    set_product_precision()
    if device == "cuda":
        require_gpus(launch.local_rank + 1)
        torch.cuda.set_device(launch.local_rank)  # NCCL uses the current device
    place = torch.device(device, launch.local_rank) if device == "cuda" else torch.device(device)
    identities = [Identity(socket.gethostname(), "", launch.local_rank, 1, own_site)]
    if launch.world_size > 1:
        identities = join_group(launch, place, timeout, arrival or timeout)
    nodes = group_by_host(identities, one_launcher=device == "cuda")
    sites = tuple(identity.site for identity in identities)
    per_host = len(nodes[0])  # group_by_host ensures that all hosts have equally many ranks
    parallel = parallel or ParallelConfig()
    # Check each site by itself, because no copy of the model may span two sites.
    for ranks in Counter(sites).values():
        require_whole_copies(parallel, ranks // per_host, per_host)
    return Mesh(
        launch.rank,
        launch.world_size,
        launch.local_rank,
        place,
        nodes,
        parallel.tensor,
        parallel.pipeline,
        tuple(identity.host for identity in identities),
        sites if len({*sites}) > 1 else (),
    )


def require_gpus(processes: int) -> None:
    """Raise ``ValueError`` if PyTorch sees fewer GPUs on this host than there are ``processes``."""
    if not torch.cuda.is_available():
        raise ValueError(
            "training.device is cuda, but PyTorch sees no GPU here: set training.device to cpu, or start the run where "
            "there are GPUs"
        )
    if processes > torch.cuda.device_count():
        raise ValueError(
            f"{counted(processes, 'process')} on this host, but PyTorch sees {counted(torch.cuda.device_count(), 'GPU')}: "
            "start at most one process per GPU"
        )


def are_whole_copies(parallel: ParallelConfig, hosts: int, per_host: int) -> bool:
    """Return True if each host, with ``per_host`` ranks, holds only whole model copies, or each copy takes whole hosts.

    Otherwise the ranks of a data group could have different positions on their hosts.
    """
    groups, stages = per_host // parallel.tensor, parallel.pipeline
    return (
        per_host % parallel.tensor == 0
        and hosts * groups % stages == 0
        and (groups % stages == 0 or stages % groups == 0)
    )


def require_whole_copies(parallel: ParallelConfig, hosts: int, per_host: int) -> None:
    """Raise ``ValueError``, with sizes that would fit, if ``are_whole_copies`` returns False."""
    if are_whole_copies(parallel, hosts, per_host):
        return
    ranks = f"{counted(hosts, 'host')} of {counted(per_host, 'rank')}"
    tensor = parallel.tensor
    if per_host % tensor:
        raise ValueError(
            f"parallel.tensor is {tensor}, but {ranks} do not divide into groups of that size: set it to "
            f"{math.gcd(per_host, tensor)}, or start a multiple of {tensor} ranks on each host"
        )
    possible = range(1, hosts * per_host // tensor + 1)
    fitting = [each for each in possible if are_whole_copies(ParallelConfig(tensor, each), hosts, per_host)]
    near = sorted(sorted(fitting, key=lambda stages: abs(stages - parallel.pipeline))[:2])
    shared = f" with parallel.tensor {tensor}," if tensor > 1 else ""
    raise ValueError(
        f"parallel.pipeline is {parallel.pipeline}, but{shared} {ranks} do not divide into copies of the model: set it to "
        f"{' or '.join(map(str, near))}"
    )


def process_group(ranks: Sequence[int], *, in_network: bool = False, alone: bool = False) -> dist.ProcessGroup | None:
    """Create a group of ranks in the given order. All members must call this together and have equally many groups already.

    For a single rank, the result is None or, with ``alone``, a group of its own. With ``in_network``, NCCL may let switches
    add the vectors that ranks send (CollNet, SHARP). Raises ``ValueError`` if this version of PyTorch cannot ask for this.
    """
    if len(ranks) == 1 and not alone:
        return None
    # PyTorch 2.11 has no option sort_ranks, so pass it only if the ranks are not ascending.
    order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    # Without use_local_synchronization, every rank of the run would have to create every group, in the same order.
    options = _in_network_options() if in_network else None
    group = dist.new_group(list(ranks), timeout=TIMEOUT, pg_options=options, use_local_synchronization=True, **order)
    assert isinstance(group, dist.ProcessGroup)
    return group


def level_groups(mesh: Mesh) -> None:
    """Give every rank equally many groups, so that ranks of different sites can create a group together.

    PyTorch derives a new group's name, which must be equal on all members, from the group's ranks and from the number of
    groups that a rank already has. All ranks must call this at the same time.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    most = int(all_reduce_(torch.tensor(count, device=mesh.device), "max").item())
    for _ in range(most - count):
        process_group([mesh.rank], alone=True)


def _in_network_options() -> Any:
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options.config, "collnet_enable"):
        raise ValueError(
            f"training.sharp is on, but PyTorch {torch.__version__} cannot enable it: turn training.sharp off"
        )
    setattr(options.config, "collnet_enable", 1)  # noqa: B010  absent from PyTorch's type stubs
    return options


def leave_mesh() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce_(
    tensor: Tensor, operation: Literal["sum", "min", "max"] = "sum", group: dist.ProcessGroup | None = None
) -> Tensor:
    """Replace each value by its sum, minimum or maximum over ``group`` (all ranks if it is None). Return the tensor."""
    if dist.is_initialized():
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation.upper()), group)
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
