"""The section of the report on where the time went: figures of the step metrics, and the parts of the time to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from compliance.report.charts import Axes, Line, level, line_chart, stacked_chart
from compliance.report.markup import escaped, figure, pair, scrolling_table, section
from compliance.report.results import STEP_PARTS, ReportedRun, Results, breakdown, steps_taken
from compliance.report.summary import duration
from console.text import counted

PART_CLASSES = dict(zip(STEP_PARTS, ("compute", "reduce", "update", "data-wait"), strict=True)) | {
    "evaluation": "evaluation",
    "other": "other",
}
"""Parts of a run to classes of the style sheet."""

# Bounds beyond which a run has diverged or a metrics file is wrong; they would flatten all other curves.
MAX_LOSS = 1e6
MAX_STEP_MS = 1e9
MAX_RATE = 1e12

MAX_BARS = 12
MIN_LABELLED_SHARE = 12
"""Per cent of a bar from which on its share fits into it, also on a telephone."""

Curve = tuple[str, str, Callable[[float], bool]]
RATE: Curve = ("Sequences per second", "sequences_per_s", lambda value: 0 <= value < MAX_RATE)
LOSS: Curve = ("Training loss", "loss", lambda value: abs(value) < MAX_LOSS)


def time_section(results: Results) -> str:
    """The whole section; empty where no run has step records."""
    return section(
        "Where the time went",
        pair(_curve(results.runs, RATE), _curve(results.runs, LOSS)),
        _breakdown(results.runs),
        _timeline(results.shown),
        _against_plan(results.shown),
    )


def _curve(runs: Iterable[ReportedRun], curve: Curve) -> str:
    """A figure of the step metrics over sequences trained; what has left all bounds is not drawn."""
    title, key, drawable = curve
    lines = []
    for run in runs:
        points = [(step.samples, value) for step in run.metrics.steps if drawable(value := getattr(step, key))]
        if points:
            lines.append(Line(f"run {run.number}, {run.outcome}", points, run.outcome))
    if not lines:
        return ""
    description = f"{title} over sequences trained, {counted(len(lines), 'run')}"
    axes = Axes(description, "sequences trained", level, from_zero=curve is RATE)
    skipped = sum(step.skipped_steps for run in runs for step in run.metrics.steps) if key == "loss" else 0
    note = f"{skipped:,} steps changed nothing: a gradient was not finite." if skipped > 0 else ""
    return figure(title, line_chart(lines, axes), note)


def _breakdown(runs: Sequence[ReportedRun]) -> str:
    """A bar for each run, or for all together where they are many, and the key with shares and times."""
    parts = {run.number: seconds for run in runs if (seconds := breakdown(run))}
    if not parts:
        return ""
    totals = {name: sum(seconds[name] for seconds in parts.values()) for name in PART_CLASSES}
    rows = {f"run {number}": seconds for number, seconds in parts.items()}
    shown = rows if len(rows) <= MAX_BARS else {f"{len(rows)} runs": totals}
    bars = "".join(_bar(name, seconds) for name, seconds in shown.items())
    # Of the runs with a breakdown, which the bars show.
    steps = sum(steps_taken(run) for run in runs if run.number in parts)
    whole = sum(totals.values())
    key = []
    for name, seconds in totals.items():
        each = f", {1000 * seconds / steps:.3g} ms a step" if name in STEP_PARTS and steps > 0 else ""
        key.append(f'<li><i class="{PART_CLASSES[name]}"></i>{name} {100 * seconds / whole:.1f} %{each}</li>')
    return f'<h3>Parts of the time to train</h3>{bars}<ul class="key">{"".join(key)}</ul>'


def _bar(name: str, seconds: dict[str, float]) -> str:
    whole = sum(seconds.values())
    spans = []
    for part, taken in seconds.items():
        share = 100 * taken / whole
        label = f"{share:.0f} %" if share >= MIN_LABELLED_SHARE else ""
        attributes = f'class="{PART_CLASSES[part]}" style="width:{share:.2f}%" title="{part}: {duration(taken)}"'
        spans.append(f"<span {attributes}>{label}</span>")
    return f'<div class="bar-row"><span>{escaped(name)}</span><div class="bar">{"".join(spans)}</div></div>'


def _timeline(run: ReportedRun) -> str:
    """The parts of a step over the run, stacked; empty with fewer than two step records."""
    keys = ("samples", "step_ms", *STEP_PARTS.values())
    rows = [tuple(getattr(step, key) for key in keys) for step in run.metrics.steps]
    rows = [row for row in rows if max(row[1:]) < MAX_STEP_MS]
    if len(rows) < 2:
        return ""
    xs, wholes, *parts = zip(*rows, strict=True)
    # What the parts leave of the step; parts that overlap may exceed it.
    rests = tuple(max(0.0, whole - sum(row[2:])) for whole, row in zip(wholes, rows, strict=True))
    lines = [
        Line(name, list(zip(xs, heights, strict=True)), PART_CLASSES[name])
        for name, heights in zip([*STEP_PARTS, "other"], [*parts, rests], strict=True)
    ]
    axes = Axes("Parts of a step over sequences trained, stacked", "sequences trained", level)
    title = f"Parts of a step of run {run.number}, milliseconds"
    return f'<div class="wide low">{figure(title, stacked_chart(lines, axes))}</div>'


def _against_plan(run: ReportedRun) -> str:
    """A step beside the one that the run's plan expects, by part; empty for a run without a plan."""
    plan, rows = run.metrics.plan, []
    if plan is None:
        return ""
    for name, key in [*STEP_PARTS.items(), ("other", "other_ms"), ("step", "step_ms")]:
        planned_ms, measured_ms = getattr(plan, f"planned_{key}"), getattr(plan, key)
        difference = f"{measured_ms / planned_ms - 1:+.0%}" if planned_ms > 0 else "-"
        cells = (f"{planned_ms:.3g}", f"{measured_ms:.3g}", difference)
        rows.append([f'<th scope="row">{name}</th>', *(f"<td>{cell}</td>" for cell in cells)])
    title = f"Step of run {run.number} as planned and as measured, milliseconds"
    return f"<h3>{title}</h3>{scrolling_table(title, ('part', 'planned', 'measured', 'difference'), rows)}"
