"""Slow and broken ranks, hosts and links that a probe found, in words, with their cost for a BERT-Large step.

This module also finds the leaf switches and the sites of the hosts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from cluster.outliers import CHANCE, FEWEST_PARTNERS, LOW, Array, PathTimes, judge, leaves_of, take_apart
from cluster.probe.collectives import WrongResult
from cluster.probe.computing import Cell
from cluster.probe.links import Paths
from cluster.probe.machine import Facts
from cluster.published.fitted import PARAMETERS, SEQUENCE_FLOPS, UPDATE_BYTES
from cluster.view import Host, Outlier, Source

SCREENING = 4
"""A probe measures one in this many healthy clusters a second time, although nothing in it is slow."""

_SEQUENCES = 56
"""Sequences per rank of the BERT-Large step. The cost of an outlier is stated as a share of this step's time."""
_AS_SLOW = 1.25
"""A slow rank explains its path's low bandwidth if the path's slowdown is at most this multiple of the rank's slowdown."""
_SLOWER = 5.0
"""Minimum ratio of path times between sites to path times within a site. The switches of one room are rarely oversubscribed
by more than four to one, so a larger ratio means another network."""


@dataclass(frozen=True)
class Measurements:
    """Measurements of a probe: times of operations (cells) C on ranks R by turn T, and paths within and between hosts.

    Paths between hosts are measured between the first ranks at each network card.
    """

    facts: Sequence[Facts]
    host_of: Sequence[int]
    cells: Sequence[Cell]
    rates_RTC: NDArray[np.float64]
    in_hosts: Paths | None
    between_hosts: Paths | None

    @cached_property
    def hosts(self) -> list[Host]:
        """Facts of each host, as its first rank found them."""
        return [self.facts[self.host_of.index(host)].host for host in range(max(self.host_of) + 1)]

    @property
    def layers(self) -> list[Paths]:
        return [paths for paths in (self.between_hosts, self.in_hosts) if paths is not None]

    @property
    def comparisons(self) -> int:
        """Number of comparisons of the whole probe. The chance of a false outlier is divided among them."""
        return len(self.cells) * len(self.facts) + sum(4 * len(paths.source_E) for paths in self.layers)

    @cached_property
    def sites(self) -> list[str]:
        """Name of each host's site, all "" if there is a single site.

        The names are those that hosts state, if any host does. Otherwise the widest gap between the times of host pairs
        separates fast from slow pairs, and hosts that fast pairs join form a site. Such sites must be unambiguous: at least
        two hosts in each, because a single host probably has a slow link; no slow pair within a site; and a slow pair
        between any two sites.
        """
        stated, paths, hosts = [host.site for host in self.hosts], self.between_hosts, len(self.hosts)
        if any(stated) or paths is None:
            return stated
        ends_2E = np.sort(np.array(self.host_of)[np.stack([paths.source_E, paths.target_E])], axis=0)
        pairs_2P, place_E = np.unique(ends_2E, axis=1, return_inverse=True)
        # Take the slowest of both directions and all cards: a fast pair has no slow path.
        times_P = np.zeros(pairs_2P.shape[1])
        np.maximum.at(times_P, np.ravel(place_E), np.median(paths.seconds_per_byte_TE, axis=0))
        ordered_P = np.sort(times_P)
        ratios = ordered_P[1:] / ordered_P[:-1]
        if not len(ratios) or ratios.max() < _SLOWER:
            return stated
        is_fast_P = times_P <= ordered_P[ratios.argmax()]
        one, other = pairs_2P[:, is_fast_P]
        joined = coo_matrix((np.ones(len(one)), (one, other)), shape=(hosts, hosts))
        sites, site_H = connected_components(joined, directed=False)
        site_2P = site_H[pairs_2P]
        is_within_P = site_2P[0] == site_2P[1]
        compared = np.unique(np.sort(site_2P[:, ~is_within_P], axis=0), axis=1).shape[1]
        if np.bincount(site_H).min() < 2 or (is_within_P != is_fast_P).any() or compared < sites * (sites - 1) // 2:
            return stated
        return [f"site{site}" for site in site_H]

    @cached_property
    def step(self) -> dict[str, float]:
        """Seconds of each part of a step on typical devices and paths, keyed by the quantity that determines the part."""
        typical_C = np.median(self.rates_RTC, axis=(0, 1)).tolist()
        timed = [*zip(self.cells, typical_C, strict=True)]
        # A multiply-add counts as two operations, and a copy both reads and writes.
        flops = max(2.0 * cell.size**3 / seconds for cell, seconds in timed if cell.quantity == "product")
        bytes_per_s = max(2.0 * cell.size / seconds for cell, seconds in timed if cell.quantity == "copy")
        paths, reduce = self.between_hosts or self.in_hosts, 0.0
        if paths is not None:
            ends = len(_ends(paths)[0])
            many, cards = (len(self.hosts), ends / len(self.hosts)) if self.between_hosts else (ends, 1)
            # The reduction is an fp32 ring along every rail. Each card carries its part of the gradient.
            reduce = 2 * (many - 1) / many * 4 * PARAMETERS / cards * float(np.median(paths.seconds_per_byte_TE))
        product, copy = _SEQUENCES * SEQUENCE_FLOPS / flops, PARAMETERS * UPDATE_BYTES / bytes_per_s
        return {"product": product, "copy": copy, "bandwidth": reduce}

    def outliers(
        self,
        times_TP: Array,
        parts_P: Sequence[tuple[str, tuple[int, ...]]],
        quantity: str,
        chance: int,
        fitted: int = 1,
        fewest: int | None = None,
    ) -> Iterator[Outlier]:
        """Yield the outliers among parts P, which are pairs of a kind and the part's ranks.

        The kind becomes `Outlier.name`: rank, sending, receiving, path or component.
        """
        judgement = judge(times_TP, self.comparisons, chance, fitted, fewest)
        for place in np.flatnonzero(judgement.is_outlier).tolist():
            ratio = float(judgement.ratios[place])
            # Launches (in CUDA graphs) and transfers (hidden by computation) add no time to a step.
            share = (ratio - 1) * self.step.get(quantity.split()[0], 0.0) / sum(self.step.values())
            name, ranks = parts_P[place]
            yield Outlier(name, quantity, ratio, float(judgement.deviations[place]), share, ranks)


