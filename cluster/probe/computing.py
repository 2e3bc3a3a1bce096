"""Rates of a device: matrix products, memory copies, and on GPUs kernel launches and transfers between host and device.

A rate is measured over a window of time and not over single operations, because a rank that shares a processor gets it in
time slices. Ranks that share a machine's cores take turns, because they would slow each other down. Ranks with their own
GPU measure at the same time. Each turn measures on every rank before the next turn begins.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from bert.parallel.mesh import Mesh, all_reduce_, barrier
from bert.parallel.single import all_gather_single
from cluster.probe.machine import Facts
from cluster.view import Quantity

_LAUNCHES = 1000
_LONGEST_WINDOW_S = 0.3
_MOST_OF_OTHERS = 0.1
"""Share of a machine's processors that other programs may use without a warning."""


@dataclass(frozen=True)
class Cell:
    """One operation to time. One call of ``action`` runs the operation ``times`` times."""

    quantity: Quantity
    dtype: str
    size: int
    action: Callable[[], object]
    times: int = 1


def cells_of(device: torch.device) -> list[Cell]:
    if device.type == "cpu":
        # 32 MiB does not fit a core's cache, so the copy goes through memory.
        source, target = torch.ones(2, 8 * 2**20)
        return [_product(torch.float32, 512, device), Cell("copy", "fp32", source.nbytes, lambda: target.copy_(source))]
    source, target = torch.ones(2, 64 * 2**20, device=device)
    # Pin the memory, because the driver would copy unpinned memory through a buffer of its own.
    pinned = torch.ones(16 * 2**20, pin_memory=True)
    on_device = torch.empty_like(pinned, device=device)
    one = torch.zeros(1, device=device)

    def launch() -> None:
        # A single launch is too short for the host's clock.
        for _ in range(_LAUNCHES):
            one.add_(1.0)

    return [
        _product(torch.bfloat16, 8192, device),
        Cell("copy", "fp32", source.nbytes, lambda: target.copy_(source)),
        Cell("launch", "fp32", 1, launch, times=_LAUNCHES),
        Cell("to device", "fp32", pinned.nbytes, lambda: on_device.copy_(pinned, non_blocking=True)),
        Cell("from device", "fp32", pinned.nbytes, lambda: pinned.copy_(on_device, non_blocking=True)),
    ]


def _product(dtype: torch.dtype, size: int, device: torch.device) -> Cell:
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    return Cell("product", name, size, lambda: torch.mm(one, other, out=out))


def time_in_window(action: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Return the seconds per action, measured over a window of at least ``seconds`` seconds and at least one action."""
    batch = 8 if device.type == "cuda" else 1  # wait for a GPU only once in 8 calls, because each wait takes time
    count, start = 0, time.perf_counter()
    while True:
        for _ in range(batch):
            action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count += batch
        spent = time.perf_counter() - start
        if spent >= seconds:
            return spent / count


def measure_rates(mesh: Mesh, cells: Sequence[Cell], own_group: int, turns: int, seconds: float) -> NDArray[np.float64]:
    """Return this rank's seconds for each turn T and operation (cell) C. All ranks must call this at the same time.

    Ranks that slow each other down are in different groups, which are numbered from 0 and never measure at the same time.
    The whole measurement takes about ``seconds`` seconds.
    """
    # Every rank must enter the same number of barriers: the number of groups on the machine with the most groups.
    groups = int(all_reduce_(torch.tensor([own_group], device=mesh.device), "max").item()) + 1
    window = min(_LONGEST_WINDOW_S, seconds / (turns * groups * len(cells)))
    times_TC = np.empty((turns, len(cells)))
    for cell in cells:  # warm up: the first call allocates memory and loads kernels
        cell.action()
    for turn in range(turns):
        for group in range(groups):
            barrier()
            if group == own_group:
                times_TC[turn] = [time_in_window(cell.action, window, mesh.device) / cell.times for cell in cells]
    return times_TC


def gather_numbers(own: NDArray[Any], mesh: Mesh) -> NDArray[Any]:
    """Return the stacked arrays of all ranks, which must have the same shape and type. All ranks must call this function."""
    if mesh.world_size == 1:
        return own[None]
    sent = torch.from_numpy(own).to(mesh.device).reshape(-1)
    received = sent.new_empty(mesh.world_size * sent.numel())
    all_gather_single(received, sent)
    return received.cpu().numpy().reshape(mesh.world_size, *own.shape)


def processor_seconds() -> NDArray[np.float64]:
    """Return [busy, total, own]: this machine's busy and total processor seconds, and the seconds of this process."""
    times = psutil.cpu_times()
    whole = sum(times[:8])  # omit the times of guests, which user time includes
    return np.array([whole - times.idle - times.iowait, whole, time.process_time()])


def busy_machines(spent_R3: NDArray[np.float64], every: Sequence[Facts]) -> dict[str, float]:
    """Return the share of processors that other programs took, for each machine on which they took more than a tenth.

    ``spent_R3`` is the increase of `processor_seconds` on each rank. The key is the name of the machine's first host.
    """
    found = {}
    for machine in dict.fromkeys(facts.machine for facts in every):
        ranks = [rank for rank, facts in enumerate(every) if facts.machine == machine]
        busy, whole, _ = spent_R3[ranks[0]]  # all ranks of a machine read the same counters
        share = (busy - spent_R3[ranks, 2].sum()) / whole if whole else 0.0
        if share > _MOST_OF_OTHERS:
            found[every[ranks[0]].host.name] = share
    return found
