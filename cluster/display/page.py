"""The view of a cluster as one HTML page that needs nothing but itself, in the style of the report of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.display.markup import document, figure_list, section, table, text
from cluster.display.summary import (
    COLLECTIVE_COLUMNS,
    bandwidth,
    collective_rows,
    heading,
    named_hosts,
    outlier_sentence,
    rate_rows,
    switch_tree,
)
from cluster.view import Link, View
from console.durations import duration
from console.files import write_atomically
from console.text import counted

MOST_CELLS = 96
"""Rows of a heat map; where more hosts are, a cell stands for several and shows the slowest of their links."""
# Names beside the map overlap when there are more.
_MOST_NAMED = 48
_MOST_ROWS = 128
_MOST_HOSTS_A_LEAF = 64


def write_page(view: View, path: Path) -> None:
    """Write the page whole or not at all."""
    write_atomically(path, render(view).encode())


def render(view: View) -> str:
    """The page. Everything from the file is escaped, and a policy forbids the page to run or load anything."""
    body = [
        _header(view),
        _figures(view),
        section("In short", _statements(view)),
        section("Links", _heat_maps(view)),
        section("Switches", _switches(view)),
        section("Devices", _devices(view)),
        section("Collectives", _collectives(view)),
        section("Hosts", _hosts(view)),
    ]
    measured = f"Measured by python -m cluster probe, commit {text(view.commit[:60])}, PyTorch {text(view.torch)}."
    return document(text(heading(view)), "\n".join(part for part in body if part), measured)


def _header(view: View) -> str:
    made = view.made.replace("T", " ")[:16]
    return (
        f"<header><h1>Cluster of {counted(len(view.hosts), 'host')}</h1>"
        f'<p class="subtitle">{text(heading(view))}, {text(view.backend)}; '
        f"measured {text(made)} in {view.seconds:.0f} s</p>"
        "</header>"
    )


def _figures(view: View) -> str:
    rows = rate_rows(view)
    products = [row for row in rows if row.name.startswith("product")]
    best = max(products, key=lambda row: row.work, default=None)
    # Only ranks have a figure always: a probe of one process has no links, one without products no rate.
    figures = [("Ranks", f"{len(view.ranks):,}", f"on {counted(len(view.hosts), 'host')}")]
    if best:
        figures.append(("Matrix products", best.typical, f"a rank, {best.name.removeprefix('product ')}"))
    for name, links in (("Link between hosts", view.links_between_hosts), ("Link in a host", view.links_in_hosts)):
        if links:
            latency = duration(statistics.median(link.latency_s for link in links))
            figures.append(
                (name, bandwidth(statistics.median(link.seconds_per_byte for link in links)), f"latency {latency}")
            )
    figures.append(("Parts named", str(len(view.outliers)), "slow or broken"))
    return figure_list(figures)


def _statements(view: View) -> str:
    items = [
        f'<li class="bad"><i aria-hidden="true">✕</i><p><strong>{text(outlier.name)}</strong><br>'
        f"{text(outlier_sentence(outlier))}.</p></li>"
        for outlier in view.outliers[:_MOST_ROWS]
    ]
    if not items:
        items = ['<li class="good"><i aria-hidden="true">✓</i><p>No part is named as slower than the others.</p></li>']
    note = ""
    if any(outlier.step_share for outlier in view.outliers):
        note = (
            '<p class="aside">A step is taken as 56 sequences a rank, gradients of 336 million parameters reduced in '
            "fp32, and nothing overlapped.</p>"
        )
    return f'<ul class="statements">{"".join(items)}</ul>{note}'


def _heat_maps(view: View) -> str:
    """Draw the links between hosts, and between the places in a host: from a row to a column."""
    names = [host.name for host in view.hosts]
    between = _heat_map("Between hosts", view.links_between_hosts, [rank.host for rank in view.ranks], names)
    places = [rank.place for rank in view.ranks]
    within = _heat_map(
        # Places in a host stand for the same places of all hosts, of which the slowest shows.
        "Within hosts, the slowest of all hosts",
        view.links_in_hosts,
        places,
        [f"rank {place}" for place in range(max(places) + 1)],
    )
    if not between and not within:
        return ""
    key = (
        '<ul class="key"><li><i class="heat fast"></i>half the median time</li><li><i class="heat even"></i>the median</li>'
        '<li><i class="heat slow"></i>four times the median or more</li><li><i class="heat none"></i>not measured</li></ul>'
    )
    return f'<div class="pair">{between}{within}</div>{key}'


def _heat_map(title: str, links: Sequence[Link], place_of: Sequence[int], names: Sequence[str]) -> str:
    if not links:
        return ""
    size = len(names)
    # Neighbours by number share a cell where there are more than cells.
    cells = min(size, MOST_CELLS)
    slowest: dict[tuple[int, int], Link] = {}
    for link in links:
        cell = (place_of[link.source] * cells // size, place_of[link.target] * cells // size)
        # The slowest of the links in a cell: a mean would hide the one that is looked for.
        if cell not in slowest or link.seconds_per_byte > slowest[cell].seconds_per_byte:
            slowest[cell] = link
    # The median of the links shown, so that one slow link does not shift the colours of all others.
    typical = statistics.median(link.seconds_per_byte for link in links)
    marks = []
    # Sorted, so that equal views give equal pages.
    for (row, column), link in sorted(slowest.items()):
        over = link.seconds_per_byte / typical
        kind = "slow" if over > 1 else "fast"
        # Full at half the median and at four times it.
        strength = min(1.0, abs(math.log2(max(over, 1e-9))) / (2 if over > 1 else 1))
        said = (
            f"{names[place_of[link.source]]} to {names[place_of[link.target]]}: {bandwidth(link.seconds_per_byte)}, "
            f"latency {duration(link.latency_s)}"
        )
        marks.append(
            # The even cell lies below the coloured one, whose opacity is its strength.
            f'<g><title>{text(said)}</title><rect class="even" x="{column}" y="{row}" width="1" height="1"/>'
            f'<rect class="{kind}" x="{column}" y="{row}" width="1" height="1" opacity="{strength:.2f}"/></g>'
        )
    rows, columns = ("", "")
    if cells == size and size <= _MOST_NAMED:
        rows = "".join(f"<span>{text(name, 24)}</span>" for name in names)
        columns = "".join(f"<span><b>{text(name, 24)}</b></span>" for name in names)
    note = "Rows send, columns receive; a point over a cell tells its figures."
    if cells < size:
        note += f" A cell stands for {size / cells:.3g} hosts in a row, and shows the slowest link among them."
    drawing = f'<svg viewBox="0 0 {cells} {cells}" role="img" aria-label="{text(title)}">{"".join(marks)}</svg>'
    return (
        f'<figure><h3>{text(title)}: {bandwidth(typical)} in the median</h3><div class="heatmap" style="--cells:{cells}">'
        f'<div class="rows">{rows}</div><div class="grid">{drawing}</div><div></div>'
        f'<div class="columns">{columns}</div></div>'
        f'<p class="aside">{note}</p></figure>'
    )


def _switches(view: View) -> str:
    source = {
        "slurm": "As Slurm's topology has them.",
        "measured": "Hosts whose paths to one another are shorter, as measured, share a leaf.",
        "unknown": "Neither Slurm nor the measured paths tell switches apart.",
    }[view.switches_from]
    bad = named_hosts(view, view.outliers)

    def branch(below: dict[str, Any]) -> str:
        parts = []
        # Hosts of a leaf are under the name "" (see `switch_tree`), which no switch has.
        for name, under in below.items():
            if name:
                parts.append(f'<li><span class="switch">{text(name, 64)}</span>{branch(under)}</li>')
                continue
            chips = "".join(
                f'<span class="host{" named" if host in bad else ""}">{text(view.hosts[host].name, 40)}</span>'
                for host in under[:_MOST_HOSTS_A_LEAF]
            )
            more = f" and {len(under) - _MOST_HOSTS_A_LEAF:,} more" if len(under) > _MOST_HOSTS_A_LEAF else ""
            parts.append(f'<li class="hosts">{chips}{more}</li>')
        return f"<ul>{''.join(parts)}</ul>"

    return f'<div class="tree">{branch(switch_tree(view))}</div><p class="aside">{source}</p>'


def _devices(view: View) -> str:
    rows = []
    for row in rate_rows(view):
        host = view.hosts[view.ranks[row.rank].host].name
        # A bar for up to twice the typical time; beyond, the figure tells.
        width = min(100.0, 100 * max(0.0, row.over - 1))
        rows.append(
            [
                *(text(cell) for cell in (row.name, row.typical, row.slowest)),
                f'<span class="over" style="width:{0.05 * width:.2f}rem"></span>{100 * (row.over - 1):.0f} %',
                f"{row.rank} on {text(host, 60)}",
            ]
        )
    return table("Rates of devices", ("", "Typical", "Slowest rank", "Slower by", "Rank"), rows)


def _collectives(view: View) -> str:
    rows = [[text(cell) for cell in row] for row in collective_rows(view)]
    note = (
        '<p class="aside">Time = latency + bytes / bandwidth, of the whole vector; the residual is the root mean square of '
        "the relative errors.</p>"
    )
    return table("Collectives", (name.capitalize() for name in COLLECTIVE_COLUMNS), rows) + note if rows else ""


def _hosts(view: View) -> str:
    rows = []
    for number, host in enumerate(view.hosts[:_MOST_ROWS]):
        ranks = view.ranks_of(number)
        cards = ", ".join(f"{card.name}{f' {card.gbit_s:g} Gbit/s' if card.gbit_s else ''}" for card in host.cards)
        near = sorted({f"{view.ranks[rank].card}: {view.ranks[rank].place}" for rank in ranks if view.ranks[rank].card})
        rows.append(
            [
                text(host.name),
                text(view.ranks[ranks[0]].device if ranks else ""),
                str(len(ranks)),
                f"{host.sockets} / {host.numa_nodes} / {host.cores}",
                f"{host.memory_bytes / 2**30:.0f} GiB",
                text(cards),
                text(", ".join(near)),
            ]
        )
    more = f'<p class="aside">and {len(view.hosts) - _MOST_ROWS:,} more</p>' if len(view.hosts) > _MOST_ROWS else ""
    columns = (
        "Host",
        "Device",
        "Ranks",
        "Sockets / NUMA / cores",
        "Memory",
        "Network cards",
        "Card: rank of the host near it",
    )
    return table("Hosts", columns, rows) + more