def _cost(outlier: Outlier) -> tuple[float, float]:
    return outlier.step_share, outlier.ratio


def find_leaves(measured: Measurements) -> tuple[list[tuple[str, ...]], Source]:
    """Return the switches above each host, and their source: Slurm, the measured paths, or unknown."""
    stated, hosts = [host.switches for host in measured.hosts], len(measured.hosts)
    if all(stated):
        return stated, "slurm"
    paths = measured.between_hosts
    # With several sites, the widest gap between path times would separate sites instead of leaves.
    if paths is not None and len(set(measured.sites)) == 1:
        ends, source_E, target_E = _ends(paths)
        host_E, other_E = np.array(measured.host_of)[np.stack([paths.source_E, paths.target_E])]
        for times_TE in (paths.seconds_per_byte_TE, paths.latency_TE):
            # Subtract the shares of the ends, so that a slow end does not look like a leaf.
            rest_TE = take_apart(np.log(times_TE), source_E, target_E, len(ends)).rest_TE
            leaves = leaves_of(rest_TE, host_E, other_E, hosts)
            if leaves is not None:
                return [(f"leaf {leaf}",) for leaf in leaves], "measured"
    return [()] * hosts, "unknown"


def find_outliers(
    measured: Measurements, switches: Sequence[tuple[str, ...]], wrong: Sequence[WrongResult] = (), chance: int = CHANCE
) -> list[Outlier]:
    """Return all outliers, the most expensive first. See `cluster.outliers` for ``chance``."""
    ranks = _slow_ranks(measured, chance)
    found = [each for layer in measured.layers for each in _slow_paths(measured, layer, switches, chance)]
    paths = [each for each in found if not _is_explained(each, ranks)]
    outliers = [*_describe_devices(measured, ranks), *_describe_links(measured, paths)]
    outliers.sort(key=_cost, reverse=True)
    broken = []
    for each in wrong:
        name = f"{_name(measured, each.rank)} got {each.elements} wrong elements from {each.operation} ({each.scope})"
        broken.append(Outlier(name, "wrong result", 0.0, 0.0, 0.0, (each.rank,)))
    return [*broken, *outliers]


