"""Show a run in a terminal: a panel that is redrawn in place."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from console.text import visible

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 60


@dataclass(frozen=True)
class RunView:
    """State of a run, which rich draws as a panel. Empty texts and empty sequences get no row.

    Attributes:
        evaluated_samples: samples trained at the last evaluation.
        time_left: when the target will be reached.
        end: how the run ended, and whether that is a success.
    """

    title: str
    phase: str = ""
    accuracies: Sequence[float] = ()
    target: float | None = None
    evaluated_samples: int = 0
    samples: str = ""
    rate: str = ""
    time_left: str = ""
    outlook: Sequence[str] = ()
    warnings: Sequence[str] = ()
    end: tuple[str, bool] | None = None

    def __rich__(self) -> Panel:
        """Draw the panel."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, text in self.rows():
            table.add_row(name, text)
        return Panel(table, title=styled(self.title), title_align="left")

    def rows(self) -> list[tuple[str, Text]]:
        """Return the name and the text of each row, from top to bottom."""
        rows = [("phase", styled(self.phase))] if self.phase else []
        if self.accuracies:
            number = len(self.accuracies)
            words = f"{self.accuracies[-1]:.4f} {of_target(self.target)}"
            rows.append(("accuracy", styled(f"{words} at {self.evaluated_samples:,} samples, evaluation {number}")))
            rows.append(("", styled(sparkline(self.accuracies), "cyan")))
        facts = [("samples", self.samples), ("rate", self.rate), ("target", self.time_left)]
        # The name stands beside the first line only.
        facts += zip(["outlook", *[""] * len(self.outlook)], self.outlook, strict=False)
        rows += [(name, styled(text)) for name, text in facts if text]
        if self.end:
            rows.append(("end", styled(self.end[0], "green" if self.end[1] else "bold red")))
        return rows + [("!", styled(text, "yellow")) for text in self.warnings]


def live_display(console: Console) -> Live:
    """Return a display that `update(view, refresh=True)` redraws in place. The last view stays on screen."""
    return Live(console=console, auto_refresh=False, vertical_overflow="crop")


def of_target(target: float | None) -> str:
    """Describe the target of an accuracy."""
    return f"of {target:.4f}" if target is not None else "(no target logged)"


def styled(text: str, style: str = "") -> Text:
    """Return a text in one style. Markup and control characters in it have no effect."""
    return Text(visible(text), style=style)


def sparkline(values: Sequence[float]) -> str:
    """Draw the last values as a row of bars between their smallest and largest."""
    shown = values[-_MAX_BARS:]
    low, high = min(shown), max(shown)
    steps = len(_BARS) - 1
    return "".join(_BARS[round(steps * (value - low) / (high - low)) if high > low else 0] for value in shown)
