"""Output of `python -m cluster show`: text lines for the terminal, and a self-contained HTML page."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.placement import hosts_below
from cluster.view import Link, Rate, View
from console.html.page import render_page
from console.text import counted, duration

_MOST_NAMES_IN_A_LINE = 24
MOST_CELLS = 96
"""Maximum rows of a heat map. With more hosts, each cell covers several hosts and shows their slowest link."""
_MOST_NAMES = 48
"""Maximum number of names beside a heat map. More would overlap."""
_DECIMAL = {"T": 1e12, "G": 1e9, "M": 1e6}
_BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def render(view: View) -> str:
    hosts, places = [rank.host for rank in view.ranks], [rank.place for rank in view.ranks]
    place_names = [f"rank {place}" for place in range(max(places) + 1)]
    maps = [
        heat_map("Between hosts", view.links_of(between_hosts=True), hosts, [host.name for host in view.hosts]),
        heat_map("Within hosts, the slowest of all hosts", view.links_of(between_hosts=False), places, place_names),
    ]
    return render_page(
        Path(__file__).with_name("display.html"),
        title=heading(view),
        view=view,
        links=link_rows(view),
        maps=[each for each in maps if each],
        rates=rate_rows(view),
        collectives=collective_rows(view),
        leaves=leaves(view),
        switch_source=switch_source(view),
        slow_hosts=hosts_with_outliers(view),
    )


def heat_map(title: str, links: Sequence[Link], place_of: Sequence[int], names: Sequence[str]) -> dict[str, Any] | None:
    """Return the cells of a heat map of senders (rows) and receivers (columns), coloured by time relative to the median."""
    if not links:
        return None
    cells = min(len(names), MOST_CELLS)
    slowest: dict[tuple[int, int], Link] = {}
    for link in sorted(links, key=lambda link: link.seconds_per_byte):
        slowest[place_of[link.source] * cells // len(names), place_of[link.target] * cells // len(names)] = link
    typical = statistics.median(link.seconds_per_byte for link in links)
    shown = []
    for (row, column), link in sorted(slowest.items()):
        over = link.seconds_per_byte / typical
        # The colour saturates at half the median and at four times the median.
        strength = min(1.0, abs(math.log2(max(over, 1e-9))) / (2 if over > 1 else 1))
        ends = f"{names[place_of[link.source]]} to {names[place_of[link.target]]}"
        said = f"{ends}: {bandwidth(link.seconds_per_byte)}, latency {duration(link.latency_s)}"
        shown.append((row, column, "slow" if over > 1 else "fast", f"{strength:.2f}", said))
    return {
        "title": f"{title}: {bandwidth(typical)} in the median",
        "size": cells,
        "names": names if cells == len(names) <= _MOST_NAMES else (),
        "hosts_a_cell": f"{len(names) / cells:.3g}" if cells < len(names) else "",
        "cells": shown,
    }


def site_rows(view: View) -> list[tuple[str, str]]:
    """Return one (title, text) row with each site's hosts and the median rates of links, or no row for a single site."""
    if len(view.sites) == 1:
        return []
    sites = ", ".join(f"{site} ({_names(view, hosts)})" for site, hosts in view.sites.items())
    links = {"between them": view.links_of_sites(True), "inside": view.links_of_sites(False)}
    medians = {where: statistics.median(each.seconds_per_byte for each in of) for where, of in links.items() if of}
    rates = ", ".join(f"{bandwidth(seconds)} {where}" for where, seconds in medians.items())
    source = "as stated" if view.sites_stated else "by their links"
    return [(f"{len(view.sites)} sites {source}", f"{sites}; {rates}")]


def _names(view: View, hosts: Sequence[int]) -> str:
    """Return the names of hosts as one text, with (!) after each host that has an outlier."""
    marked = hosts_with_outliers(view)
    names = [f"{view.hosts[host].name}{' (!)' if host in marked else ''}" for host in hosts[:_MOST_NAMES_IN_A_LINE]]
    return ", ".join(names) + (f" and {len(hosts) - len(names):,} more" if len(hosts) > len(names) else "")


