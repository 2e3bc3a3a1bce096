"""View of a cluster: what a probe measured, in one file that model, planner and people read.

Hosts and ranks are named by their place in `View.hosts` and `View.ranks`; ranks are those of the probe. All times are
seconds, all sizes bytes unless an attribute says otherwise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from console.files import read_json, shown, write_atomically

FORMAT = "mlperf-bert cluster view"
VERSION = 2
"""Of the file; a reader takes no other."""
LARGEST_BYTES = 256 * 2**20
"""Of a file that is read: 32,768 ranks with eight devices a host."""
_MOST_ENTRIES = 1 << 21
_LONGEST_TEXT = 400
_REMEDY = "run `python -m cluster probe` again"

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
    """Time of a kind of computation of a step, forward and backward, while all ranks compute: the median of the ranks.

    ``counts`` are those of the terms that its time is a sum of, as ``cluster.model.computations.TERMS`` has them.
    """

    kind: str
    counts: tuple[float, ...]
    seconds: float
    spread: float


@dataclass(frozen=True)
class Contention:
    """What ranks take from each other.

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
        """The ranks on a host, by their place there."""
        return sorted((r for r, rank in enumerate(self.ranks) if rank.host == host), key=lambda r: self.ranks[r].place)


def write_view(view: View, path: Path) -> None:
    """Write the file whole or not at all, with a digest that shows edits. ``OSError`` where it cannot be written."""
    body = dataclasses.asdict(view)
    document = {"format": FORMAT, "version": VERSION, "digest": _digest(body), "view": body}
    write_atomically(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def read_view(path: Path) -> View:
    """Read and check a file. Raises ``ValueError``, in one line, where it is not what a probe of this version wrote."""
    document = read_json(path, LARGEST_BYTES, _REMEDY)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path}: no view of a cluster, expected a file of `python -m cluster probe`")
    if document.get("version") != VERSION:
        raise ValueError(
            f"{path}: version {shown(document.get('version'))}, expected {VERSION}, as another release has it; {_REMEDY}"
        )
    try:
        view = _decoded(View, document.get("view"), "view")
        _check_counts(view)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {_REMEDY}") from None
    if document.get("digest") != _digest(document["view"]):
        raise ValueError(f"{path}: edited or damaged, its digest is of other content; {_REMEDY}")
    return view


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """``value``, as JSON has it, as an object of the type ``kind``; ``where`` names it in errors."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or set(value) != set(hints):
            found = ", ".join(sorted(map(shown, value))) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{where} has {shown(found)}, expected {', '.join(sorted(hints))}")
        return kind(**{name: _decoded(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})
    if origin is tuple:
        any_number = arguments[-1] is Ellipsis
        most = _MOST_ENTRIES if any_number else len(arguments)
        if not isinstance(value, list) or len(value) > most or (not any_number and len(value) < most):
            raise ValueError(f"{where} is no list of {'at most ' if any_number else ''}{most} entries")
        kinds = arguments[:1] * len(value) if any_number else arguments
        return tuple(
            _decoded(of, each, f"{where}[{place}]") for place, (of, each) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} is {shown(value)}, expected one of {', '.join(map(str, arguments))}")
        return value
    if kind is str:
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
            raise ValueError(f"{where} is no text of at most {_LONGEST_TEXT} letters")
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or abs(value) > 1e18 or not math.isfinite(value) or (kind is int and not isinstance(value, int)):
        raise ValueError(f"{where} is {shown(value)}, expected a {'whole' if kind is int else 'finite'} number")
    if value < 0 and not where.endswith(".numa"):
        raise ValueError(f"{where} is {shown(value)}, expected no negative number")
    return kind(value)


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
    if len(set(sizes)) > 1:
        raise ValueError("hosts have different numbers of ranks")
    pairs = set()
    for link in view.links:
        if max(link.source, link.target) >= ranks or link.source == link.target:
            raise ValueError(f"a link from rank {link.source} to rank {link.target} of {ranks}")
        pairs.add((link.source, link.target))
    if len(pairs) < len(view.links):
        raise ValueError("a link is there twice")
    if any(max(outlier.ranks, default=0) >= ranks for outlier in view.outliers):
        raise ValueError(f"an outlier is about more than the {ranks} ranks")
    if any(collective.ranks > ranks or collective.ranks < 2 for collective in view.collectives):
        raise ValueError(f"a collective is of fewer than two or more than the {ranks} ranks")
