"""Charts for HTML pages.

The drawing has no size of its own: its coordinates are thousandths of the plot, and lines keep their width however it is
stretched (`vector-effect`). A dot is a line of no length with a round cap. Colours come from the style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from console.html.page import TEMPLATES, render_part

if TYPE_CHECKING:
    from markupsafe import Markup

SIDE = 1000.0
"""Width and height of the drawing in its own units."""
MAX_POINTS = 240
"""Maximum points drawn of one line; more are averaged."""
MAX_POINTS_A_CHART = 1500
"""Maximum points drawn of all lines of a chart without dots, so that many lines stay legible."""
MAX_BAR_NAMES = 12
MAX_BAR_NOTES = 24
"""Maximum number of columns that are wide enough for a word in them."""

Format = Callable[[float], str]
Points = Sequence[tuple[float, float]]
Shape = tuple[str, dict[str, str]]
"""An SVG element: its tag and its attributes."""


@dataclass(frozen=True)
class Line:
    """A line of a chart: points with increasing x, and a class of the style sheet as its kind."""

    name: str
    points: Points
    kind: str = "valid"


@dataclass(frozen=True)
class Bar:
    """A column or a dot for one run's value; `note` is a word in the column, such as "fastest"."""

    name: str
    value: float
    kind: str = "valid"
    note: str = ""


@dataclass(frozen=True)
class Guide:
    """A line across the chart, or a band if it has two ends.

    Attributes:
        kind: class of the style sheet.
        along: the axis on which `low` and `high` lie.
        label: goes into the key below the chart.
    """

    kind: str
    label: str
    low: float
    high: float | None = None
    along: Literal["x", "y"] = "y"


@dataclass(frozen=True)
class Axes:
    """Subject of a chart, and how its axes read.

    Attributes:
        description: the chart in a sentence, for screen readers.
        from_zero: whether the y axis starts at zero instead of near the lowest value.
        x_format: by default short counts.
    """

    description: str
    x_title: str
    y_format: Format
    guides: Sequence[Guide] = ()
    from_zero: bool = False
    x_format: Format | None = None


