"""Latency and bandwidth of paths between ranks. Many pairs communicate at once, each rank with one partner at a time.

Bandwidth is measured in one direction at a time on the receiver's clock, over the last three quarters of a message. This
excludes latency, the sender's start time, and data that buffers and traffic shapers pass immediately. Latency is half of
the shortest round trip of eight bytes, because other programs on a host's processors lengthen most round trips.

The schedule has rounds of pairs, in which each node (host or rank) has at most one partner. The nodes form a circle, and
each round has pairs at one distance. The distances are the powers of two and ``SAMPLED`` more. Usually a distance takes two
rounds. It takes three if steps of this distance visit an odd number of nodes, and one if it is half of the circle. Among up
to 8 nodes every pair is measured. A node has 13 partners among 32 nodes, and 27 among 4,096.

Each node's own link can be judged by these pairs, because all nodes have the same number of partners. Leaf switches can be
found, because hosts with neighbouring names often share one. A fault of a single path is found only if its pair is measured.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from bert.parallel.mesh import Mesh, all_reduce_
from cluster.probe.computing import gather_numbers

Pairs = list[tuple[int, int]]

SAMPLED = 2
"""Number of distances that are measured besides the powers of two."""
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
        """Return this measurement with the turns of ``other`` appended. Both must have the same paths."""
        assert other is not None
        latency_TE = np.concatenate([self.latency_TE, other.latency_TE])
        seconds_per_byte_TE = np.concatenate([self.seconds_per_byte_TE, other.seconds_per_byte_TE])
        return Paths(self.source_E, self.target_E, latency_TE, seconds_per_byte_TE)


def measure_paths(mesh: Mesh, rounds: Sequence[Pairs], turns: int, seconds: float) -> Paths:
    """Measure each rank pair that ``rounds`` lists, once a turn, for up to ``turns`` turns.

    The first three turns always run. No later turn begins after ``seconds`` have passed. All ranks must call this
    function at the same time.
    """
    partners = [next((pair for pair in pairs if mesh.rank in pair), None) for pairs in rounds]
    messages = _Messages(mesh)
    # All turns use the same sizes, so that the turns can be compared.
    sizes = [messages.suitable_sizes(pair) if pair else [] for pair in partners]
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
        (source, target, found_RTPK[first, :, number, 0], found_RTPK[target, :, number, column])
        for number, pairs in enumerate(rounds)
        for first, second in pairs
        for source, target, column in ((first, second, 1), (second, first, 2))
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
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._small = torch.zeros(8, dtype=torch.uint8, device=mesh.device)
        self._large = torch.ones(_LARGEST_BYTES[mesh.device.type], dtype=torch.uint8, device=mesh.device)

    def suitable_sizes(self, pair: tuple[int, int]) -> list[int]:
        """Return the bytes of a message to the second rank and to the first rank. Each takes about ``_TARGET_SECONDS``."""
        sizes, peer = [_SMALLEST_BYTES, _SMALLEST_BYTES], sum(pair) - self._mesh.rank
        while True:
            _, *rates = self.both_ways(pair, sizes, round_trips=1)
            # Each rank timed one direction and has NaN for the other. Replace NaN by 0, so that the sum has both directions.
            own = torch.tensor(rates, dtype=torch.float64, device=self._mesh.device).nan_to_num()
            theirs = torch.empty_like(own)
            _run(dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, theirs, peer))
            larger = [
                min(len(self._large), 4 * size) if rate * size < _TARGET_SECONDS else size
                for rate, size in zip((own + theirs).tolist(), sizes, strict=True)
            ]
            if larger == sizes:
                return sizes
            sizes = larger

    def both_ways(
        self, pair: tuple[int, int], sizes: list[int], round_trips: int = _ROUND_TRIPS
    ) -> tuple[float, float, float]:
        """Return the latency and the seconds per byte to the second and to the first rank.

        The first rank measures the latency. The receiver measures the rate of its direction, and the sender gets NaN.
        """
        first, second = pair
        if self._mesh.rank == first:
            trips = []
            for _ in range(round_trips):
                start = time.perf_counter()
                _run(dist.P2POp(dist.isend, self._small, second))
                _run(dist.P2POp(dist.irecv, self._small, second))
                trips.append(time.perf_counter() - start)
            self._send(second, sizes[0])
            return min(trips) / 2, float("nan"), self._receive(second, sizes[1])
        for _ in range(round_trips):
            _run(dist.P2POp(dist.irecv, self._small, first))
            _run(dist.P2POp(dist.isend, self._small, first))
        received = self._receive(first, sizes[0])
        self._send(first, sizes[1])
        return float("nan"), received, float("nan")

    def _send(self, peer: int, size: int) -> None:
        # Wait until the receiver reports that its memory is ready.
        _run(dist.P2POp(dist.irecv, self._small, peer))
        for part in self._parts(size):
            _run(dist.P2POp(dist.isend, part, peer))
        # A send ends when the data is in a buffer. Wait for its arrival, because the rest would delay the next measurement.
        _run(dist.P2POp(dist.irecv, self._small, peer))

    def _parts(self, size: int) -> tuple[Tensor, Tensor]:
        return self._large[: size // 4], self._large[size // 4 : size]

    def _receive(self, peer: int, size: int) -> float:
        """Request a message, and return the seconds per byte of its last three quarters.

        With Gloo, data that arrives before the receiver has posted its memory would seem fast, so the sender waits for the
        request. NCCL works in stream order and sends nothing before the receiver is ready.
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
            # If the receiver wakes up late, the last part seems to take no time. So assume at least half of its share of the
            # time.
            seconds = max(end - start, 0.75 * (end - begin) / 2)
        _run(ready)
        return max(seconds, 1e-9) / (size - size // 4)


def rounds_of_pairs(nodes: int) -> list[Pairs]:
    """Return the rounds for ``nodes`` nodes. No pair occurs twice."""
    return [pairs for distance in _distances(nodes) for pairs in _rounds_at(distance, nodes)]


def _distances(nodes: int) -> list[int]:
    half = nodes // 2
    powers = [1 << power for power in range(half.bit_length())]
    others = sorted(set(range(1, half + 1)) - set(powers))
    # Spread the samples evenly over the remaining distances.
    sampled = [others[(2 * part + 1) * len(others) // (2 * SAMPLED)] for part in range(SAMPLED)] if others else []
    return powers + sorted(set(sampled))


def _rounds_at(distance: int, nodes: int) -> list[Pairs]:
    # Steps of `distance` form gcd(distance, nodes) separate circles.
    circles = gcd(distance, nodes)
    length = nodes // circles
    rounds: list[Pairs] = [[], [], []]
    for start in range(circles):
        # A circle of two opposite nodes has only one pair.
        for step in range(length if length > 2 else 1):
            node = (start + step * distance) % nodes
            other = (node + distance) % nodes
            # Alternating steps share no node, except the last step of an odd circle, which goes into a third round.
            last_of_odd = length % 2 == 1 and step == length - 1
            rounds[2 if last_of_odd else step % 2].append((min(node, other), max(node, other)))
    return [pairs for pairs in rounds if pairs]
