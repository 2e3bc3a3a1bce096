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

from bert.parallel.collectives import all_reduce_max_
from bert.parallel.mesh import Mesh
from cluster.probe.computing import gather_numbers
from cluster.probe.schedule import Pairs

_ROUND_TRIPS = 12
_SMALLEST_BYTES = 256 * 2**10
_LARGEST_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
_TARGET_SECONDS = 0.05
"""A message is to take about so long: long beside what disturbs it, short enough for many."""


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
    # At most one partner in each round (`cluster.probe.schedule`), so a rank is in no two messages at once.
    partners = [next((pair for pair in pairs if mesh.rank in pair), None) for pairs in rounds]
    messages = _LinkMessages(mesh)
    # Sizes are found once, before the turns, so that turns can be compared.
    sizes = [messages.suited(pair) if pair else (0, 0) for pair in partners]
    start, rows = time.perf_counter(), []
    for turn in range(turns):
        # NaN where this rank has no part: the receiver's row has the figure.
        row = [(np.nan,) * 3] * len(rounds)
        # Another order in each turn, so that what a round leaves behind falls on others than before.
        # The same seed on all ranks: both ends of a pair come to it in the same round.
        for number in np.random.default_rng(turn).permutation(len(rounds)):
            if pair := partners[number]:
                row[number] = messages.both_ways(pair, sizes[number])
        rows.append(row)
        spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=mesh.device)
        # The slowest rank decides for all: some leaving the loop earlier would leave others waiting.
        slowest = all_reduce_max_(spent).item()
        # Three turns at least, below which `cluster.outliers` judges nothing.
        if slowest > seconds and turn >= 2:
            break
    return _as_paths(gather_numbers(np.array(rows), mesh), rounds)


def _as_paths(found_RTPK: NDArray[np.float64], rounds: Sequence[Pairs]) -> Paths:
    source, target, latency, rate = [], [], [], []
    for number, pairs in enumerate(rounds):
        for low, high in pairs:
            for one, other, column in ((low, high, 1), (high, low, 2)):
                source.append(one)
                target.append(other)
                # Latency is of both directions and was timed by the lower rank.
                latency.append(found_RTPK[low, :, number, 0])
                rate.append(found_RTPK[other, :, number, column])  # the receiver's clock
    empty = np.empty((found_RTPK.shape[1], 0))
    return Paths(
        np.array(source, dtype=np.int64),
        np.array(target, dtype=np.int64),
        np.stack(latency, axis=1) if latency else empty,
        np.stack(rate, axis=1) if rate else empty,
    )


def _exchange(mesh: Mesh, own: Tensor, theirs: Tensor, pair: tuple[int, int]) -> None:
    # The sum of both ranks less the own one.
    peer = pair[0] + pair[1] - mesh.rank
    _run([dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, theirs, peer)])


def _run(operations: list[dist.P2POp]) -> None:
    # Batched, NCCL takes the communicator of all ranks; a single send would make one for each pair.
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if operations[0].tensor.device.type == "cuda":
        torch.cuda.synchronize()


