"""Charts for HTML pages.

The drawing has no size of its own: its coordinates are thousandths of the plot, and lines keep their width however the
drawing is stretched (`vector-effect`). A dot is a line of no length with a round cap. Colours come from the style sheet.
A chart is markup, which the template of a page does not escape again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from console.html.page import TEMPLATES, render_page

CHART = TEMPLATES / "chart.html"

SIDE = 1000.0
"""Width and height of the drawing in its own units."""
MAX_POINTS = 240
"""Maximum number of points drawn for one line. A longer line is averaged down to this number."""
MAX_POINTS_A_CHART = 1500
"""Maximum number of points drawn for all lines of a chart without dots. Each line may have 8 points in any case."""
MAX_BAR_NAMES = 12
MAX_BAR_NOTES = 24
"""Maximum number of columns in which a chart writes words. If there are more, each is too narrow for a word."""

Format = Callable[[float], str]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A line of a chart: points with increasing x, and style sheet classes for its kind and its colour.

    The key below the chart names each line that has a colour, unless this colour is "other".
    """

    name: str
    points: Points
    kind: str = "valid"
    colour: str = ""


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
        kind: class in the style sheet, which determines how the guide looks.
        along: the axis on which `low` and `high` lie.
        label: text in the key below the chart.
    """

    kind: str
    label: str
    low: float
    high: float | None = None
    along: Literal["x", "y"] = "y"


@dataclass(frozen=True)
class Axes:
    """Description of a chart, and the titles, number formats and guides of its axes.

    Attributes:
        description: the chart in a sentence, for screen readers.
        from_zero: whether the y axis starts at zero instead of near the lowest value.
        x_format: format of the numbers at the x axis; by default short counts.
    """

    description: str
    x_title: str
    y_format: Format
    guides: Sequence[Guide] = ()
    from_zero: bool = False
    x_format: Format | None = None


def line_chart(lines: Sequence[Line], axes: Axes, *, dots: bool = False) -> Markup:
    """Draw all lines over shared axes. With `dots`, also draw a dot at each point. The last dot is larger."""
    # Limit the points of all lines together. Otherwise the page would become large if there are many runs.
    limit = MAX_POINTS if dots else max(8, min(MAX_POINTS, MAX_POINTS_A_CHART // len(lines)))
    thinned = [thin(line.points, limit) for line in lines]
    x_ticks = ticks(0.0, max([*(x for line in thinned for x, _ in line), *_ends(axes.guides, "x")]))
    frame = _Frame(axes, [y for line in thinned for _, y in line], _scale(x_ticks, 0.0, SIDE))
    frame.names = [((axes.x_format or short_count)(x), frame.x(x)) for x in x_ticks]
    places = [[f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in line] for line in thinned]
    return Markup(render_page(CHART, frame=frame, lines=[*zip(lines, places, strict=True)], bars=(), dots=dots))


def run_chart(bars: Sequence[Bar], axes: Axes, *, columns: bool) -> Markup:
    """Draw a mark for each run, side by side. Columns begin at zero. With dots, the axis covers only the values' range."""
    values = [bar.value for bar in bars]
    # Widen the axis of dots by a margin. Otherwise rounding differences between equal values would fill the whole chart.
    levels = [*values, 0.0] if columns else [*values, min(values) * 0.995, max(values) * 1.005]
    frame = _Frame(axes, levels)
    width = SIDE / len(bars)
    drawn = [(bar, (index + 0.5) * width, frame.y(bar.value)) for index, bar in enumerate(bars)]
    every = -(-len(bars) // MAX_BAR_NAMES)
    frame.names = [(bar.name, middle) for bar, middle, _ in drawn[::every]]
    half = min(0.36 * width, 0.05 * SIDE)
    looks = {"columns": columns, "half": half, "has_notes": len(bars) <= MAX_BAR_NOTES}
    return Markup(render_page(CHART, frame=frame, lines=(), bars=drawn, **looks))


class _Frame:
    """Frame of a chart: the scales of both axes, and the numbers and names beside the axes with their positions."""

    def __init__(self, axes: Axes, ys: Sequence[float], x: Callable[[float], float] = float) -> None:
        # Include the guides, so that the frame shows a target that no run has come near.
        levels = [*ys, *_ends(axes.guides, "y"), *([0.0] if axes.from_zero else [])]
        y_ticks = ticks(min(levels), max(levels))
        self.axes = axes
        self.x, self.y = x, _scale(y_ticks, SIDE, 0.0)
        self.numbers = [(axes.y_format(y), self.y(y)) for y in y_ticks]
        self.names: list[tuple[str, float]] = []


def _ends(guides: Sequence[Guide], along: str) -> list[float]:
    return [end for guide in guides if guide.along == along for end in (guide.low, guide.high) if end is not None]


def _scale(marks: Sequence[float], start: float, stop: float) -> Callable[[float], float]:
    low, high = marks[0], marks[-1]
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def thin(points: Points, limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most `limit` points: the means of groups of neighbouring points, and the last point unchanged."""
    if len(points) <= limit:
        return list(points)
    # Round the size of a group up. Then there are at most `limit` - 1 groups, and the last point makes `limit`.
    size = -(-(len(points) - 1) // (limit - 1))
    stretches = [points[start : min(start + size, len(points) - 1)] for start in range(0, len(points) - 1, size)]
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in stretches] + [points[-1]]


def ticks(low: float, high: float) -> list[float]:
    """Return two to nine round numbers, the first at or below `low` and the last at or above `high`."""
    span = high - low
    # If the values differ only by rounding, the step would be near zero, so choose a wider span.
    if span < 1e-9 * max(abs(low), abs(high), 1e-3):
        span = max(abs(high), 1.0)
    magnitude = 10.0 ** math.floor(math.log10(span / 5))
    # Use the smallest round step such that five steps cover the span, up to a rounding error.
    step = magnitude * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * magnitude * 5 >= span * 0.999)
    # Without the tolerance 1e-9, a rounding error could add a tick.
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [index * step for index in range(first, last + 1)]


def short_count(value: float, digits: int = 3) -> str:
    """Format a count as 750, 50k or 1.5M, with at most `digits` digits."""
    rounded = float(f"{value:.{digits}g}")
    size, letter = next((each for each in ((1e6, "M"), (1e3, "k")) if rounded >= each[0]), (1.0, ""))
    return f"{rounded / size:g}{letter}"


def level(value: float) -> str:
    return f"{value:,.6g}"
