"""Findings of a probe: which ranks, hosts and links are slow, in words, and what each costs a step of BERT-Large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cluster.leaves import leaves_of
from cluster.outliers import CHANCE, FEWEST_PARTNERS, Judgement, judge, take_apart
from cluster.probe.collectives import WrongResult
from cluster.probe.computing import Cell
from cluster.probe.links import Paths
from cluster.probe.machine import Facts
from cluster.view import Outlier, Part, Source

SCREENING = 4
"""One even cluster in so many is looked at a second time."""

STEP_OPERATIONS = 56 * 0.5e12
"""Of a rank's share of a step: 56 sequences of BERT-Large of the benchmark's mean length, forward and backward."""
# Of BERT-Large with its heads, rounded.
PARAMETERS = 336e6
_UPDATE_BYTES = 7 * 4 * PARAMETERS
"""LAMB reads a gradient, and reads and writes a weight and two moments, in fp32."""
_AS_SLOW = 1.25
"""Paths of a rank that is itself slow count as its consequence up to so many times its own ratio."""


@dataclass(frozen=True)
class Measured:
    """All that a probe has measured: cells C of ranks R by turns T, paths in hosts and between them."""

    facts: Sequence[Facts]
    host_of: Sequence[int]
    cells: Sequence[Cell]
    rates_RTC: NDArray[np.float64]
    in_hosts: Paths | None
    between_hosts: Paths | None
    """Between the ranks that are first at each network card of their hosts."""

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return max(self.host_of) + 1


@dataclass(frozen=True)
class _Step:
    """Seconds of a step's parts on a device and a path like most."""

    compute: float
    update: float
    reduce: float

    def share(self, quantity: str, ratio: float) -> float:
        """Return how much longer a step gets. Launches are captured, transfers and reading go ahead: they claim no share."""
        part = {"product": self.compute, "copy": self.update, "bandwidth": self.reduce}.get(quantity.split()[0], 0.0)
        return (ratio - 1) * part / (self.compute + self.update + self.reduce)


@dataclass(frozen=True)
class _Found:
    """A finding about one rank, or one end or path, before findings are put together."""

    ranks: tuple[int, ...]
    way: str
    """Of a link: sending, receiving, path, or part of the network. "" of a device."""
    quantity: str
    ratio: float
    deviations: float
    share: float


def find_leaves(measured: Measured) -> tuple[list[tuple[str, ...]], Source]:
    """The switches above each host, and where that is from: Slurm, measuring, or unknown."""
    first = [measured.host_of.index(host) for host in range(measured.hosts)]
    told = [measured.facts[rank].switches for rank in first]
    # Slurm's topology counts only if it names the switches of all hosts.
    if all(told):
        return told, "slurm"
    paths = measured.between_hosts
    if paths is not None:
        ends, source_E, target_E = _ends(paths)
        host_E, other_E = (np.array([measured.host_of[ends[end]] for end in of]) for of in (source_E, target_E))
        # Either may tell leaves apart; the first that does decides.
        for times_TE in (paths.seconds_per_byte_TE, paths.latency_TE):
            # What is slow at its end makes no leaf.
            rest_TE = take_apart(np.log(times_TE), source_E, target_E, len(ends)).rest_TE
            leaves = leaves_of(rest_TE, host_E, other_E, measured.hosts)
            if leaves is not None:
                return [(f"leaf {leaf}",) for leaf in leaves], "measured"
    return [()] * measured.hosts, "unknown"