def line_chart(lines: Sequence[Line], axes: Axes, *, dots: bool = False) -> Markup:
    """Draw all lines over shared axes; with `dots` also each of their points, the last one larger."""
    # All lines share one number of points, or the page would grow with the number of runs.
    limit = MAX_POINTS if dots else max(8, min(MAX_POINTS, MAX_POINTS_A_CHART // len(lines)))
    thinned = [thin(line.points, limit) for line in lines]
    points = [point for line in thinned for point in line]
    plot = _Plot(axes, [x for x, _ in points], [y for _, y in points])
    for line, drawn in zip(lines, thinned, strict=True):
        places = [plot.place(point) for point in drawn]
        shapes = [_path("stroke", f"M{'L'.join(places)}")]
        if dots or len(places) == 1:
            shapes.append(_path("dots", "".join(f"M{place}h0" for place in places)))
            shapes.append(_path("dots last", f"M{places[-1]}h0"))
        plot.marks.append(_Mark(f"mark {line.kind}", line.name, shapes))
    return plot.render()


def run_chart(bars: Sequence[Bar], axes: Axes, *, columns: bool) -> Markup:
    """Draw a mark for each run, side by side: columns from zero, or dots near their own range."""
    values = [bar.value for bar in bars]
    # The margin keeps rounding differences between equal dots from filling the whole chart.
    levels = values if columns else [*values, min(values) * 0.995, max(values) * 1.005]
    plot = _Plot(replace(axes, from_zero=columns), None, levels)
    width = SIDE / len(bars)
    half = min(0.36 * width, 0.05 * SIDE)
    every = -(-len(bars) // MAX_BAR_NAMES)
    for index, bar in enumerate(bars):
        middle, top = (index + 0.5) * width, plot.y_of(bar.value)
        shape = _path("dots", f"M{middle:.1f} {top:.1f}h0")
        if columns:
            height = max(SIDE - top, 2.0)  # a value of zero stays visible
            shape = _rect("", middle - half, SIDE - height, 2 * half, height)
        said = f"run {bar.name}: {axes.y_format(bar.value)}" + (f", {bar.note}" if bar.note else "")
        plot.marks.append(_Mark(f"mark {bar.kind}", said, [shape]))
        if index % every == 0:
            plot.add_word("x", bar.name, left=middle)
        if bar.note and len(bars) <= MAX_BAR_NOTES:
            plot.add_word("note", bar.note, left=middle, bottom=0.03 * SIDE)
    return plot.render()


class _Mark(NamedTuple):
    kind: str
    name: str
    shapes: list[Shape]


class _Word(NamedTuple):
    kind: str
    text: str
    place: str
    """The place as CSS."""


def _path(kind: str, points: str) -> Shape:
    return ("path", {"class": kind, "d": points})


def _rect(kind: str, x: float, y: float, width: float, height: float) -> Shape:
    sides = {"x": x, "y": y, "width": width, "height": height}
    return ("rect", {"class": kind} | {name: f"{value:.1f}" for name, value in sides.items()})


class _Plot:
    """The frame of a chart, to which marks are added: grid, numbers at the axes, guides, key."""

    def __init__(self, axes: Axes, xs: Sequence[float] | None, ys: Sequence[float]) -> None:
        """Frame the points `xs`, `ys`; without `xs` the caller names the places on the x axis."""
        self.axes = axes
        self.rules: list[Shape] = []
        self.marks: list[_Mark] = []
        self.words: list[_Word] = []
        self.labelled = [guide for guide in axes.guides if guide.label]
        # The frame also holds a target that no run has come near.
        levels = [*ys, *_ends(axes.guides, "y"), *([0.0] if axes.from_zero else [])]
        y_ticks = ticks(min(levels), max(levels))
        self.y_of = _scale(y_ticks, SIDE, 0.0)
        for y in y_ticks:
            self.add_word("y", axes.y_format(y), bottom=SIDE - self.y_of(y))
            self.rules.append(_path("grid", f"M0 {self.y_of(y):.1f}H{SIDE:g}"))
        self.x_of: Callable[[float], float] = float
        if xs is not None:
            x_ticks = ticks(0.0, max([*xs, *_ends(axes.guides, "x")]))
            self.x_of = _scale(x_ticks, 0.0, SIDE)
            for x in x_ticks:
                self.add_word("x", (axes.x_format or short_count)(x), left=self.x_of(x))
        self.rules.extend(map(self._guide, axes.guides))

    def place(self, point: tuple[float, float]) -> str:
        """Return the drawing's coordinates of a point."""
        return f"{self.x_of(point[0]):.1f} {self.y_of(point[1]):.1f}"

    def add_word(self, kind: str, text: str, *, left: float | None = None, bottom: float | None = None) -> None:
        """Put a word at a place of the drawing, in units of `SIDE` from the left and from the bottom."""
        edges = {"left": left, "bottom": bottom}
        places = [f"{edge}:{100 * at / SIDE:.1f}%" for edge, at in edges.items() if at is not None]
        self.words.append(_Word(kind, text, ";".join(places)))

    def render(self) -> Markup:
        """Return the chart, the title of its x axis and its key."""
        return render_part(TEMPLATES / "chart.html", plot=self)

    def _guide(self, guide: Guide) -> Shape:
        kind, across = f"guide {guide.kind}", guide.along == "x"
        scale = self.x_of if across else self.y_of
        low = scale(guide.low)
        if guide.high is None:
            return _path(kind, f"M{low:.1f} 0V{SIDE:g}" if across else f"M0 {low:.1f}H{SIDE:g}")
        start, stop = sorted((low, scale(guide.high)))
        return _rect(kind, start, 0.0, stop - start, SIDE) if across else _rect(kind, 0.0, start, SIDE, stop - start)


def _ends(guides: Sequence[Guide], along: str) -> list[float]:
    return [end for guide in guides if guide.along == along for end in (guide.low, guide.high) if end is not None]


def _scale(marks: Sequence[float], start: float, stop: float) -> Callable[[float], float]:
    low, high = marks[0], marks[-1]
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def thin(points: Points, limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Thin out to at most `limit` points: the means of stretches of equal length, and the last point as it is."""
    if len(points) <= limit:
        return list(points)
    # Rounded up, so that the means and the last point together are at most `limit`.
    size = -(-(len(points) - 1) // (limit - 1))
    stretches = [points[start : min(start + size, len(points) - 1)] for start in range(0, len(points) - 1, size)]
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in stretches] + [points[-1]]


def ticks(low: float, high: float) -> list[float]:
    """Return two to nine round numbers, the first at or below `low` and the last at or above `high`."""
    span = high - low
    # Values that differ by rounding only would give a step near zero.
    if span < 1e-9 * max(abs(low), abs(high), 1e-3):
        span = max(abs(high), 1.0)
    magnitude = 10.0 ** math.floor(math.log10(span / 5))
    # The smallest round step of which five cover the span, or nearly.
    step = magnitude * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * magnitude * 5 >= span * 0.999)
    # The tolerance keeps rounding from adding a tick.
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [index * step for index in range(first, last + 1)]


def short_count(value: float, digits: int = 3) -> str:
    """Format a count as 750, 50k or 1.5M, with at most `digits` digits."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            places = max(0, digits - len(f"{value / size:.0f}"))
            text = f"{value / size:.{places}f}"
            return (text.rstrip("0").rstrip(".") if "." in text else text) + letter
    return f"{value:g}"


def level(value: float) -> str:
    """Format a number at the y axis."""
    return f"{value:,.6g}"
