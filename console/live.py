"""Show a run in a terminal: a panel of rows redrawn in place, accuracy as bars, times as on a clock."""

import math
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from console.text import visible

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS = 60

Row = tuple[str, RenderableType]
"""A name, and what stands beside it: a text as it is, without markup, or something for rich to draw."""


class LivePanel:
    """A panel that is redrawn in place, when there is news and by no thread of its own, and stays when it is closed."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, title: str, rows: Iterable[Row]) -> None:
        """Redraw it with these rows."""
        self._live.update(panel(title, rows), refresh=True)

    def close(self) -> None:
        """Leave what was shown last on the screen."""
        self._live.stop()


def panel(title: str, rows: Iterable[Row]) -> Panel:
    """Rows of a name and what stands beside it, in a frame; what steers a terminal is escaped."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, styled(value) if isinstance(value, str) else value)
    return Panel(table, title=styled(title), title_align="left")


def accuracy_rows(accuracies: Sequence[float], target: float | None, samples: int) -> list[Row]:
    """The last accuracy against its target, after so many samples, and the curve of all; none before the first."""
    if not accuracies:
        return []
    words = f"{accuracies[-1]:.4f} {of_target(target)} at {samples:,} samples, evaluation {len(accuracies)}"
    return [("accuracy", words), ("", styled(sparkline(accuracies), "cyan"))]


def of_target(target: float | None) -> str:
    """Describe the target of an accuracy."""
    return f"of {target:.4f}" if target is not None else "(no target logged)"


def warning_rows(texts: Iterable[str]) -> list[Row]:
    """Build the rows that show warnings."""
    return [("!", styled(text, "yellow")) for text in texts]


def end_row(text: str, *, is_success: bool) -> tuple[str, Text]:
    """Build the row that says how the run ended."""
    return ("end", styled(text, "green" if is_success else "bold red"))


def styled(text: str, style: str = "") -> Text:
    """A text in one colour that holds no markup, whoever wrote it."""
    return Text(visible(text), style=style)


def sparkline(values: Sequence[float]) -> str:
    """The last values as a row of bars between their smallest and largest."""
    shown = values[-_MOST_BARS:]
    low, high = min(shown), max(shown)  # of the last ones, so that the latest change stays visible
    steps = len(_BARS) - 1
    return "".join(_BARS[round(steps * (value - low) / (high - low)) if high > low else 0] for value in shown)


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours where there are any."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
