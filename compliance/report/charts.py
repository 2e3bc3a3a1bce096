"""Charts as HTML: the marks in an SVG that stretches with the page, the words beside them in the page's own type.

The drawing has no size of its own. Its coordinates are thousandths of the plot, lines keep their width however it is
stretched (`vector-effect`), and a dot is a line of no length with a round cap; so one drawing is as sharp and as legible on
a telephone as on a wall. Colours come from the style sheet and follow its scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

SIDE = 1000.0
"""Width and height of the drawing in its own units."""
MAX_POINTS = 240
"""Maximum points drawn of one line; more are averaged."""
MAX_POINTS_A_CHART = 1500
"""Maximum points drawn of all lines of a chart without dots, so that many lines stay legible."""
MAX_RUN_NAMES = 12
MAX_NOTED_RUNS = 24
"""Maximum number of columns that are wide enough for a word in them."""

Format = Callable[[float], str]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A line of a chart: (x, y), x increasing; its kind, a class of the style sheet, says how it is drawn."""

    name: str
    points: Points
    kind: str = "valid"


@dataclass(frozen=True)
class Bar:
    """A column or a dot for what one run measured; `note` is a word in the column, such as "fastest"."""

    name: str
    value: float
    kind: str = "valid"
    note: str = ""


@dataclass(frozen=True)
class Guide:
    """Guide to read a chart against: a line across it, or a band when it has two ends.

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
        description: the chart in a sentence, for those who cannot see it.
        from_zero: whether the y axis starts there, and not near what is drawn.
    """

    description: str
    x_title: str
    y_format: Format
    guides: Sequence[Guide] = ()
    from_zero: bool = False


