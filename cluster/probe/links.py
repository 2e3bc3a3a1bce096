"""Latency and bandwidth of paths between ranks. Many pairs of ranks communicate at once, but no rank has two partners.

Bandwidth is measured in one direction at a time on the receiver's clock, over the last three quarters of a message. This
excludes latency, the sender's start time, and data that buffers and traffic shapers pass immediately. Latency is half of
the median round trip of eight bytes.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from bert.parallel.mesh import Mesh, all_reduce_
from cluster.probe.computing import gather_numbers
from cluster.probe.schedule import Pairs

_ROUND_TRIPS = 12
_SMALLEST_BYTES = 256 * 2**10
_LARGEST_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
_TARGET_SECONDS = 0.05
"""Approximate duration of a message: long enough to average out disturbances, and short enough for many messages."""


@dataclass(frozen=True)
class Paths:
    """Measurements of directed paths E between ranks, by turn T."""

    source_E: NDArray[np.int64]
    target_E: NDArray[np.int64]
    latency_TE: NDArray[np.float64]
    seconds_per_byte_TE: NDArray[np.float64]

    def joined(self, other: "Paths | None") -> "Paths":
        """Return a measurement with the turns of both measurements, which have the same paths."""
        assert other is not None
        latency_TE = np.concatenate([self.latency_TE, other.latency_TE])
        seconds_per_byte_TE = np.concatenate([self.seconds_per_byte_TE, other.seconds_per_byte_TE])
        return Paths(self.source_E, self.target_E, latency_TE, seconds_per_byte_TE)


def measure_paths(mesh: Mesh, rounds: Sequence[Pairs], turns: int, seconds: float) -> Paths:
    """Measure every rank pair in ``rounds`` once a turn, for up to ``turns`` turns.

    The first three turns always run. Later turns begin only until ``seconds`` have passed. All ranks must call this
    function at the same time.
    """
    partners = [next((pair for pair in pairs if mesh.rank in pair), None) for pairs in rounds]
    messages = _Messages(mesh)
    # All turns use the same sizes, so that the turns can be compared.
    sizes = [messages.suitable_sizes(pair) if pair else (0, 0) for pair in partners]
    start, rows = time.perf_counter(), []
    for turn in range(turns):
        row = [(np.nan,) * 3] * len(rounds)  # NaN where this rank has no partner
        # Shuffle the rounds in each turn, so that after-effects of one round do not always hit the same next round.
        for number in np.random.default_rng(turn).permutation(len(rounds)):
            if pair := partners[number]:
                row[number] = messages.both_ways(pair, sizes[number])
        rows.append(row)
        spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=mesh.device)
        # All ranks must leave the loop in the same turn. `cluster.outliers` needs three turns.
        if all_reduce_(spent, "max").item() > seconds and turn >= 2:
            break
    found_RTPK = gather_numbers(np.array(rows), mesh)
    directed = [
        (source, target, found_RTPK[low, :, number, 0], found_RTPK[target, :, number, column])
        for number, pairs in enumerate(rounds)
        for low, high in pairs
        for source, target, column in ((low, high, 1), (high, low, 2))
    ]
    source, target, latency, rate = zip(*directed, strict=True)
    return Paths(np.array(source), np.array(target), np.stack(latency, axis=1), np.stack(rate, axis=1))


def _run(*operations: dist.P2POp) -> None:
    # A batched send uses NCCL's communicator of all ranks. A single send would create a communicator for each pair.
    for work in dist.batch_isend_irecv([*operations]):
        work.wait()
    if operations[0].tensor.device.type == "cuda":
        torch.cuda.synchronize()


class _Messages:
    """Message buffers, and methods to exchange messages with another rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._largest = _LARGEST_BYTES[mesh.device.type]
        self._small = torch.zeros(8, dtype=torch.uint8, device=mesh.device)
        self._large = torch.ones(self._largest, dtype=torch.uint8, device=mesh.device)

    def suitable_sizes(self, pair: tuple[int, int]) -> tuple[int, int]:
        """Return the bytes of the messages to the higher and to the lower rank that take about ``_TARGET_SECONDS``."""
        sizes, peer = [_SMALLEST_BYTES, _SMALLEST_BYTES], sum(pair) - self._mesh.rank
        while True:
            _, *rates = self.both_ways(pair, (sizes[0], sizes[1]), round_trips=1)
            # Each rank timed one direction and has NaN, replaced by 0, for the other. The sum holds both directions.
            own = torch.tensor(rates, dtype=torch.float64, device=self._mesh.device).nan_to_num()
            theirs = torch.empty_like(own)
            _run(dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, theirs, peer))
            is_short = [
                size < self._largest and rate * size < _TARGET_SECONDS
                for rate, size in zip((own + theirs).tolist(), sizes, strict=True)
            ]
            if not any(is_short):
                return sizes[0], sizes[1]
            sizes = [
                min(self._largest, 4 * size) if short else size for size, short in zip(sizes, is_short, strict=True)
            ]

    def both_ways(
        self, pair: tuple[int, int], sizes: tuple[int, int], round_trips: int = _ROUND_TRIPS
    ) -> tuple[float, float, float]:
        """Return the latency and the seconds per byte to the higher and to the lower rank.

        The lower rank measures the latency. The receiver measures the rate of its direction, and the sender gets NaN.
        """
        low, high = pair
        if self._mesh.rank == low:
            trips = []
            for _ in range(round_trips):
                start = time.perf_counter()
                _run(dist.P2POp(dist.isend, self._small, high))
                _run(dist.P2POp(dist.irecv, self._small, high))
                trips.append(time.perf_counter() - start)
            self._send(high, sizes[0])
            return statistics.median(trips) / 2, float("nan"), self._receive(high, sizes[1])
        for _ in range(round_trips):
            _run(dist.P2POp(dist.irecv, self._small, low))
            _run(dist.P2POp(dist.isend, self._small, low))
        up = self._receive(low, sizes[0])
        self._send(low, sizes[1])
        return float("nan"), up, float("nan")

    def _send(self, peer: int, size: int) -> None:
        # Wait until the receiver reports that its memory is ready.
        _run(dist.P2POp(dist.irecv, self._small, peer))
        for part in self._parts(size):
            _run(dist.P2POp(dist.isend, part, peer))

    def _parts(self, size: int) -> tuple[Tensor, Tensor]:
        return self._large[: size // 4], self._large[size // 4 : size]

    def _receive(self, peer: int, size: int) -> float:
        """Request a message, and return the seconds per byte of its last three quarters.

        With Gloo, data that arrives before the receiver has posted its memory would seem fast. NCCL works in stream order
        and sends nothing before the receiver is ready.
        """
        receive = [dist.P2POp(dist.irecv, part, peer) for part in self._parts(size)]
        ready = dist.P2POp(dist.isend, self._small, peer)
        if self._small.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            _run(ready)
            for operation, event in zip(receive, (first, last), strict=True):
                for work in dist.batch_isend_irecv([operation]):
                    work.wait()  # the stream waits, and the host does not
                event.record()
            torch.cuda.synchronize()
            seconds = first.elapsed_time(last) / 1e3
        else:
            one, other = ([*dist.batch_isend_irecv([operation])] for operation in receive)
            begin = time.perf_counter()
            _run(ready)
            one[0].wait()
            start = time.perf_counter()
            other[0].wait()
            end = time.perf_counter()
            # A receiver that wakes up late finds that all data has arrived. Then use the time of the whole message.
            seconds = max(end - start, 0.75 * (end - begin) / 2)
        return max(seconds, 1e-9) / (size - size // 4)