def _slow_ranks(measured: Measurements, chance: int) -> dict[int, Outlier]:
    """Return the most expensive finding of each slow rank. Only ranks with equal devices are compared."""
    found: dict[int, Outlier] = {}
    for device in dict.fromkeys(facts.device for facts in measured.facts):
        members = [rank for rank, facts in enumerate(measured.facts) if facts.device == device]
        for index, cell in enumerate(measured.cells):
            size = {"product": f"{cell.size}^3", "launch": ""}.get(cell.quantity, f"{cell.size / 2**20:.0f} MiB")
            name = " ".join(part for part in (cell.quantity, cell.dtype, size) if part)
            times_TP = np.log(measured.rates_RTC[members, :, index].T)
            for each in measured.outliers(times_TP, [("rank", (rank,)) for rank in members], name, chance):
                [rank] = each.ranks
                found[rank] = max(found.get(rank, each), each, key=_cost)
    return found


def _ends(paths: Paths) -> tuple[list[int], list[int], list[int]]:
    """Return the list of ranks at path ends, and each path's source and target as indices in this list."""
    ends_N, place_2E = np.unique(np.stack([paths.source_E, paths.target_E]), return_inverse=True)
    source_E, target_E = place_2E.reshape(2, -1).tolist()
    return ends_N.tolist(), source_E, target_E