def find_outliers(
    measured: Measured, switches: Sequence[tuple[str, ...]], wrong: Sequence[WrongResult] = (), chance: int = CHANCE
) -> list[Outlier]:
    """List what is slow or broken, what costs most first. ``chance``: see `cluster.outliers`."""
    layers = [paths for paths in (measured.between_hosts, measured.in_hosts) if paths is not None]
    judged = [index for index, cell in enumerate(measured.cells) if cell.judged]
    # All comparisons of the probe share the one chance of a wrong name.
    comparisons = len(judged) * len(measured.facts) + sum(4 * len(paths.source_E) for paths in layers)
    step = _step_of(measured)
    ranks = _slow_ranks(measured, judged, step, comparisons, chance)
    found = list(ranks.values())
    for paths in layers:
        for each in _slow_paths(measured, paths, switches, step, comparisons, chance):
            # A path that is slow by its rank is named once, as the rank.
            if not _explained(each, ranks):
                found.append(each)
    outliers = _described(measured, found)
    outliers.sort(key=lambda outlier: (-outlier.step_share, -outlier.ratio))
    # Wrong results come first, whatever the others cost.
    return [*(_broken(measured, each) for each in wrong), *outliers]


def _step_of(measured: Measured) -> _Step:
    typical_C = np.median(measured.rates_RTC, axis=(0, 1))
    # Multiply-add counts as two.
    products = [2.0 * c.size**3 / t for c, t in zip(measured.cells, typical_C, strict=True) if c.quantity == "product"]
    # Read and written.
    copies = [2.0 * c.size / t for c, t in zip(measured.cells, typical_C, strict=True) if c.quantity == "copy"]
    paths, reduce = measured.between_hosts or measured.in_hosts, 0.0
    if paths is not None:
        # Between hosts, ends are the ranks that stand for network cards.
        ends = len({*paths.source_E.tolist(), *paths.target_E.tolist()})
        # Within one host the ring is over its ranks.
        many = measured.hosts if measured.between_hosts else ends
        cards = ends / measured.hosts if measured.between_hosts else 1
        # A ring along every rail, in fp32, with the gradient divided over a host's cards.
        reduce = 2 * (many - 1) / many * 4 * PARAMETERS / cards * float(np.median(paths.seconds_per_byte_TE))
    # The fastest product and copy stand for what the device can do; sizes differ in what they reach.
    return _Step(STEP_OPERATIONS / max(products), _UPDATE_BYTES / max(copies), reduce)


def _slow_ranks(
    measured: Measured, judged: Sequence[int], step: _Step, comparisons: int, chance: int
) -> dict[int, _Found]:
    """The worst of each slow rank. Devices are compared with those of the same name."""
    found: dict[int, _Found] = {}
    kinds: dict[str, list[int]] = {}
    for rank, facts in enumerate(measured.facts):
        # A mixture of devices has several levels, each of which is right.
        kinds.setdefault(facts.device, []).append(rank)
    for members in kinds.values():
        for index in judged:
            cell = measured.cells[index]
            judgement = judge(np.log(measured.rates_RTC[members, :, index].T), comparisons, chance)
            name = " ".join(part for part in (cell.quantity, cell.dtype, _size_of(cell)) if part)
            for place in np.flatnonzero(judgement.is_outlier):
                each = _found((members[place],), "", name, judgement, int(place), step)
                kept = found.get(members[place])
                # Of several slow quantities of a rank the one that costs a step most is told.
                if kept is None or (kept.share, kept.ratio) < (each.share, each.ratio):
                    found[members[place]] = each
    return found


def _size_of(cell: Cell) -> str:
    if cell.quantity == "launch":
        return ""
    return f"{cell.size}^3" if cell.quantity == "product" else f"{cell.size / 2**20:.0f} MiB"


def _found(ranks: tuple[int, ...], way: str, quantity: str, judgement: Judgement, place: int, step: _Step) -> _Found:
    ratio = float(judgement.ratios[place])
    return _Found(ranks, way, quantity, ratio, float(judgement.deviations[place]), step.share(quantity, ratio))


def _ends(paths: Paths) -> tuple[list[int], list[int], list[int]]:
    """The ranks at ends of paths, and of each path the places of its source and target among them."""
    ends = sorted({*paths.source_E.tolist(), *paths.target_E.tolist()})
    place = {rank: index for index, rank in enumerate(ends)}
    return ends, [place[rank] for rank in paths.source_E.tolist()], [place[rank] for rank in paths.target_E.tolist()]


