"""Charts as inline SVG. Colours and type come from the style sheet of the page, so they follow its scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 18, 44
MAX_POINTS = 300
"""Most points drawn of one line; more are averaged."""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        points: (x, y), x increasing.
        kind: class of the style sheet: valid, aborted or invalid.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "valid"


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_title: str,
    y_format: Callable[[float], str],
    target: float | None = None,
    markers: bool = False,
) -> str:
    """An SVG element with all lines over shared axes, and a dashed line at the target."""
    points = [point for line in lines for point in line.points]
    levels = [y for _, y in points] + ([target] if target is not None else [])
    parts, x_of, y_of = _axes(max(x for x, _ in points), levels, title, x_title, y_format)
    parts += [_draw(line, x_of, y_of, markers) for line in lines]
    if target is not None:
        y = y_of(target)
        parts.append(f'<line class="target" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="target" x="{LEFT + 6}" y="{y - 6:.1f}">target {y_format(target)}</text>')
    return "".join([*parts, "</svg>"])


def stacked_chart(lines: Sequence[Line], *, title: str, x_title: str, y_format: Callable[[float], str]) -> str:
    """An SVG element with an area for each line, one on top of the other; all have the same x, and `kind` is the colour."""
    xs = [x for x, _ in lines[0].points]
    levels = [[0.0] * len(xs)]
    for line in lines:
        levels.append([below + y for below, (_, y) in zip(levels[-1], line.points, strict=True)])
    edges = [thin(list(zip(xs, level, strict=True))) for level in levels]
    parts, x_of, y_of = _axes(max(xs), [0.0, *levels[-1]], title, x_title, y_format)
    for line, lower, upper in zip(lines, edges, edges[1:], strict=False):
        corners = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in [*upper, *reversed(lower)])
        parts.append(f'<polygon class="{line.kind}" points="{corners}"><title>{escape(line.name)}</title></polygon>')
    return "".join([*parts, "</svg>"])


Scale = Callable[[float], float]


def _axes(
    x_high: float, levels: Sequence[float], title: str, x_title: str, y_format: Callable[[float], str]
) -> tuple[list[str], Scale, Scale]:
    """The open SVG element with grid and numbers, and where x and y lie in it."""
    x_ticks = ticks(0.0, x_high)
    y_ticks = ticks(min(levels), max(levels))
    x_of = _scale(x_ticks[0], x_ticks[-1], LEFT, WIDTH - RIGHT)
    y_of = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{y_format(tick)}</text>')
    for tick in x_ticks:
        position = f'x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        parts.append(f'<text class="tick" {position} text-anchor="middle">{short_count(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_title)}</text>')
    return parts, x_of, y_of


def _draw(line: Line, x_of: Scale, y_of: Scale, markers: bool) -> str:
    places = [(x_of(x), y_of(y)) for x, y in thin(line.points)]
    coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = f'<polyline points="{coordinates}"/>'
    if markers or len(places) == 1:
        drawn += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in places)
    return f'<g class="line {line.kind}"><title>{escape(line.name)}</title>{drawn}</g>'


def _scale(low: float, high: float, start: float, stop: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` points: the means of equally long stretches."""
    size = -(-len(points) // MAX_POINTS)
    if size <= 1:
        return list(points)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in stretches]


def ticks(low: float, high: float) -> list[float]:
    """Two to nine round numbers, the first at or below `low` and the last at or above `high`."""
    span = high - low
    if span < 1e-9 * max(abs(low), abs(high), 1e-3):
        span = max(abs(high), 1.0)  # all points at one height
    magnitude = 10.0 ** math.floor(math.log10(span / 5))
    step = magnitude * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * magnitude * 5 >= span * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [index * step for index in range(first, last + 1)]


def short_count(value: float) -> str:
    """750, 50k, 1.5M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2f}".rstrip("0").rstrip(".") + letter
    return f"{value:g}"