def _slow_paths(
    measured: Measurements, paths: Paths, switches: Sequence[tuple[str, ...]], chance: int
) -> list[Outlier]:
    ends, source_E, target_E = _ends(paths)
    leaf_of = [switches[host][-1:] for host in measured.host_of]
    site_of = [measured.sites[host] if paths is measured.between_hosts else "" for host in measured.host_of]
    # Compare only paths that have the same source and target site, and that all cross leaves or all stay within leaves.
    pairs = [*zip(paths.source_E.tolist(), paths.target_E.tolist(), strict=True)]
    kinds = [(site_of[one], site_of[other], leaf_of[one] != leaf_of[other]) for one, other in pairs]
    kind_E = [*map(sorted({*kinds}).index, kinds)]
    ends_E = [(("sending", (one,)), ("receiving", (other,))) for one, other in pairs]
    # The fit has a level for each ordered pair of sites, and a share for each end with enough paths.
    fitted = len({kind[:2] for kind in kinds})
    fitted += sum(int((np.bincount(of_E) >= FEWEST_PARTNERS).sum()) for of_E in (source_E, target_E))
    found: list[Outlier] = []
    for quantity, seconds_TE in (("bandwidth", paths.seconds_per_byte_TE), ("latency", paths.latency_TE)):
        times_TE = np.log(seconds_TE)
        times = take_apart(times_TE, source_E, target_E, len(ends), kind_E, LOW)
        members_K = [tuple(np.compress(times.component_N == k, ends).tolist()) for k in range(times.level_TK.shape[1])]
        found += measured.outliers(times.level_TK, [("component", ranks) for ranks in members_K], quantity, chance)
        slow = _slow_ends(measured, times, ends, quantity, chance)
        # An end without a healthy partner may itself be healthy, so its partners explain its paths.
        judged = {end for both in ends_E for end, other in (both, both[::-1]) if other not in slow}
        causes = [each for end, each in slow.items() if end in judged]
        # The slower end of a path explains its time. Report the path only if what remains exceeds even that.
        ratio_of: dict[tuple[int, ...], float] = {
            pair: max([slow[end].ratio for end in both if end in slow], default=1.0)
            for pair, both in zip(pairs, ends_E, strict=True)
        }
        times_TE -= np.log([*ratio_of.values()])
        rest_TE = take_apart(times_TE, source_E, target_E, len(ends), kind_E).rest_TE
        parts = [("path", pair) for pair in pairs]
        slow_paths = measured.outliers(rest_TE, parts, quantity, chance, min(fitted, len(pairs) // 2))
        causes += [each for each in slow_paths if each.ratio > ratio_of[each.ranks]]
        # If the paths without a cause were fewer than the causes, they would rather be unusually fast.
        named = {each.ranks for each in causes}
        healthy = [pair for pair, both in zip(pairs, ends_E, strict=True) if slow.keys().isdisjoint(both)]
        found += causes if len(causes) <= len({*healthy} - named) else []
    return found


def _slow_ends(
    measured: Measurements, times: PathTimes, ends: Sequence[int], quantity: str, chance: int
) -> dict[tuple[str, tuple[int, ...]], Outlier]:
    """Return the slow path ends by direction and rank. Fewer than half of the ends are expected to be slow."""
    sending, receiving = ([(way, (end,)) for end in ends] for way in ("sending", "receiving"))
    pools = [(times.sending_TN, sending), (times.receiving_TN, receiving)]
    # Few hosts have few ends, so compare both directions with one another. Latency is the same number in both directions.
    if quantity == "bandwidth":
        pools = [(np.concatenate([times.sending_TN, times.receiving_TN], axis=1), sending + receiving)]
    return {
        (each.name, each.ranks): each
        for times_TN, parts in pools
        for each in measured.outliers(times_TN, parts, quantity, chance, fewest=len(parts) // 2 + 1)
    }


def _is_explained(each: Outlier, slow: dict[int, Outlier]) -> bool:
    """Tell whether a path is slow only because a slow rank's processor handles its messages."""
    ratios = [slow[rank].ratio for rank in each.ranks if rank in slow]
    return bool(ratios) and (each.quantity == "latency" or each.ratio <= _AS_SLOW * max(ratios))


def _describe_devices(measured: Measurements, slow: dict[int, Outlier]) -> Iterator[Outlier]:
    for number, host in enumerate(measured.hosts):
        ranks = tuple(rank for rank, of in enumerate(measured.host_of) if of == number)
        own = [slow[rank] for rank in ranks if rank in slow]
        if len(own) == len(ranks) > 1:
            yield replace(max(own, key=_cost), name=f"host {host.name}", ranks=ranks)
        else:
            yield from (replace(each, name=_name(measured, each.ranks[0])) for each in own)


def _describe_links(measured: Measurements, found: Sequence[Outlier]) -> Iterator[Outlier]:
    """Describe links, paths and components of the network. Both directions of one link become one outlier."""
    about: dict[tuple[str, tuple[int, ...]], list[Outlier]] = {}
    for each in found:
        kind = "end" if each.name in ("sending", "receiving") else each.name
        about.setdefault((kind, tuple(sorted(each.ranks))), []).append(each)
    for (kind, ranks), each in about.items():
        worst = max(each, key=_cost)
        is_both = len({(one.name, one.ranks) for one in each if one.quantity == worst.quantity}) > 1
        if kind == "component":
            name = _component(measured, ranks)
        elif kind == "end":
            name = f"{_card(measured, ranks[0])}, {'both directions' if is_both else worst.name}"
        else:
            one, other = (_name(measured, rank) for rank in worst.ranks)
            name = f"path between {one} and {other}" if is_both else f"path from {one} to {other}"
        yield replace(worst, name=name)


def _name(measured: Measurements, rank: int) -> str:
    return f"rank {rank} on host {measured.facts[rank].host.name}"


def _component(measured: Measurements, ranks: Sequence[int]) -> str:
    facts = measured.facts[ranks[0]]
    if len({measured.host_of[rank] for rank in ranks}) == 1:
        return f"links in host {facts.host.name}"
    return f"rail of card {facts.card or measured.host_of[ranks[0]]}"


def _card(measured: Measurements, rank: int) -> str:
    facts, between = measured.facts[rank], measured.between_hosts
    if between is None or rank not in between.source_E:
        return f"links of {_name(measured, rank)} to its neighbours"
    return f"network link of host {facts.host.name}" + (f", card {facts.card}" if facts.card else "")
