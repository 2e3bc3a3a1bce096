"""A run in a terminal: rows of names and values, a curve as bars, times as a clock shows them."""

import math
from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from console.text import visible

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS = 60

Row = tuple[str, RenderableType]
"""A name, and what stands beside it: a text as it is, without markup, or something for rich to draw."""


def grid(rows: Iterable[Row]) -> Table:
    """Rows of a name and what stands beside it; what steers a terminal is escaped."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, styled(value) if isinstance(value, str) else value)
    return table


def styled(text: str, style: str = "") -> Text:
    """A text in one colour that holds no markup, whoever wrote it."""
    return Text(visible(text), style=style)


def sparkline(values: Sequence[float]) -> str:
    """The last values as a row of bars between their smallest and largest."""
    shown = values[-_MOST_BARS:]
    low, high = min(shown), max(shown)
    steps = len(_BARS) - 1
    return "".join(_BARS[round(steps * (value - low) / (high - low)) if high > low else 0] for value in shown)


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
