"""The section of the report on where the time went: figures of the step metrics, and the parts of the time to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from compliance.report.results import STEP_PARTS, ReportedRun, Results, breakdown, numbers, steps_taken
from compliance.report.summary import duration
from console.charts import Axes, Line, level, line_chart, stacked_chart
from console.text import counted

if TYPE_CHECKING:
    from markupsafe import Markup

PART_CLASSES = dict(zip(STEP_PARTS, ("compute", "reduce", "update", "data-wait"), strict=True)) | {
    "evaluation": "evaluation",
    "other": "other",
}
"""Classes of the style sheet for the parts of a run."""

# Values beyond these bounds come from a diverged run or a wrong file; they would flatten all other curves.
MAX_LOSS = 1e6
MAX_STEP_MS = 1e9
MAX_RATE = 1e12

MAX_BARS = 12
MIN_LABELLED_SHARE = 12
"""Smallest share of a bar in per cent whose label fits into it, also on a telephone."""


class Figure(NamedTuple):
    """A chart with a title above and a note below."""

    title: str
    chart: Markup
    note: str = ""


class BarPart(NamedTuple):
    """A part of a bar: its class, its share in per cent, the text that a pointer shows, and the label in it."""

    kind: str
    share: str
    title: str
    label: str


class TimeSection(NamedTuple):
    """The parts of the section; all are empty if no run has step records."""

    curves: list[Figure]
    bars: list[tuple[str, list[BarPart]]]
    key: list[tuple[str, str]]
    timeline: Figure | None
    planned: list[tuple[str, ...]]


def time_section(results: Results) -> TimeSection:
    """Return the whole section."""
    rates = _curve(results.runs, "Sequences per second", "sequences_per_s", lambda value: 0 <= value < MAX_RATE)
    losses = _curve(results.runs, "Training loss", "loss", lambda value: abs(value) < MAX_LOSS)
    bars, key = _parts(results.runs)
    curves = [curve for curve in (rates, losses) if curve]
    return TimeSection(curves, bars, key, _timeline(results.shown), _against_plan(results.shown))


def _curve(runs: Iterable[ReportedRun], title: str, key: str, drawable: Callable[[float], bool]) -> Figure | None:
    lines = []
    for run in runs:
        # Only a record with both numbers has two.
        pairs = [numbers([step], "samples") + numbers([step], key) for step in run.metrics["step"]]
        points = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2 and pair[0] >= 0 and drawable(pair[1])]
        if points:
            lines.append(Line(f"run {run.number}, {run.outcome}", points, run.outcome))
    if not lines:
        return None
    description = f"{title} over sequences trained, {counted(len(lines), 'run')}"
    axes = Axes(description, "sequences trained", level, from_zero=key != "loss")
    skipped = sum(sum(numbers(run.metrics["step"], "skipped_steps")) for run in runs) if key == "loss" else 0
    note = f"{skipped:,.0f} steps were skipped: a gradient was not finite." if skipped > 0 else ""
    return Figure(title, line_chart(lines, axes), note)


def _parts(runs: Sequence[ReportedRun]) -> tuple[list[tuple[str, list[BarPart]]], list[tuple[str, str]]]:
    """A bar for each run, or one for all together if they are many, and the key with shares and times."""
    parts = {run.number: seconds for run in runs if (seconds := breakdown(run))}
    if not parts:
        return [], []
    totals = {name: sum(seconds[name] for seconds in parts.values()) for name in PART_CLASSES}
    rows = {f"run {number}": seconds for number, seconds in parts.items()}
    shown = rows if len(rows) <= MAX_BARS else {f"{len(rows)} runs": totals}
    steps = sum(steps_taken(run) for run in runs if run.number in parts)
    whole = sum(totals.values())
    key = []
    for name, seconds in totals.items():
        each = f", {1000 * seconds / steps:.3g} ms a step" if name in STEP_PARTS and steps > 0 else ""
        key.append((PART_CLASSES[name], f"{name} {100 * seconds / whole:.1f} %{each}"))
    return [(name, _bar(seconds)) for name, seconds in shown.items()], key


def _bar(seconds: dict[str, float]) -> list[BarPart]:
    whole = sum(seconds.values())
    parts = []
    for part, taken in seconds.items():
        share = 100 * taken / whole
        label = f"{share:.0f} %" if share >= MIN_LABELLED_SHARE else ""
        parts.append(BarPart(PART_CLASSES[part], f"{share:.2f}", f"{part}: {duration(taken)}", label))
    return parts


def _timeline(run: ReportedRun) -> Figure | None:
    """The parts of a step over the run, stacked; None with fewer than two step records."""
    keys = ("samples", "step_ms", *STEP_PARTS.values())
    rows = [tuple(value for key in keys for value in numbers([step], key)) for step in run.metrics["step"]]
    rows = [row for row in rows if len(row) == len(keys) and min(row) >= 0 and max(row[1:]) < MAX_STEP_MS]
    if len(rows) < 2:
        return None
    xs, wholes, *parts = zip(*rows, strict=True)
    # Parts that overlap may exceed the step.
    rests = tuple(max(0.0, whole - sum(row[2:])) for whole, row in zip(wholes, rows, strict=True))
    lines = [
        Line(name, list(zip(xs, heights, strict=True)), PART_CLASSES[name])
        for name, heights in zip([*STEP_PARTS, "other"], [*parts, rests], strict=True)
    ]
    axes = Axes("Parts of a step over sequences trained, stacked", "sequences trained", level)
    return Figure(f"Parts of a step of run {run.number}, milliseconds", stacked_chart(lines, axes))


def _against_plan(run: ReportedRun) -> list[tuple[str, ...]]:
    """The parts of a step as planned and as measured; empty for a run without a plan."""
    rows = []
    for name, key in [*STEP_PARTS.items(), ("other", "other_ms"), ("step", "step_ms")]:
        # The last plan of the run counts.
        planned, measured = (numbers(run.metrics["plan"][-1:], which) for which in (f"planned_{key}", key))
        if not planned or not measured:
            return []
        difference = f"{measured[0] / planned[0] - 1:+.0%}" if planned[0] > 0 else "-"
        rows.append((name, f"{planned[0]:.3g}", f"{measured[0]:.3g}", difference))
    return rows
