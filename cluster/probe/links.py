"""Latency and bandwidth of paths between ranks, by pairs that talk at the same time as other pairs but with nobody else.

A path is measured one way at a time, on the receiver's clock: from the end of a message's first quarter to the end of the
rest. So neither latency counts, nor what buffers and shapers let through at once, nor when the sender began. Latency is
half of a round trip of eight bytes, the median of several.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from bert.parallel.mesh import Mesh
from bert.parallel.single import all_gather_single
from cluster.probe.schedule import Pairs

_ROUND_TRIPS = 12
_FIRST_BYTES = 256 * 2**10
_LARGEST_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
_TARGET_SECONDS = 0.05
"""A message is to take about so long: long beside what disturbs it, short enough for many."""
_SLOWEST = 8
"""A message is at most so many times as large as the slowest path would like."""


@dataclass(frozen=True)
class Paths:
    """Measurements of directed paths E between ranks, by turns T."""

    source_E: NDArray[np.int64]
    target_E: NDArray[np.int64]
    latency_TE: NDArray[np.float64]
    seconds_per_byte_TE: NDArray[np.float64]


def measure_paths(mesh: Mesh, rounds: Sequence[Pairs], turns: int, seconds: float) -> Paths:
    """Measure every path of ``rounds``, pairs of ranks, in each of so many turns. Every rank must call it at the same
    time.

    No turn begins after ``seconds``, but for the third, without which nothing could be judged.
    """
    partners = [next((pair for pair in pairs if mesh.rank in pair), None) for pairs in rounds]
    message = _Message(mesh, _agreed_bytes(mesh, partners))
    start, rows = time.perf_counter(), []
    for turn in range(turns):
        row = [(np.nan,) * 3] * len(rounds)
        # Another order in each turn, so that what a round leaves behind falls on others than before.
        for number in np.random.default_rng(turn).permutation(len(rounds)):
            if pair := partners[number]:
                row[number] = message.both_ways(pair)
        rows.append(row)
        spent = _max_of_all(mesh, time.perf_counter() - start)
        if spent > seconds and turn >= 2:
            break
    own = torch.tensor(rows, dtype=torch.float64, device=mesh.device).reshape(-1)
    every = own.new_empty(mesh.world_size * own.numel())
    all_gather_single(every, own)
    found_RTPK = every.cpu().numpy().reshape(mesh.world_size, len(rows), len(rounds), 3)
    return _as_paths(found_RTPK, rounds)


def _as_paths(found_RTPK: NDArray[np.float64], rounds: Sequence[Pairs]) -> Paths:
    source, target, latency, rate = [], [], [], []
    for number, pairs in enumerate(rounds):
        for low, high in pairs:
            for one, other, column in ((low, high, 1), (high, low, 2)):
                source.append(one)
                target.append(other)
                latency.append(found_RTPK[low, :, number, 0])
                rate.append(found_RTPK[other, :, number, column])  # the receiver's clock
    empty = np.empty((found_RTPK.shape[1], 0))
    return Paths(
        np.array(source, dtype=np.int64),
        np.array(target, dtype=np.int64),
        np.stack(latency, axis=1) if latency else empty,
        np.stack(rate, axis=1) if rate else empty,
    )


def _max_of_all(mesh: Mesh, value: float) -> float:
    """The highest of all ranks' values."""
    highest = torch.tensor([value], dtype=torch.float64, device=mesh.device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return float(highest.item())


def _agreed_bytes(mesh: Mesh, partners: Sequence[tuple[int, int] | None]) -> int:
    """A size of message that suits most paths, and that the slowest can bear.

    It is tried out in the first two rounds, in which every rank has a partner; a pair stops by what both of its ends have
    seen.
    """
    liked = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    for pair in filter(None, partners[:2]):
        size = _FIRST_BYTES
        while size < _LARGEST_BYTES[mesh.device.type]:
            _, there, back = _Message(mesh, size, round_trips=1).both_ways(pair)
            slow = torch.tensor([float(np.nanmax([there, back])) * size], dtype=torch.float64, device=mesh.device)
            theirs = torch.empty_like(slow)
            _exchange(mesh, slow, theirs, pair)
            if max(slow.item(), theirs.item()) >= _TARGET_SECONDS:
                break
            size *= 2
        liked[0] = min(size, int(liked.item()) or size)
    every = liked.new_empty(mesh.world_size)
    all_gather_single(every, liked)
    sizes = [size for size in every.tolist() if size]
    if not sizes:
        return _FIRST_BYTES
    return min(int(statistics.median_low(sizes)), _SLOWEST * min(sizes))


def _exchange(mesh: Mesh, own: Tensor, theirs: Tensor, pair: tuple[int, int]) -> None:
    peer = pair[0] + pair[1] - mesh.rank
    _run([dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, theirs, peer)])


