"""Measurements of a cluster. `probe` writes them, and predictions, plans and pages read them.

Hosts and ranks are identified by their index in `View.hosts` and `View.ranks`. Times are seconds and sizes are bytes, unless
an attribute says otherwise.
"""

from dataclasses import dataclass
from itertools import pairwise, product
from typing import Annotated, Literal

import msgspec

from console.documents import FileKind
from console.text import counted

Operation = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]
Scope = Literal["node", "rail", "world"]
Quantity = Literal["product", "copy", "launch", "to device", "from device"]
Source = Literal["slurm", "measured", "unknown"]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
"""Whole numbers that are small enough to be converted to floats. A size is at least 1, because rates divide by it."""
Seconds = Annotated[float, msgspec.Meta(gt=0)]
"""Time above 0, because rates divide by it."""


@dataclass(frozen=True)
class Host:
    """A host, with the names of its network cards in use.

    ``switches`` lists the switches above the host, from the top of the network to its leaf. It is empty if unknown.
    ``site`` names the group of hosts that only slow links join to other groups. It is empty if there are no such groups.
    """

    name: str
    cores: Count
    memory_bytes: Count
    cards: tuple[str, ...]
    switches: tuple[str, ...]
    site: str = ""


@dataclass(frozen=True)
class Rate:
    """Time of one operation on a device. ``size`` is n for a product of n x n matrices, 1 for a launch, or else in bytes."""

    quantity: Quantity
    dtype: str
    size: Size
    seconds: float


@dataclass(frozen=True)
class Rank:
    """A rank: the index of its host, its position among the host's ranks, its device, and its nearest network card."""

    host: int
    place: int
    device: str
    memory_bytes: Count
    card: str
    rates: tuple[Rate, ...]


@dataclass(frozen=True)
class Link:
    """One direction of a link between two ranks. ``latency_s`` is half of the shortest round trip of eight bytes."""

    source: int
    target: int
    latency_s: float
    seconds_per_byte: Seconds


@dataclass(frozen=True)
class Collective:
    """Times of a collective over ``ranks`` ranks.

    ``points`` has a row for each size: bytes of the whole vector, seconds on the slowest rank, and processor seconds summed
    over all ranks. The whole vector is what a rank sums in all-reduce, reads in reduce-scatter and all-to-all, and writes in
    all-gather.
    """

    operation: Operation
    scope: Scope
    ranks: Count
    points: Annotated[tuple[tuple[Size, Seconds, float], ...], msgspec.Meta(min_length=2)]


@dataclass(frozen=True)
class ComputationTime:
    """Mean time of one kind of computation, forward and backward, while all ranks compute.

    ``counts`` has a count for each cost term of the kind, in the order of ``cluster.model.work.TERMS``.
    """

    kind: str
    counts: tuple[float, ...]
    seconds: Seconds


@dataclass(frozen=True)
class Contention:
    """Slowdown of ranks that share processors.

    Attributes:
        processors: number of processors of all machines. A machine counts once, even if several hosts share it.
        threads: number of threads of each rank.
        alone_s, together_s: a rank's time for the same work while the other ranks wait, and while they compute as well.
        mean_s, last_s: mean and longest time of all ranks, if they begin the work together and do it once. Ranks that have
            finished leave their processors to the remaining ranks.
    """

    processors: Size
    threads: Count
    alone_s: Seconds
    together_s: Seconds
    mean_s: float
    last_s: float


@dataclass(frozen=True)
class Outlier:
    """A slow or broken host, rank or link.

    Attributes:
        name: name of the host, rank or link, in words.
        ratio: time of the outlier divided by the time of its peers; 0 if the outlier gave wrong results.
        deviations: distance of the outlier from its peers in robust standard deviations.
        step_share: relative increase of the time of a BERT-Large step.
        ranks: ranks involved, the sender first.
    """

    name: str
    quantity: str
    ratio: float
    deviations: float
    step_share: float
    ranks: tuple[int, ...]

    @property
    def finding(self) -> str:
        """Description of what is wrong, without the name."""
        if not self.ratio:
            return self.quantity
        cost = f", {100 * self.step_share:.1f} % of a step" if self.step_share else ""
        deviations = "more than 999" if self.deviations > 999 else f"{self.deviations:.0f}"
        slower = 100 * (self.ratio - 1)
        return f"{self.quantity}, time {slower:.0f} % above the others ({deviations} deviations{cost})"

    @property
    def sentence(self) -> str:
        return f"SLOW  {self.name}: {self.finding}" if self.ratio else f"BROKEN  {self.name}"


@dataclass(frozen=True)
class View:
    """One probe of a cluster. ``made`` is its time in UTC, in ISO 8601. ``backend`` is "none" if there is one rank.

    ``sites_stated`` tells whether the hosts stated their sites. Otherwise the measured paths showed them.
    """

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
    sites_stated: bool = False

    @property
    def sites(self) -> dict[str, list[int]]:
        """Hosts of each site, by the site's name."""
        found: dict[str, list[int]] = {}
        for number, host in enumerate(self.hosts):
            found.setdefault(host.site, []).append(number)
        return found

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """Path of each host from the top of the network to its leaf switch. With several sites, it begins with the site."""
        several = len(self.sites) > 1
        return [(host.site, *host.switches) if several else host.switches for host in self.hosts]

    def links_of(self, between_hosts: bool) -> list[Link]:
        """Return the links between hosts, or those within hosts if ``between_hosts`` is False."""
        ends = ((link, self.ranks[link.source].host != self.ranks[link.target].host) for link in self.links)
        return [link for link, is_between in ends if is_between == between_hosts]

    def links_of_sites(self, between_sites: bool) -> list[Link]:
        """Return the links between hosts of different sites, or of the same site if ``between_sites`` is False."""
        site_of = [self.hosts[rank.host].site for rank in self.ranks]
        links = self.links_of(between_hosts=True)
        return [link for link in links if (site_of[link.source] != site_of[link.target]) == between_sites]


def _check(view: View) -> None:
    """Raise ``ValueError`` if an index is out of range, sizes are out of order, or hosts differ in their ranks."""
    ranks, hosts = range(len(view.ranks)), range(len(view.hosts))
    # All readers of a view assume that ranks are evenly distributed over hosts.
    places = range(len(ranks) // max(1, len(hosts)))
    if not ranks or sorted((rank.host, rank.place) for rank in view.ranks) != [*product(hosts, places)]:
        raise ValueError("hosts have no ranks, different numbers of ranks, or two ranks at the same position")
    ends = [(link.source, link.target) for link in view.links] + [outlier.ranks for outlier in view.outliers]
    if any(rank not in ranks for end in ends for rank in end):
        raise ValueError(f"a link or an outlier names a rank that is not among the {counted(len(ranks), 'rank')}")
    sizes = [[float(size) for size, *_ in each.points] for each in view.collectives]
    if any(one >= other for every in sizes for one, other in pairwise(every)):
        raise ValueError("the sizes of a collective are not in ascending order")


_FILE = FileKind(
    kind=View,
    format="mlperf-bert cluster view",
    version=4,
    noun="view of a cluster",
    maker="python -m cluster probe",
    largest_bytes=256 * 2**20,  # enough for 32,768 ranks on hosts with eight devices
    check=_check,
)
write_view, read_view = _FILE.write, _FILE.read