class _LinkMessages:
    """Buffers for messages, and the ways to send them."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._largest = _LARGEST_BYTES[mesh.device.type]
        self._small = torch.zeros(8, dtype=torch.uint8, device=mesh.device)
        self._large = torch.ones(self._largest, dtype=torch.uint8, device=mesh.device)

    def suited(self, pair: tuple[int, int]) -> tuple[int, int]:
        """Bytes that take about ``_TARGET_SECONDS`` to the higher rank, and to the lower; the same on both."""
        sizes = [_SMALLEST_BYTES, _SMALLEST_BYTES]
        # Four times as large until it takes long enough: the path's rate is not known before.
        while True:
            _, *rates = self.both_ways(pair, (sizes[0], sizes[1]), round_trips=1)
            # Each rank timed one way, and has 0 for the other: the sum has both.
            own = torch.tensor(rates, dtype=torch.float64, device=self._mesh.device).nan_to_num()
            theirs = torch.empty_like(own)
            _exchange(self._mesh, own, theirs, pair)
            seconds = [rate * size for rate, size in zip((own + theirs).tolist(), sizes, strict=True)]
            larger = [
                size < self._largest and spent < _TARGET_SECONDS for size, spent in zip(sizes, seconds, strict=True)
            ]
            # Both directions go on until neither grows: the ranks of a pair must make the same calls.
            if not any(larger):
                return sizes[0], sizes[1]
            sizes = [min(self._largest, 4 * size) if more else size for size, more in zip(sizes, larger, strict=True)]

    def both_ways(
        self, pair: tuple[int, int], sizes: tuple[int, int], round_trips: int = _ROUND_TRIPS
    ) -> tuple[float, float, float]:
        """Latency, seconds a byte to the higher rank, and to the lower: on each rank those that it times, else NaN."""
        low, high = pair
        is_low, peer = self._mesh.rank == low, low + high - self._mesh.rank
        latency = self._ping(peer, round_trips) if is_low else self._pong(peer, round_trips)
        if is_low:
            self._send(peer, sizes[0])
            return latency, float("nan"), self._receive(peer, sizes[1])
        up = self._receive(peer, sizes[0])
        self._send(peer, sizes[1])
        return latency, up, float("nan")

    def _ping(self, peer: int, round_trips: int) -> float:
        trips = []
        for _ in range(round_trips):
            start = time.perf_counter()
            # Two batches: the pong answers a ping that has arrived.
            _run([dist.P2POp(dist.isend, self._small, peer)])
            _run([dist.P2POp(dist.irecv, self._small, peer)])
            trips.append(time.perf_counter() - start)
        return statistics.median(trips) / 2

    def _pong(self, peer: int, round_trips: int) -> float:
        for _ in range(round_trips):
            _run([dist.P2POp(dist.irecv, self._small, peer)])
            _run([dist.P2POp(dist.isend, self._small, peer)])
        return float("nan")

    def _send(self, peer: int, size: int) -> None:
        # The receiver says when its memory is ready: only then the message begins.
        _run([dist.P2POp(dist.irecv, self._small, peer)])
        for part in self._parts(size):
            _run([dist.P2POp(dist.isend, part, peer)])

    def _parts(self, size: int) -> tuple[Tensor, Tensor]:
        # The first quarter takes what buffers and shapers let through at once; the rest is timed.
        return self._large[: size // 4], self._large[size // 4 : size]

    def _receive(self, peer: int, size: int) -> float:
        """Have the message sent, and return the seconds that a byte of its rest takes.

        Gloo takes what arrives into memory that is waiting for it; what came before would pass for fast. NCCL works in
        the order of its stream, and sends nothing before the receiver is there.
        """
        receive = [dist.P2POp(dist.irecv, part, peer) for part in self._parts(size)]
        ready = dist.P2POp(dist.isend, self._small, peer)
        if self._small.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            _run([ready])
            # Events of the device: the host's clock would time the queueing.
            for operation, event in zip(receive, (first, last), strict=True):
                for work in dist.batch_isend_irecv([operation]):
                    work.wait()  # of the stream, not of the host
                event.record()
            torch.cuda.synchronize()
            seconds = first.elapsed_time(last) / 1e3
        else:
            # Both are posted before the sender is let go.
            one, other = ([*dist.batch_isend_irecv([operation])] for operation in receive)
            begin = time.perf_counter()
            _run([ready])
            one[0].wait()
            start = time.perf_counter()
            other[0].wait()
            end = time.perf_counter()
            # A receiver that is woken late finds all of it there; then the whole message tells more than its rest.
            seconds = max(end - start, 0.75 * (end - begin) / 2)
        return max(seconds, 1e-9) / (size - size // 4)