def _run(operations: list[dist.P2POp]) -> None:
    # Batched, NCCL takes the communicator of all ranks; a single send would make one for each pair.
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if operations[0].tensor.device.type == "cuda":
        torch.cuda.synchronize()


class _Message:
    """Buffers of one size, and the ways to send them."""

    def __init__(self, mesh: Mesh, size: int, round_trips: int = _ROUND_TRIPS) -> None:
        self._mesh = mesh
        self._round_trips = round_trips
        self._small = torch.zeros(8, dtype=torch.uint8, device=mesh.device)
        self._first, self._rest = torch.ones(size, dtype=torch.uint8, device=mesh.device).split(
            [size // 4, size - size // 4]
        )

    def both_ways(self, pair: tuple[int, int]) -> tuple[float, float, float]:
        """Latency, seconds a byte to the higher rank, and to the lower: on each rank those that it times, else NaN."""
        low, high = pair
        is_low, peer = self._mesh.rank == low, low + high - self._mesh.rank
        latency = self._ping(peer) if is_low else self._pong(peer)
        if is_low:
            self._send(peer)
            return latency, float("nan"), self._receive(peer)
        up = self._receive(peer)
        self._send(peer)
        return latency, up, float("nan")

    def _ping(self, peer: int) -> float:
        trips = []
        for _ in range(self._round_trips):
            start = time.perf_counter()
            _run([dist.P2POp(dist.isend, self._small, peer)])
            _run([dist.P2POp(dist.irecv, self._small, peer)])
            trips.append(time.perf_counter() - start)
        return statistics.median(trips) / 2

    def _pong(self, peer: int) -> float:
        for _ in range(self._round_trips):
            _run([dist.P2POp(dist.irecv, self._small, peer)])
            _run([dist.P2POp(dist.isend, self._small, peer)])
        return float("nan")

    def _send(self, peer: int) -> None:
        _run([dist.P2POp(dist.irecv, self._small, peer)])
        _run([dist.P2POp(dist.isend, self._first, peer)])
        _run([dist.P2POp(dist.isend, self._rest, peer)])

    def _receive(self, peer: int) -> float:
        """Have the message sent, and return the seconds that a byte of its rest takes.

        Gloo takes what arrives into memory that is waiting for it; what came before would pass for fast. NCCL works in
        the order of its stream, and sends nothing before the receiver is there.
        """
        receive = [dist.P2POp(dist.irecv, part, peer) for part in (self._first, self._rest)]
        ready = dist.P2POp(dist.isend, self._small, peer)
        if self._small.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            _run([ready])
            for operation, event in zip(receive, (first, last), strict=True):
                for work in dist.batch_isend_irecv([operation]):
                    work.wait()  # of the stream, not of the host
                event.record()
            torch.cuda.synchronize()
            seconds = first.elapsed_time(last) / 1e3
        else:
            one, other = ([*dist.batch_isend_irecv([operation])] for operation in receive)
            _run([ready])
            one[0].wait()
            start = time.perf_counter()
            other[0].wait()
            seconds = time.perf_counter() - start
        return max(seconds, 1e-9) / self._rest.numel()
