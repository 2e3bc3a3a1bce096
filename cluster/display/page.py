"""Self-contained HTML page that shows the view of a cluster."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.display.lines import (
    bandwidth,
    collective_rows,
    heading,
    hosts_with_outliers,
    leaves,
    link_rows,
    rate_rows,
    switch_source,
)
from cluster.view import Link, View
from console.files import write_atomically
from console.html.page import render_page
from console.text import duration

MOST_CELLS = 96
"""Maximum rows of a heat map. With more hosts, each cell covers several hosts and shows their slowest link."""
_MOST_NAMES = 48
"""Maximum number of names beside a heat map. More would overlap."""


def write_page(view: View, path: Path) -> None:
    """Write the page atomically: a failure leaves no partial file."""
    write_atomically(path, render(view).encode())


def render(view: View) -> str:
    hosts, places = [rank.host for rank in view.ranks], [rank.place for rank in view.ranks]
    place_names = [f"rank {place}" for place in range(max(places) + 1)]
    maps = [
        heat_map("Between hosts", view.links_of(between_hosts=True), hosts, [host.name for host in view.hosts]),
        heat_map("Within hosts, the slowest of all hosts", view.links_of(between_hosts=False), places, place_names),
    ]
    return render_page(
        Path(__file__).with_name("page.html"),
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
