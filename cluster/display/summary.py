"""The view of a cluster in figures and words, which the terminal and the page share."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.view import Outlier, Rate, View
from console.durations import duration
from console.text import counted


@dataclass(frozen=True)
class RateRow:
    """One quantity over all ranks."""

    name: str
    typical: str
    slowest: str
    rank: int
    """The slowest."""
    over: float
    """Its time over the typical one."""
    work: float
    """Size cubed over time: orders products by their speed."""


def heading(view: View) -> str:
    """The cluster in a few words."""
    names = sorted({rank.device for rank in view.ranks})
    return f"{counted(len(view.hosts), 'host')}, {counted(len(view.ranks), 'rank')}, {', '.join(names[:3])}"


def rate_rows(view: View) -> list[RateRow]:
    """List the quantities that every rank has, with the slowest rank of each."""
    rows = []
    # Ranks measure the same cells in the same order; one with another device may lack some.
    for index, first in enumerate(view.ranks[0].rates):
        same = [
            rank.rates[index].seconds
            for rank in view.ranks
            if index < len(rank.rates) and name_of(rank.rates[index]) == name_of(first)
        ]
        # A median over only some of the ranks would compare different things.
        if len(same) < len(view.ranks):
            continue
        typical = statistics.median(same)
        rank = max(range(len(same)), key=same.__getitem__)
        # A device too fast for the clock gives 0.
        over = same[rank] / typical if typical else 1.0
        rows.append(
            RateRow(
                name_of(first),
                speed(first, typical),
                speed(first, same[rank]),
                rank,
                over,
                first.size**3 / max(typical, 1e-15),
            )
        )
    return rows


# Size is part of the name where the same quantity is measured at several.
def name_of(rate: Rate) -> str:
    """Name what was measured."""
    size = {"product": f"{rate.size} x {rate.size}", "launch": ""}.get(rate.quantity, byte_count(rate.size))
    return " ".join(part for part in (rate.quantity, rate.dtype, size) if part)


def speed(rate: Rate, seconds: float) -> str:
    """A time of a quantity in its usual unit."""
    if rate.quantity == "product":
        operations = 2 * rate.size**3 / max(seconds, 1e-15)
        return f"{operations / 1e12:.3g} TFLOP/s" if operations >= 1e12 else f"{operations / 1e9:.3g} GFLOP/s"
    return duration(seconds) if rate.quantity == "launch" else bandwidth(seconds / max(1, rate.size))


def bandwidth(seconds_per_byte: float) -> str:
    """Bytes a second with three digits."""
    rate = 1 / max(seconds_per_byte, 1e-15)
    if rate >= 1e12:
        return f"{rate / 1e12:.3g} TB/s"
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def byte_count(size: int) -> str:
    """A number of bytes in a binary unit."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.3g} {unit}"
    return f"{size} B"


def link_lines(view: View) -> list[tuple[str, str]]:
    """Typical and worst links of either kind, with a name."""
    lines = []
    for name, links in (("between hosts", view.links_between_hosts), ("in hosts", view.links_in_hosts)):
        if links:
            rates, latencies = [link.seconds_per_byte for link in links], [link.latency_s for link in links]
            lines.append(
                (
                    f"links {name}",
                    f"{bandwidth(statistics.median(rates))} ({bandwidth(max(rates))} to {bandwidth(min(rates))}), latency "
                    f"{duration(statistics.median(latencies))}, {len(links):,} directions measured",
                )
            )
    return lines


def collective_rows(view: View) -> list[tuple[str, ...]]:
    """Operation, scope, ranks, latency, bandwidth, residual and sizes of all collectives."""
    return [
        (
            each.operation,
            each.scope,
            str(each.ranks),
            duration(each.latency_s),
            bandwidth(each.seconds_per_byte),
            f"{100 * each.residual:.1f} %",
            f"{byte_count(each.points[0][0])} to {byte_count(each.points[-1][0])}" if each.points else "",
        )
        for each in view.collectives
    ]


COLLECTIVE_COLUMNS = ("collective", "scope", "ranks", "latency", "bandwidth", "residual", "sizes")


def outlier_sentence(outlier: Outlier) -> str:
    """Say what is wrong with a part, after its name."""
    # Ratio 0 marks a wrong result, whose quantity says all of it.
    if not outlier.ratio:
        return outlier.quantity
    deviations = "more than 999" if outlier.deviations > 999 else f"{outlier.deviations:.0f}"
    cost = f"; a step of BERT-Large takes {100 * outlier.step_share:.1f} % longer" if outlier.step_share else ""
    return (
        f"{outlier.quantity}: takes {100 * (outlier.ratio - 1):.0f} % longer than the others "
        f"({deviations} robust deviations){cost}"
    )


def switch_tree(view: View) -> dict[str, object]:
    """Switches as nested dictionaries from the top; hosts, by number, are under ``""`` of their leaf."""
    tree: dict[str, object] = {}
    for number, host in enumerate(view.hosts):
        place = tree
        for name in host.switches:
            # `setdefault` builds the path from the top; a host without known switches hangs at the root.
            below = place.setdefault(name, {})
            assert isinstance(below, dict)
            place = below
        hosts = place.setdefault("", [])
        assert isinstance(hosts, list)
        hosts.append(number)
    return tree


def named_hosts(view: View, outliers: Iterable[Outlier]) -> set[int]:
    """Hosts that outliers are about: of a path both ends."""
    return {view.ranks[rank].host for outlier in outliers for rank in outlier.ranks}


def shortened(names: Sequence[str], most: int) -> str:
    """Names in a row, at most so many."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
