"""Rates of a device: matrix products, copies, launches, transfers from and to the host, reading of data.

A device is measured over windows of time, not over single operations: half a processor is given in slices, within which an
operation is as fast as ever. Ranks that share a machine's cores take turns, since two at a time would measure each other;
those with a GPU each measure all at once. Every turn of measuring visits all ranks before the next one begins.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bert.parallel.collectives import all_reduce_max_, barrier
from bert.parallel.mesh import Mesh
from bert.parallel.single import all_gather_single
from cluster.view import Quantity

READ_BYTES = 32 * 2**20
"""Most that is read of the data folder at a time."""
_LAUNCHES = 1000
_JUDGED_WINDOW = 3.0
"""A judged quantity's window over that of the others."""


@dataclass(frozen=True)
class Cell:
    """One thing to time. ``judged``: ranks are compared by it. ``times``: of what one action does, for the time of one."""

    quantity: Quantity
    dtype: str
    size: int
    action: Callable[[], object]
    judged: bool = False
    times: int = 1


def cells_of(device: torch.device, data: Path | None) -> list[Cell]:
    """List what is measured on a device; ``data`` is a folder to read from."""
    cells = _gpu_cells(device) if device.type == "cuda" else _cpu_cells()
    files = _largest_files(data) if data else []
    if files:
        size = min(READ_BYTES, sum(file.stat().st_size for file in files))
        cells.append(Cell("read", "", size, lambda: _read(files, size), judged=True))
    return cells


def _cpu_cells() -> list[Cell]:
    cells = [_product(torch.float32, size, torch.device("cpu"), judged=size == 512) for size in (128, 256, 512, 1024)]
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        cells += [_product(torch.bfloat16, size, torch.device("cpu")) for size in (256, 512, 1024)]
    # 32 MiB each: memory is to be timed, not a core's cache.
    source, target = torch.ones(2, 8 * 2**20)
    one = torch.zeros(1)
    cells.append(Cell("copy", "fp32", source.nbytes, lambda: target.copy_(source), judged=True))
    cells.append(Cell("launch", "fp32", 1, lambda: one.add_(1.0)))
    return cells


def _gpu_cells(device: torch.device) -> list[Cell]:
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    # Three types in three sizes are for predictions; ranks are compared by the largest product in bf16.
    cells = [_product(dtype, size, device, judged=False) for dtype in dtypes for size in (1024, 2048, 4096)]
    cells.append(_product(torch.bfloat16, 8192, device, judged=True))
    source, target = torch.ones(2, 64 * 2**20, device=device)
    # Pinned memory: other memory would be copied through a buffer of the driver's.
    pinned = torch.ones(16 * 2**20, pin_memory=True)
    on_device = torch.empty_like(pinned, device=device)
    one = torch.zeros(1, device=device)

    def launch() -> None:
        # Many in a row: the host's clock cannot tell a single launch, and the device must not run dry in between.
        for _ in range(_LAUNCHES):
            one.add_(1.0)

    return [
        *cells,
        Cell("copy", "fp32", source.nbytes, lambda: target.copy_(source), judged=True),
        Cell("launch", "fp32", 1, launch, judged=True, times=_LAUNCHES),
        Cell("to device", "fp32", pinned.nbytes, lambda: on_device.copy_(pinned, non_blocking=True), judged=True),
        Cell("from device", "fp32", pinned.nbytes, lambda: pinned.copy_(on_device, non_blocking=True), judged=True),
    ]


def _product(dtype: torch.dtype, size: int, device: torch.device, judged: bool = False) -> Cell:
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    # The result has its place, so that no allocation is timed.
    out = torch.empty_like(one)
    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    return Cell("product", name, size, lambda: torch.mm(one, other, out=out), judged)


def _largest_files(folder: Path) -> list[Path]:
    """The largest files of a data folder, enough for `READ_BYTES`. Raises ``ValueError`` where there is none."""
    if not folder.is_dir():
        raise ValueError(f"--data is {folder}: no such folder")
    # A data folder may hold very many files: enough of them are looked at to find large ones.
    sizes = {path: path.stat().st_size for path in sorted(islice(folder.rglob("*"), 10_000)) if path.is_file()}
    # The largest first, which are read in one piece; small ones would time the opening.
    files = sorted((path for path, size in sizes.items() if size), key=lambda path: -sizes[path])[:64]
    if not files:
        raise ValueError(f"--data is {folder}: no files there to read")
    return files


def _read(files: Sequence[Path], size: int) -> None:
    """Read so many bytes, from where they are stored and not from the page cache, as far as the system allows that."""
    left = size
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Only a request: pages that are dirty or mapped elsewhere stay in the cache.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            while left > 0 and (block := os.read(descriptor, min(left, 4 * 2**20))):
                left -= len(block)
        finally:
            os.close(descriptor)


def time_in_window(action: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Seconds that one action takes, over a window of at least so many seconds and one action."""
    batch = 8 if device.type == "cuda" else 1  # the host waits for a GPU once a batch
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


def measure_rates(
    mesh: Mesh, cells: Sequence[Cell], sharers: Sequence[int], slots: int, turns: int, seconds: float
) -> NDArray[np.float64]:
    """Seconds of every cell C in every turn T on this rank. Every rank must call it at the same time.

    Args:
        sharers: the ranks that share this rank's cores, this one among them.
        slots: so many of them measure at a time.
        seconds: about how long all of it may take.
    """
    # As many rounds as the fullest machine needs: all ranks go through the same number of barriers.
    own_groups = math.ceil(len(sharers) / slots)
    groups = int(all_reduce_max_(torch.tensor([own_groups], device=mesh.device)).item())
    mine = list(sharers).index(mesh.rank) // slots
    weights = [_JUDGED_WINDOW if cell.judged else 1.0 for cell in cells]
    # At most 0.1 s a window, however much time there is.
    window = min(0.1, seconds / (turns * groups * sum(weights)))
    times_TC = np.empty((turns, len(cells)))
    for cell in cells:  # the first time something is allocated or loaded, which no turn is to show
        cell.action()
    for turn in range(turns):
        for group in range(groups):
            # A barrier between groups: ranks that share cores never measure at the same time.
            barrier()
            if group == mine:
                times_TC[turn] = [
                    time_in_window(cell.action, weight * window, mesh.device) / cell.times
                    for cell, weight in zip(cells, weights, strict=True)
                ]
    return times_TC


def gather_numbers(own: NDArray[Any], mesh: Mesh) -> NDArray[Any]:
    """Return every rank's array, of the same shape and type on all, by rank."""
    if mesh.world_size == 1:
        return own[None]
    sent = torch.from_numpy(own).to(mesh.device).reshape(-1)
    received = sent.new_empty(mesh.world_size * sent.numel())
    all_gather_single(received, sent)
    return received.cpu().numpy().reshape(mesh.world_size, *own.shape)
