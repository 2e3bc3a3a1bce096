"""Time to train against the number of accelerators as one HTML page that needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cluster.devices import Device
from cluster.display.markup import document, figure_list, section, table, text
from cluster.plan.scaling import CAUSES, ScalingPoint
from cluster.published.prediction import minutes_in_digits
from cluster.published.results import Result
from console.files import write_atomically

# One class for each cause, in the order of `CAUSES`: strict, so that a new cause cannot go without colour.
_CLASSES = dict(zip(CAUSES, ("compute", "data-wait", "reduce", "update", "evaluation", "other"), strict=True))
"""Colours of the report, by cause."""


def write_page(
    recipe: str, device: Device, points: Sequence[ScalingPoint], published: Sequence[Result], path: Path
) -> None:
    """Write the page whole or not at all."""
    write_atomically(path, render(recipe, device, points, published).encode())


def render(recipe: str, device: Device, points: Sequence[ScalingPoint], published: Sequence[Result]) -> str:
    """Return the page; a policy forbids it to run or load anything."""
    # Points come in ascending order of accelerators, from one node on: results on fewer would lie left of the axis.
    published = [result for result in published if result.run.machine.accelerators >= points[0].accelerators]
    title = f"{text(recipe)} on up to {points[-1].accelerators:,} {text(device.name)}"
    fastest = min(points, key=lambda point: point.minutes)
    figures = (
        ("Fastest", f"{minutes_in_digits(fastest.minutes)} min", f"on {fastest.accelerators:,} accelerators"),
        ("One node", f"{minutes_in_digits(points[0].minutes)} min", f"{points[0].accelerators:,} accelerators"),
        ("Published", str(len(published)), f"closed results on {points[0].accelerators:,} or more, v2.0 to v3.1"),
    )
    subtitle = (
        "Predicted time to train to 0.720, each number of accelerators with its best plan, and intervals as wide as those "
        "that hold 80 % of published results. Not an MLPerf result."
    )
    body = (
        f'<header><h1>{title}</h1><p class="subtitle">{subtitle}</p></header>\n{figure_list(figures)}\n',
        section("Time to train", _curve(points, published)),
        section("What takes the time", _shares(points)),
        section("Figures", _figures(points)),
    )
    return document(
        title,
        "\n".join(body),
        "Made by python -m cluster scale, from facts of devices, a model of the step, and published results.",
    )


def _curve(points: Sequence[ScalingPoint], published: Sequence[Result]) -> str:
    """Minutes over accelerators, both in logarithms: the band, the line, and the published results as dots."""
    minutes = [bound for point in points for bound in (point.low, point.high)]
    minutes += [result.seconds / 60 for result in published]
    ticks = _ticks(min(minutes), max(minutes))
    low, high = math.log10(ticks[0]), math.log10(ticks[-1])

    def y(value: float) -> float:
        # SVG counts from the top.
        return 100 * (high - math.log10(value)) / (high - low)

    x = _across(points)
    upper = [(x(point.accelerators), y(point.high)) for point in points]
    lower = [(x(point.accelerators), y(point.low)) for point in reversed(points)]
    line = [(x(point.accelerators), y(point.minutes)) for point in points]
    # A line of no length with round caps is drawn as a dot.
    dots = "".join(f"M{x(result.run.machine.accelerators):.2f} {y(result.seconds / 60):.2f}h0" for result in published)
    drawing = (
        "".join(f'<path class="grid" d="M0 {y(tick):.2f}H100"/>' for tick in ticks)
        + f'<polygon style="fill:var(--band)" points="{_places(upper + lower)}"/>'
        + f'<g class="mark"><path class="stroke" d="M{_places(line, "L")}"/></g>'
        + f'<g class="mark invalid"><path class="dots" d="{dots}"/></g>'
    )
    labels = "".join(f'<span class="y" style="bottom:{100 - y(tick):.2f}%">{tick:,g}</span>' for tick in ticks)
    key = (
        '<ul class="key"><li><i class="compute"></i>predicted, with its interval</li>'
        f'<li><i style="background:var(--bad)"></i>{len(published)} published results</li></ul>'
    )
    return _chart(drawing, labels + _numbers(points), "minutes to 0.720") + key


def _ticks(least: float, most: float) -> list[float]:
    """Return 1 and 3 times powers of ten, from the last up to ``least`` to the first from ``most`` on."""
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    ticks = [factor * 10.0**decade for decade in decades for factor in (1, 3)]
    first = max(place for place, tick in enumerate(ticks) if tick <= least)
    last = min(place for place, tick in enumerate(ticks) if tick >= most)
    return ticks[first : last + 1]


def _shares(points: Sequence[ScalingPoint]) -> str:
    """Shares of the time, one cause upon the other, over accelerators."""
    x = _across(points)
    # The top of one band is the floor of the next, so that all of them fill the height.
    floor = [0.0] * len(points)
    drawing = key = ""
    for cause in CAUSES:
        top = [below + point.share(cause) for below, point in zip(floor, points, strict=True)]
        upper = [(x(point.accelerators), 100 - 100 * share) for point, share in zip(points, top, strict=True)]
        lower = [(x(point.accelerators), 100 - 100 * share) for point, share in zip(points, floor, strict=True)]
        drawing += f'<polygon class="{_CLASSES[cause]}" points="{_places(upper + lower[::-1])}"/>'
        key += f'<li><i class="{_CLASSES[cause]}"></i>{cause}</li>'
        floor = top
    labels = "".join(f'<span class="y" style="bottom:{share}%">{share} %</span>' for share in (0, 50, 100))
    return _chart(drawing, labels + _numbers(points), "share of the time") + f'<ul class="key">{key}</ul>'


def _figures(points: Sequence[ScalingPoint]) -> str:
    columns = ("accelerators", "batch", "precision", "reduction", "minutes", "80 % between", "efficiency", "samples")
    rows = (
        (
            f"{point.accelerators:,}",
            f"{point.plan.strategy.global_batch_size:,}",
            point.plan.strategy.precision,
            point.plan.strategy.reduction,
            minutes_in_digits(point.minutes),
            f"{minutes_in_digits(point.low)} and {minutes_in_digits(point.high)}",
            f"{point.efficiency:.0%}",
            f"{point.samples_factor:.2f}x",
        )
        for point in points
    )
    note = (
        "Efficiency is sequences a second and accelerator over those of one node; samples are those to converge over "
        "what one node's batch needs."
    )
    shares = ((f"{point.accelerators:,}", *(f"{point.share(cause):.0%}" for cause in CAUSES)) for point in points)
    # Two tables: all columns side by side are wider than a page.
    return (
        f'{table("Plans", columns, rows)}<p class="aside">{note}</p>\n'
        f"{table('Shares of the time', ('accelerators', *CAUSES), shares)}"
    )


def _across(points: Sequence[ScalingPoint]) -> Callable[[int], float]:
    first, last = math.log2(points[0].accelerators), math.log2(points[-1].accelerators)

    def x(accelerators: int) -> float:
        return 100 * (math.log2(accelerators) - first) / max(1e-9, last - first)

    return x


def _numbers(points: Sequence[ScalingPoint]) -> str:
    x = _across(points)
    return "".join(
        f'<span class="x" style="left:{x(point.accelerators):.2f}%">{point.accelerators:,}</span>'
        # Every other number: powers of two side by side would overlap.
        for point in points[::2]
    )


def _chart(drawing: str, labels: str, axis: str) -> str:
    # Stretched to the box; text would be stretched as well, and stands outside as HTML.
    svg = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{drawing}</svg>'
    plot = f'<div class="plot">{svg}{labels}</div><p class="axis">accelerators</p>'
    return f'<figure class="wide"><p class="aside">{axis}</p><div class="chart">{plot}</div></figure>'


def _places(places: Iterable[tuple[float, float]], between: str = " ") -> str:
    return between.join(f"{x:.2f},{y:.2f}" for x, y in places)
