"""View of a cluster: what a probe measured, in one file that model, planner and people read.

Hosts and ranks are named by their place in `View.hosts` and `View.ranks`; ranks are those of the probe. All times are
seconds, all sizes bytes unless an attribute says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from console.documents import FileKind

# JSON is read whole: a file beyond that is none that a probe wrote.
LARGEST_BYTES = 256 * 2**20
"""Of a file that is read: 32,768 ranks with eight devices a host."""

Operation = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]
Scope = Literal["node", "rail", "world"]
Quantity = Literal["product", "copy", "launch", "to device", "from device", "read"]
Part = Literal["rank", "host", "link"]
Source = Literal["slurm", "measured", "unknown"]


@dataclass(frozen=True)
class Card:
    """A network card of a host. ``gbit_s`` is what its driver says of its link, or 0; ``numa`` may be -1."""

    name: str
    numa: int
    gbit_s: float


@dataclass(frozen=True)
class Host:
    """A host, with the switches above it from the top to its leaf; none where neither Slurm nor measuring tells."""

    name: str
    sockets: int
    numa_nodes: int
    cores: int
    memory_bytes: int
    cards: tuple[Card, ...]
    switches: tuple[str, ...]


@dataclass(frozen=True)
class Rate:
    """Time that a device takes for something once.

    Attributes:
        size: of a product n, for n x n by n x n; launches, of which the time is of one, have 1; else bytes.
        spread: relative standard deviation between repeated measurements, robustly estimated.
    """

    quantity: Quantity
    dtype: str
    size: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class Rank:
    """A rank's device. ``clique`` names the NVLink domain that it belongs to; what is unknown is "" or -1."""

    host: int
    place: int
    device: str
    memory_bytes: int
    numa: int
    card: str
    clique: str
    rates: tuple[Rate, ...]


@dataclass(frozen=True)
class Link:
    """One direction between two ranks; ``latency_s`` is half of a round trip of eight bytes."""

    source: int
    target: int
    latency_s: float
    seconds_per_byte: float
    spread: float


@dataclass(frozen=True)
class Collective:
    """Time of a collective over ``ranks`` ranks: latency_s + seconds_per_byte x bytes, within ``residual`` (relative,
    rms).

    Bytes are those of the whole vector: what all-reduce sums on each rank, reduce-scatter reads, all-gather writes.
    """

    operation: Operation
    scope: Scope
    ranks: int
    latency_s: float
    seconds_per_byte: float
    residual: float
    points: tuple[tuple[int, float, float], ...]
    """What was fitted: bytes, and seconds on the slowest rank; and the processor seconds of all ranks together."""


@dataclass(frozen=True)
class ComputationTime:
    """Time of a kind of computation of a step, forward and backward, while all ranks compute: their mean.

    ``counts`` are those of the terms that its time is a sum of, as ``cluster.model.computations.TERMS`` has them.
    """

    kind: str
    counts: tuple[float, ...]
    seconds: float
    spread: float


@dataclass(frozen=True)
class Contention:
    """Contention of ranks: what they take from each other.

    Attributes:
        processors: of all machines, each counted once: hosts may be parts of one.
        threads: with which a rank computes.
        alone_s, together_s: a rank's time for the same work by itself, and while all do it over and over.
        mean_s, last_s: until a rank has done it when all begin together, and until the last one has. Whoever shares
            processors gets more of them when others are done.
    """

    processors: int
    threads: int
    alone_s: float
    together_s: float
    mean_s: float
    last_s: float


@dataclass(frozen=True)
class Outlier:
    """Something slow or broken.

    Attributes:
        name: host, rank or link, in words.
        ratio: its time over that of the others; 0 of what gave wrong results.
        deviations: robust standard deviations between it and the others.
        step_share: how much longer it makes a step of BERT-Large, relative.
        ranks: those that it is about, sender first.
    """

    part: Part
    name: str
    quantity: str
    ratio: float
    deviations: float
    step_share: float
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """A cluster as one probe saw it."""

    made: str
    commit: str
    torch: str
    backend: str
    seconds: float
    switches_from: Source
    hosts: tuple[Host, ...]
    ranks: tuple[Rank, ...]
    links: tuple[Link, ...]
    collectives: tuple[Collective, ...]
    computations: tuple[ComputationTime, ...]
    contention: Contention
    outliers: tuple[Outlier, ...]

    def ranks_of(self, host: int) -> list[int]:
        """Return the ranks on a host, by their place there."""
        return sorted((r for r, rank in enumerate(self.ranks) if rank.host == host), key=lambda r: self.ranks[r].place)

    def is_between_hosts(self, link: Link) -> bool:
        """Tell whether a link's ends are on different hosts: the file has no field for it."""
        return self.ranks[link.source].host != self.ranks[link.target].host

    @property
    def links_between_hosts(self) -> list[Link]:
        """Links whose ends are on different hosts."""
        return [link for link in self.links if self.is_between_hosts(link)]

    @property
    def links_in_hosts(self) -> list[Link]:
        """Links between ranks of one host."""
        return [link for link in self.links if not self.is_between_hosts(link)]


def write_view(view: View, path: Path) -> None:
    """Write the file whole or not at all, with a digest that shows edits. ``OSError`` where it cannot be written."""
    _FILE.write(view, path)


def read_view(path: Path) -> View:
    """Read and check a file. Raises ``ValueError``, in one line, where it is not what a probe of this version wrote."""
    return _FILE.read(path)


def _check_counts(view: View) -> None:
    """Raise ``ValueError`` where parts of a view do not belong together."""
    hosts, ranks = len(view.hosts), len(view.ranks)
    if not hosts or not ranks:
        raise ValueError("no hosts or no ranks")
    sizes = [0] * hosts
    for number, rank in enumerate(view.ranks):
        if rank.host >= hosts:
            raise ValueError(f"rank {number} is on host {rank.host} of {hosts}")
        sizes[rank.host] += 1
    # Everything that reads a view divides ranks by hosts.
    if len(set(sizes)) > 1:
        raise ValueError("hosts have different numbers of ranks")
    pairs = set()
    for link in view.links:
        if max(link.source, link.target) >= ranks or link.source == link.target:
            raise ValueError(f"a link from rank {link.source} to rank {link.target} of {ranks}")
        pairs.add((link.source, link.target))
    # Both directions are there, each once: median and heat map take each link as one measurement.
    if len(pairs) < len(view.links):
        raise ValueError("a link is there twice")
    if any(max(outlier.ranks, default=0) >= ranks for outlier in view.outliers):
        raise ValueError(f"an outlier is about more than the {ranks} ranks")
    if any(collective.ranks > ranks or collective.ranks < 2 for collective in view.collectives):
        raise ValueError(f"a collective is of fewer than two or more than the {ranks} ranks")


_FILE = FileKind(
    kind=View,
    key="view",
    # Raised with any change of the fields: a file of another version is refused instead of misread.
    format="mlperf-bert cluster view",
    version=2,
    noun="view of a cluster",
    maker="python -m cluster probe",
    largest_bytes=LARGEST_BYTES,
    remedy="run `python -m cluster probe` again",
    check=_check_counts,
)
