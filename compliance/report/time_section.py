"""Report section on where the time went: charts of the step metrics, and the parts of the time to train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from compliance.report.results import STEP_PARTS, ReportedRun, Results, breakdown
from console.html.charts import Axes, Line, level, line_chart
from console.text import counted

if TYPE_CHECKING:
    from markupsafe import Markup

PART_CLASSES = dict(zip(STEP_PARTS, ("compute", "reduce", "update", "data-wait"), strict=True)) | {
    "evaluation": "evaluation",
    "other": "other",
}
"""CSS classes for the parts of a run."""

# Values beyond these bounds come from a diverged run or a wrong file, and would flatten all other curves.
MAX_LOSS = 1e6
MAX_RATE = 1e12

MAX_BARS = 12


class Figure(NamedTuple):
    """A chart with a title above and a note below."""

    title: str
    chart: Markup
    note: str = ""


def time_section(results: Results) -> dict[str, Any]:
    """Return the curves, the bars with their legend, and the planned step. All are empty if no run has step records."""
    rates = _curve(results.runs, "Sequences per second", "sequences_per_s", MAX_RATE)
    losses = _curve(results.runs, "Training loss", "loss", MAX_LOSS)
    bars, key = _parts(results.runs)
    curves = [curve for curve in (rates, losses) if curve]
    return {"curves": curves, "bars": bars, "key": key, "planned": _against_plan(results.shown)}


def _curve(runs: Iterable[ReportedRun], title: str, key: str, bound: float) -> Figure | None:
    lines = []
    for run in runs:
        points = [(step.samples, value) for step in run.metrics.steps if abs(value := getattr(step, key)) < bound]
        if points:
            lines.append(Line(f"run {run.number}, {run.outcome}", points, run.outcome))
    if not lines:
        return None
    description = f"{title} over sequences trained, {counted(len(lines), 'run')}"
    axes = Axes(description, "sequences trained", level, from_zero=key != "loss")
    skipped = sum(step.skipped_steps for run in runs for step in run.metrics.steps) if key == "loss" else 0
    note = f"{skipped:,} steps were skipped: a gradient was not finite." if skipped > 0 else ""
    return Figure(title, line_chart(lines, axes), note)


def _parts(runs: Sequence[ReportedRun]) -> tuple[dict[str, dict[str, float]], list[tuple[str, str]]]:
    """Return a bar for each run, or a single bar if there are many runs, and the legend with shares and times."""
    parts = {run.number: seconds for run in runs if (seconds := breakdown(run))}
    if not parts:
        return {}, []
    totals = {name: sum(seconds[name] for seconds in parts.values()) for name in PART_CLASSES}
    rows = {f"run {number}": seconds for number, seconds in parts.items()}
    steps = sum(max(step.step for step in run.metrics.steps) for run in runs if run.number in parts)
    whole = sum(totals.values())
    key = []
    for name, seconds in totals.items():
        each = f", {1000 * seconds / steps:.3g} ms a step" if name in STEP_PARTS and steps > 0 else ""
        key.append((PART_CLASSES[name], f"{name} {100 * seconds / whole:.1f} %{each}"))
    return rows if len(rows) <= MAX_BARS else {f"{len(rows)} runs": totals}, key


def _against_plan(run: ReportedRun) -> list[tuple[str, ...]]:
    """Return the planned and the measured parts of a step; empty for a run without a plan."""
    plan, rows = run.metrics.plan, []
    if plan is None:
        return []
    for name, key in [*STEP_PARTS.items(), ("other", "other_ms"), ("step", "step_ms")]:
        planned, measured = getattr(plan, f"planned_{key}"), getattr(plan, key)
        difference = f"{measured / planned - 1:+.0%}" if planned > 0 else "-"
        rows.append((name, f"{planned:.3g}", f"{measured:.3g}", difference))
    return rows