def _slow_paths(
    measured: Measured,
    paths: Paths,
    switches: Sequence[tuple[str, ...]],
    step: _Step,
    comparisons: int,
    chance: int,
) -> list[_Found]:
    ends, source_E, target_E = _ends(paths)
    # The last switch of a path is the leaf; () where none is known, which makes all paths alike.
    leaf_of = [switches[host][-1:] for host in measured.host_of]
    # Paths through one leaf switch are compared with their like, and so are those through several.
    # 0 under one leaf, 1 across.
    kind_E = [int(leaf_of[s] != leaf_of[t]) for s, t in zip(paths.source_E, paths.target_E, strict=True)]
    found: list[_Found] = []
    for quantity, times_TE in (("bandwidth", paths.seconds_per_byte_TE), ("latency", paths.latency_TE)):
        parts = take_apart(np.log(times_TE), source_E, target_E, len(ends), kind_E)
        for way, times_TN in (("sending", parts.sending_TN), ("receiving", parts.receiving_TN)):
            judgement = judge(times_TN, comparisons, chance)
            found += [
                _found((ends[n],), way, quantity, judgement, int(n), step) for n in np.flatnonzero(judgement.is_outlier)
            ]
        judgement = judge(parts.level_TK, comparisons, chance)
        for k in np.flatnonzero(judgement.is_outlier):
            members = tuple(end for end, part in zip(ends, parts.part_N, strict=True) if part == k)
            found.append(_found(members, "part", quantity, judgement, int(k), step))
        # Of a slow end another path is worth a word only if it is slower by as much again.
        slow = {each.ranks[0]: each.ratio for each in found if each.quantity == quantity}
        # Fitted were the level, and the shares of ends that have paths enough.
        fitted = 1 + sum(int((np.bincount(of_E) >= FEWEST_PARTNERS).sum()) for of_E in (source_E, target_E))
        judgement = judge(parts.rest_TE, comparisons, chance, fitted=fitted)
        slow_paths = []
        for e in np.flatnonzero(judgement.is_outlier):
            pair = (int(paths.source_E[e]), int(paths.target_E[e]))
            # Slower than the slower one of its ends, beyond what taking the ends apart has left.
            if judgement.ratios[e] > max(slow.get(rank, 1.0) for rank in pair):
                slow_paths.append(_found(pair, "path", quantity, judgement, int(e), step))
        found += _as_ends(slow_paths, paths)
    return found


def _as_ends(slow: Sequence[_Found], paths: Paths) -> list[_Found]:
    """Paths that are all that an end has, one way, as that end: it has too few for its share to be told from them."""
    left, ends = list(slow), []
    for way, side, of_E in (("sending", 0, paths.source_E), ("receiving", 1, paths.target_E)):
        for end in sorted({each.ranks[side] for each in left}):
            own = [each for each in left if each.ranks[side] == end]
            # All of its paths, and more than one: a single path has two ends, and either may be the cause.
            if 1 < len(own) == int((of_E == end).sum()):
                ends.append(replace(max(own, key=lambda each: each.ratio), ranks=(end,), way=way))
                left = [each for each in left if each not in own]
    return left + ends


def _explained(each: _Found, slow: dict[int, _Found]) -> bool:
    """Tell whether a slow path comes of a slow rank, whose processor carries what it sends and receives."""
    ratios = [slow[rank].ratio for rank in each.ranks if rank in slow]
    # A slow rank explains any latency of its paths, and of their bandwidth so much.
    return bool(ratios) and (each.quantity == "latency" or each.ratio <= _AS_SLOW * max(ratios))


