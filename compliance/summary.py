"""The table of a results folder, for the terminal and for the report."""

from __future__ import annotations

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compliance.results import Results, Run

NOT_A_RESULT = "Not an MLPerf result: not reviewed and not verified by MLCommons."

COLUMNS = ("run", "verdict", "time to train", "accuracy", "target", "sequences", "sequences/s")

_STYLES = {"valid": "green", "aborted": "yellow", "invalid": "red"}


def cells(run: Run) -> tuple[str, ...]:
    """One row of the table, in the order of `COLUMNS`."""
    return (
        str(run.number),
        run.outcome,
        duration(run.seconds),
        fraction(run.accuracy),
        fraction(run.target),
        count(run.samples),
        rate(run.sequences_per_s),
    )


def score_line(results: Results) -> str:
    """What all runs together say, in a sentence."""
    valid = sum(run.verdict.passed for run in results.runs)
    line = f"{valid} of {len(results.runs)} runs valid"
    if results.score_seconds is not None:
        line += f"; mean time to train without the fastest and the slowest: {duration(results.score_seconds)}"
    return line


def print_summary(results: Results) -> None:
    """Print the table: in colour on a terminal, plain text elsewhere."""
    if sys.stdout.isatty():
        table = Table(title=escape(f"BERT on {results.system}"), title_justify="left", box=SIMPLE_HEAD)
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "verdict" else "right")
        for run in results.runs:
            number, outcome, *values = cells(run)
            table.add_row(number, f"[{_STYLES[outcome]}]{outcome}[/]", *values)
        Console().print(table)
    else:
        rows = [COLUMNS, *(cells(run) for run in results.runs)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        print(f"BERT on {results.system}")
        for row in rows:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(score_line(results))
    print(NOT_A_RESULT)


def duration(seconds: float | None) -> str:
    """Seconds up to two minutes, then minutes."""
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.2f} min"


def fraction(value: float | None) -> str:
    """An accuracy as a fraction with four places."""
    return "-" if value is None else f"{value:.4f}"


def count(value: float | None) -> str:
    """An integer with thousands separated."""
    return "-" if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """A rate with about four significant places."""
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