def lines(view: View) -> Iterator[str]:
    """Describe a view for the terminal, outliers first."""
    yield f"{heading(view)}, {view.backend}, {view.made}"
    yield from (outlier.sentence for outlier in view.outliers)
    if not view.outliers:
        yield "no part is slower than the others"
    for name, typical, slowest, rank, longer in rate_rows(view):
        yield f"{name}: {typical}, slowest {slowest} on rank {rank} ({longer} longer)"
    for name, rates in link_rows(view):
        yield f"{name}: {rates}"
    for operation, scope, ranks, *points in collective_rows(view):
        yield f"{operation} ({scope}, {ranks} ranks): {', '.join(points)}"
    yield switch_source(view)
    for path, hosts in leaves(view):
        yield f"{path or 'hosts'}: {_names(view, hosts)}"


def heading(view: View) -> str:
    names = sorted({rank.device for rank in view.ranks})
    return f"{counted(len(view.hosts), 'host')}, {counted(len(view.ranks), 'rank')}, {', '.join(names[:3])}"


def rate_rows(view: View) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each quantity: name, typical rate, and the slowest rank's rate, rank number and extra time in %."""
    rows = []
    for one, *others in zip(*(rank.rates for rank in view.ranks), strict=False):
        times = [one.seconds, *(rate.seconds for rate in others)]
        typical, slowest = statistics.median(times), max(times)
        size = {"product": f"{one.size} x {one.size}", "launch": ""}.get(one.quantity, _scaled(one.size, _BYTES))
        name = " ".join(part for part in (one.quantity, one.dtype, size) if part)
        longer = f"{slowest / typical - 1:.0%}" if typical else "-"
        rows.append((name, _speed(one, typical), _speed(one, slowest), str(times.index(slowest)), longer))
    return rows


def link_rows(view: View) -> list[tuple[str, str]]:
    """Return (title, text) rows: the sites, and the typical and extreme rates of links between and within hosts."""
    rows = site_rows(view)
    for name, between in (("links between hosts", True), ("links in hosts", False)):
        if links := view.links_of(between):
            rates = [link.seconds_per_byte for link in links]
            latency = duration(statistics.median(link.latency_s for link in links))
            text = f"{bandwidth(statistics.median(rates))} ({bandwidth(max(rates))} to {bandwidth(min(rates))})"
            rows.append((name, f"{text}, latency {latency}, {counted(len(links), 'direction')}"))
    return rows


def collective_rows(view: View) -> list[tuple[str, ...]]:
    """Return a row for each collective: operation, scope, ranks, and the times for the smallest and the largest vector."""
    rows = []
    for each in view.collectives:
        ends = each.points[:1] + each.points[-1:]
        times = [f"{duration(seconds)} for {_scaled(size, _BYTES)}" for size, seconds, _ in ends]
        rows.append((each.operation, each.scope, str(each.ranks), *times))
    return rows


def leaves(view: View) -> list[tuple[str, list[int]]]:
    """Return the path and hosts of each leaf switch, in tree order. With several sites, the path begins with the site."""
    below = hosts_below(view.paths, range(len(view.hosts)))
    return [(" / ".join(path), hosts) for path, hosts in below.items()]


def switch_source(view: View) -> str:
    return {
        "slurm": "switches by Slurm's topology",
        "measured": "switches by measured paths: hosts with shorter paths to one another share a leaf",
        "unknown": "switches unknown: neither Slurm nor the measured paths tell",
    }[view.switches_from]


def hosts_with_outliers(view: View) -> set[int]:
    """Return the hosts involved in outliers. A slow path involves the hosts at both ends."""
    return {view.ranks[rank].host for outlier in view.outliers for rank in outlier.ranks}


def bandwidth(seconds_per_byte: float) -> str:
    """Format a rate in bytes per second with three digits, given the seconds per byte."""
    return f"{_scaled(1 / max(seconds_per_byte, 1e-15), _DECIMAL)}B/s"


def _speed(rate: Rate, seconds: float) -> str:
    if rate.quantity == "product":
        return f"{_scaled(2 * rate.size**3 / max(seconds, 1e-15), _DECIMAL)}FLOP/s"
    return duration(seconds) if rate.quantity == "launch" else bandwidth(seconds / rate.size)


def _scaled(number: float, units: Mapping[str, float]) -> str:
    # Values from 999.5 on take the next unit, because three digits would show them as 1e+03.
    unit = next((unit for unit, size in units.items() if number > 0.9995 * size), [*units][-1])
    return f"{number / units[unit]:.3g} {unit}"