def _described(measured: Measured, found: Sequence[_Found]) -> list[Outlier]:
    """Put together what is about one thing: both directions of a link, all ranks of a host."""
    about: dict[tuple[str, tuple[int, ...]], list[_Found]] = {}
    for each in found:
        kind = {"": "device", "path": "path", "part": "part"}.get(each.way, "end")
        # Sorted, so that both directions between two ranks are one entry.
        about.setdefault((kind, tuple(sorted(each.ranks))), []).append(each)
    outliers = []
    slow_of = [
        # Of a host all ranks must be slow, and several of them, before the host is named.
        sum(kind == "device" and measured.host_of[of[0]] == host for kind, of in about)
        for host in range(measured.hosts)
    ]
    told: set[int] = set()
    for (kind, ranks), each in about.items():
        worst = max(each, key=lambda one: (one.share, one.ratio))
        host = measured.host_of[ranks[0]]
        part: Part = "link"
        if kind == "device":
            # All ranks of a host being slow, it is the host that is slow, and it is named once.
            whole = slow_of[host] > 1 and slow_of[host] == measured.host_of.count(host)
            if whole and host in told:
                continue
            told.add(host)
            part = "host" if whole else "rank"
            name = f"host {measured.facts[ranks[0]].host}" if whole else _name(measured, ranks[0])
            ranks = tuple(r for r, of in enumerate(measured.host_of) if of == host) if whole else ranks
        elif kind == "part":
            name = _part(measured, ranks)
        elif kind == "end":
            ways = {one.way for one in each if one.quantity == worst.quantity}
            # An end that is slow at sending and at receiving is one finding.
            way = "both directions" if len(ways) > 1 else ways.pop()
            name = f"{_card(measured, ranks[0])}, {way}"
        else:
            both = len({one.ranks for one in each if one.quantity == worst.quantity}) > 1
            ends = [_name(measured, rank) for rank in (worst.ranks if not both else ranks)]
            name = f"path between {ends[0]} and {ends[1]}" if both else f"path from {ends[0]} to {ends[1]}"
            ranks = worst.ranks
        outliers.append(Outlier(part, name, worst.quantity, worst.ratio, worst.deviations, worst.share, ranks))
    return outliers


def _name(measured: Measured, rank: int) -> str:
    return f"rank {rank} on host {measured.facts[rank].host}"


def _part(measured: Measured, ranks: Sequence[int]) -> str:
    """The part of the network that only these ranks are in: a host's inside, or a rail."""
    facts = measured.facts[ranks[0]]
    if len({measured.host_of[rank] for rank in ranks}) == 1:
        return f"links in host {facts.host}"
    return f"rail of card {facts.card or measured.host_of[ranks[0]]}"


def _card(measured: Measured, rank: int) -> str:
    """The link that a rank stands for: its host's, or the card's where the host has several; in a host the rank's own."""
    facts, between = measured.facts[rank], measured.between_hosts
    if between is None or rank not in between.source_E:
        return f"links of {_name(measured, rank)} to its neighbours"
    card = f", card {facts.card}" if facts.card else ""
    return f"network link of host {facts.host}{card}"


def _broken(measured: Measured, wrong: WrongResult) -> Outlier:
    whose = (
        f", in the piece of rank {wrong.source} on host {measured.facts[wrong.source].host}"
        if wrong.source >= 0
        else ""
    )
    name = f"{_name(measured, wrong.rank)} got {wrong.elements} wrong elements from {wrong.operation} ({wrong.scope}){whose}"
    ranks = (wrong.rank,) if wrong.source in (-1, wrong.rank) else (wrong.rank, wrong.source)
    return Outlier("rank", name, "wrong result", 0.0, 0.0, 0.0, ranks)


def sentence(outlier: Outlier) -> str:
    """Return one line about an outlier."""
    if not outlier.ratio:
        return f"BROKEN  {outlier.name}"
    cost = f", {100 * outlier.step_share:.1f} % of a step" if outlier.step_share else ""
    deviations = "more than 999" if outlier.deviations > 999 else f"{outlier.deviations:.0f}"
    return (
        f"SLOW  {outlier.name}: {outlier.quantity}, time {100 * (outlier.ratio - 1):.0f} % above the others "
        f"({deviations} deviations{cost})"
    )
