"""The view of a cluster in a terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.tree import Tree

from cluster.display.summary import (
    COLLECTIVE_COLUMNS,
    collective_rows,
    heading,
    link_lines,
    named_hosts,
    outlier_sentence,
    rate_rows,
    shortened,
    switch_tree,
)
from cluster.view import View
from console.text import visible

_MOST_HOSTS_A_LEAF = 24
MAX_COLUMNS = 10_000
"""Width to which a table is measured; a wider one fits no terminal."""


def print_view(view: View) -> None:
    """Print all of it: outliers first, then devices, links, collectives and the tree of switches."""
    console = Console()
    console.print(f"[bold]{_safe(heading(view))}[/], {_safe(view.backend)}, {_safe(view.made)}", highlight=False)
    for outlier in view.outliers:
        console.print(f"[bold red]{_safe(outlier.name)}[/]  {_safe(outlier_sentence(outlier))}", highlight=False)
    if not view.outliers:
        console.print("[green]no part is named as slow[/]")
    _print_table(console, ("device", "typical", "slowest", "rank", "over"), [
        (row.name, row.typical, row.slowest, str(row.rank), f"{100 * (row.over - 1):.0f} %") for row in rate_rows(view)
    ])  # fmt: skip
    for name, line in link_lines(view):
        console.print(f"{name}: {_safe(line)}", highlight=False)
    if view.collectives:
        _print_table(console, COLLECTIVE_COLUMNS, collective_rows(view))
    console.print(_tree(view))


# Rich would take brackets in a name for markup, and a terminal control characters for commands.
def _safe(text: str) -> str:
    return escape(visible(text))


def _print_table(console: Console, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table, or a few lines for each row if the terminal is too narrow for it."""
    table = Table(box=SIMPLE_HEAD)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_safe, row))
    if Measurement.get(console, console.options.update(max_width=MAX_COLUMNS), table).maximum <= console.width:
        console.print(table)
        return
    for first, *others in rows:
        named = ", ".join(f"{name} {value}" for name, value in zip(columns[1:], others, strict=True))
        console.print(f"[bold]{_safe(first)}[/]: {_safe(named)}", highlight=False)


def _tree(view: View) -> Tree:
    source = {"slurm": "by Slurm", "measured": "by measured paths", "unknown": "not known"}[view.switches_from]
    tree, bad = Tree(f"switches ({source})"), named_hosts(view, view.outliers)

    def add(branch: Tree, below: dict[str, Any]) -> None:
        for name, under in below.items():
            if name:
                add(branch.add(_safe(name)), under)
            else:
                names = [f"{view.hosts[host].name}{' (!)' if host in bad else ''}" for host in under]
                branch.add(_safe(shortened(names, _MOST_HOSTS_A_LEAF)))

    add(tree, switch_tree(view))
    return tree