def line_chart(lines: Sequence[Line], axes: Axes, *, dots: bool = False) -> str:
    """All lines over shared axes; with `dots` also each of their points, the last one larger."""
    # A folder of many runs shares one number of points, or the page would grow with the runs.
    limit = MAX_POINTS if dots else max(8, min(MAX_POINTS, MAX_POINTS_A_CHART // len(lines)))
    thinned = [thin(line.points, limit) for line in lines]
    points = [point for line in thinned for point in line]
    plot = _Plot(axes, [x for x, _ in points], [y for _, y in points])
    for line, places in zip(lines, thinned, strict=True):
        plot.draw_line(line, places, dots or len(places) == 1)
    return plot.html()


def stacked_chart(lines: Sequence[Line], axes: Axes) -> str:
    """An area for each line, one on top of the other; all have the same x, and `kind` is the colour."""
    xs = [x for x, _ in lines[0].points]
    levels = [[0.0] * len(xs)]
    for line in lines:
        levels.append([below + y for below, (_, y) in zip(levels[-1], line.points, strict=True)])
    # All edges have the same x, so that thinning cuts them at the same places and the areas fit.
    edges = [thin(list(zip(xs, level, strict=True))) for level in levels]
    plot = _Plot(replace(axes, from_zero=True), xs, levels[-1])
    # Each area lies between two edges, of which there is one more.
    for line, lower, upper in zip(lines, edges, edges[1:], strict=False):
        corners = " ".join(plot.place(point) for point in [*upper, *reversed(lower)])
        name = f"<title>{escape(line.name)}</title>"
        plot.marks.append(f'<polygon class="{line.kind}" points="{corners}">{name}</polygon>')
    return plot.html()


def run_chart(bars: Sequence[Bar], axes: Axes, *, columns: bool) -> str:
    """Draw a mark for each run, side by side: columns from zero, or dots over a range of their own."""
    values = [bar.value for bar in bars]
    # Dots have a little room on either side, so that equal ones are not drawn apart.
    levels = values if columns else [*values, min(values) * 0.995, max(values) * 1.005]
    plot = _Plot(replace(axes, from_zero=columns), None, levels)
    width = SIDE / len(bars)
    half = min(0.36 * width, 0.05 * SIDE)
    every = -(-len(bars) // MAX_RUN_NAMES)
    for index, bar in enumerate(bars):
        middle, top = (index + 0.5) * width, plot.y_of(bar.value)
        # A column of nothing is still to be seen.
        height = max(SIDE - top, 2.0)
        shape = f'<rect x="{middle - half:.1f}" y="{SIDE - height:.1f}" width="{2 * half:.1f}" height="{height:.1f}"/>'
        if not columns:
            shape = f'<path class="dots" d="M{middle:.1f} {top:.1f}h0"/>'
        said = f"run {bar.name}: {axes.y_format(bar.value)}" + (f", {bar.note}" if bar.note else "")
        plot.marks.append(f'<g class="mark {bar.kind}"><title>{escape(said)}</title>{shape}</g>')
        if index % every == 0:
            plot.word("x", bar.name, left=middle)
        if bar.note and len(bars) <= MAX_NOTED_RUNS:
            plot.word("note", bar.note, left=middle, bottom=0.03 * SIDE)
    return plot.html()


class _Plot:
    """The frame of a chart, to which marks are added: grid, numbers at the axes, guides, key.

    Attributes:
        marks: elements of the drawing.
    """

    def __init__(self, axes: Axes, xs: Sequence[float] | None, ys: Sequence[float]) -> None:
        """Frame the points `xs`, `ys`; without `xs` the x axis is the caller's."""
        self.axes = axes
        self.marks: list[str] = []
        self._words: list[str] = []
        # The ends of the guides too: the frame holds a target that no run has come near.
        levels = [*ys, *_ends(axes.guides, "y"), *([0.0] if axes.from_zero else [])]
        y_ticks = ticks(min(levels), max(levels))
        self.y_of = _scale(y_ticks, SIDE, 0.0)
        for y in y_ticks:
            self.word("y", axes.y_format(y), bottom=SIDE - self.y_of(y))
            self._rule("grid", y=self.y_of(y))
        self.x_of: Callable[[float], float] = float
        if xs is not None:
            x_ticks = ticks(0.0, max([*xs, *_ends(axes.guides, "x")]))
            self.x_of = _scale(x_ticks, 0.0, SIDE)
            for x in x_ticks:
                self.word("x", short_count(x), left=self.x_of(x))
        for guide in axes.guides:
            self._draw_guide(guide)

    def place(self, point: tuple[float, float]) -> str:
        """Return where a point lies in the drawing."""
        return f"{self.x_of(point[0]):.1f} {self.y_of(point[1]):.1f}"

    def word(self, kind: str, text: str, *, left: float | None = None, bottom: float | None = None) -> None:
        """Put a word at a place of the drawing, in units of `SIDE` from the left and from the bottom."""
        edges = {"left": left, "bottom": bottom}
        places = [f"{edge}:{100 * at / SIDE:.1f}%" for edge, at in edges.items() if at is not None]
        self._words.append(f'<span class="{kind}" style="{";".join(places)}">{escape(text)}</span>')

    def draw_line(self, line: Line, points: Points, dots: bool) -> None:
        """Draw `points` as the line `line`."""
        places = [self.place(point) for point in points]
        drawn = f'<path class="stroke" d="M{"L".join(places)}"/>'
        if dots:
            drawn += f'<path class="dots" d="{"".join(f"M{place}h0" for place in places)}"/>'
            drawn += f'<path class="dots last" d="M{places[-1]}h0"/>'  # drawn larger: where the run stands
        self.marks.append(f'<g class="mark {line.kind}"><title>{escape(line.name)}</title>{drawn}</g>')

    def html(self) -> str:
        """The chart, its key, and the title of its x axis."""
        labelled = [guide for guide in self.axes.guides if guide.label]
        labels = [f'<li><i class="guide {guide.kind}"></i>{escape(guide.label)}</li>' for guide in labelled]
        key = f'<ul class="key">{"".join(labels)}</ul>' if labels else ""
        drawing = f'<svg viewBox="0 0 {SIDE:g} {SIDE:g}" preserveAspectRatio="none">{"".join(self.marks)}</svg>'
        return (
            f'<div class="chart" role="img" aria-label="{escape(self.axes.description)}"><div class="plot">{drawing}'
            f'{"".join(self._words)}</div><div class="axis">{escape(self.axes.x_title)}</div></div>{key}'
        )

    def _rule(self, kind: str, *, x: float | None = None, y: float | None = None) -> None:
        path = f"M{x:.1f} 0V{SIDE:g}" if x is not None else f"M0 {y:.1f}H{SIDE:g}"
        self.marks.append(f'<path class="{kind}" d="{path}"/>')

    def _draw_guide(self, guide: Guide) -> None:
        scale = self.x_of if guide.along == "x" else self.y_of
        low = scale(guide.low)
        if guide.high is None:
            self._rule(f"guide {guide.kind}", **{guide.along: low})
            return
        start, stop = sorted((low, scale(guide.high)))
        box = (start, 0.0, stop - start, SIDE) if guide.along == "x" else (0.0, start, SIDE, stop - start)
        place = " ".join(f'{name}="{at:.1f}"' for name, at in zip(("x", "y", "width", "height"), box, strict=True))
        self.marks.append(f'<rect class="guide {guide.kind}" {place}/>')


def _ends(guides: Sequence[Guide], along: str) -> list[float]:
    return [end for guide in guides if guide.along == along for end in (guide.low, guide.high) if end is not None]


def _scale(marks: Sequence[float], start: float, stop: float) -> Callable[[float], float]:
    low, high = marks[0], marks[-1]
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def thin(points: Points, limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Thin out to at most `limit` points: the means of equally long stretches, and the last point as it is."""
    if len(points) <= limit:
        return list(points)
    # Rounded up, so that with the last point no more than `limit` are left.
    size = -(-(len(points) - 1) // (limit - 1))
    stretches = [points[start : min(start + size, len(points) - 1)] for start in range(0, len(points) - 1, size)]
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in stretches] + [points[-1]]


def ticks(low: float, high: float) -> list[float]:
    """Two to nine round numbers, the first at or below `low` and the last at or above `high`."""
    span = high - low
    # Equal values but for rounding would give a step of about nothing.
    if span < 1e-9 * max(abs(low), abs(high), 1e-3):
        span = max(abs(high), 1.0)  # all points at one height
    magnitude = 10.0 ** math.floor(math.log10(span / 5))
    # The smallest round step of which five span it, or nearly.
    step = magnitude * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * magnitude * 5 >= span * 0.999)
    # A value that is a multiple of the step but for rounding gets no further tick.
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [index * step for index in range(first, last + 1)]


def short_count(value: float, digits: int = 3) -> str:
    """Format a count as 750, 50k or 1.5M, with at most so many digits."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            places = max(0, digits - len(f"{value / size:.0f}"))
            text = f"{value / size:.{places}f}"
            return (text.rstrip("0").rstrip(".") if "." in text else text) + letter
    return f"{value:g}"


def level(value: float) -> str:
    """Format a number at the y axis."""
    return f"{value:,.6g}"
