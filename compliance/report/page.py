"""Report of a results folder as a self-contained HTML page."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rich.filesize import decimal

from compliance.log.metrics import RunRecord
from compliance.report.results import SITE_PART, STEP_PARTS, ReportedRun, Results, breakdown
from compliance.report.summary import as_csv, as_json, as_markdown, count, fraction, heading, rate, statements, table
from console.html.charts import Axes, Bar, Guide, Line, Points, level, line_chart, run_chart, short_count
from console.html.page import render_page
from console.text import counted, duration

TEMPLATE = Path(__file__).with_name("report.html")

PART_CLASSES = dict(zip(STEP_PARTS, ("compute", "reduce", "update", "data-wait"), strict=True))
PART_CLASSES |= {SITE_PART: "site-wait", "evaluation": "evaluation", "other": "other"}

RUN_COLOURS = ("compute", "reduce", "update", "data-wait", "evaluation")
"""Colours of the best runs of an experiment, the best first. All other runs have the colour "other"."""

# Larger values come from a diverged run or a wrong file. They are not drawn, because they would flatten all other curves.
MAX_VALUE = 1e8

MAX_BARS = 12


class Figure(NamedTuple):
    title: str
    chart: str
    note: str = ""


def render_as(results: Results, format: str) -> str:
    renderers = {"html": render, "markdown": as_markdown, "json": as_json, "csv": as_csv}
    return renderers[format](results)


def render(results: Results) -> str:
    header, description, run_charts = results.shown.log.header, {}, []
    columns, *cells = table(results)
    if not results.is_experiment:
        description = {name.replace("_", " "): value for name, value in results.description.items() if value}
        run_charts = [chart for chart in (_times(results), _convergence(results)) if chart]
        columns = (*columns, "in the score")
        cells = [(*row, _in_score(results, run)) for row, run in zip(cells, results.runs, strict=True)]
    rates = _curve(results, "Sequences per second", "sequences_per_s")
    losses = _curve(results, "Training loss", "loss")
    bars, bar_key = _parts(results.runs)
    return render_page(
        TEMPLATE,
        results=results,
        title=heading(results),
        subtitle=_subtitle(results),
        figures=_figures(results),
        statements=statements(results),
        accuracy=_accuracy(results),
        run_charts=run_charts,
        run_columns=columns,
        run_cells=cells,
        warnings=[(run.number, entry) for run in results.runs for entry in run.metrics.warnings],
        curves=[curve for curve in (rates, losses) if curve],
        bars=bars,
        bar_key=bar_key,
        planned=_against_plan(results.shown),
        part_classes=PART_CLASSES,
        duration=duration,
        description=description,
        environment={key: value for key, value in header.items() if not key.startswith(("config.", "note"))},
        settings={key.removeprefix("config."): value for key, value in header.items() if key.startswith("config.")},
    )


def _subtitle(results: Results) -> str:
    run = results.shown.metrics.run or RunRecord()
    header, batch = results.shown.log.header, results.global_batch_size
    recipe, processes = header.get("recipe"), run.world_size
    parallel = {kind: header.get(f"config.parallel.{kind}", "1") for kind in ("tensor", "pipeline")}
    pieces = [
        f"recipe {recipe}" if recipe else "",
        f"{results.division} division" if results.division and not results.is_experiment else "",
        f"{results.accelerators} x {results.accelerator}" if results.accelerators else "",
        f"{processes} process{'es' if processes != 1 else ''}" if processes and not results.accelerators else "",
        *(f"{kind} parallel {size}" for kind, size in parallel.items() if size != "1"),
        f"global batch size {batch:,}" if batch else "",
        f"started {run.started.replace('T', ' ')[:16]}" if run.started else "",
    ]
    return ", ".join(filter(None, pieces))


def _figures(results: Results) -> list[tuple[str, str, str]]:
    """Return the name, value and note of each key figure."""
    if results.is_experiment:
        return _experiment_figures(results)
    # A mean over runs with different settings has no meaning, so use no runs for it.
    means = [] if results.differing else results.valid
    shown, kept = results.shown, [run for run in means if run.number not in results.dropped]
    if results.dropped:
        seconds, over = results.scaled_seconds, f"mean of {counted(len(kept), 'run')}, fastest and slowest dropped"
    else:
        # Without a score, show the time of one run. If more than one run is invalid, show no time.
        seconds, over = (
            (None, "no score") if results.invalid_count > 1 else (shown.logged.seconds, f"run {shown.number}")
        )
    rates = [run.logged.sequences_per_s for run in kept or [shown] if run.logged.sequences_per_s]
    mean_rate = sum(rates) / len(rates) if rates else None
    each = "evaluations included"
    if mean_rate and results.accelerators:
        each = f"{rate(mean_rate / results.accelerators)} per accelerator, {each}"
    target = shown.logged.target
    aim = "no target logged" if target is None else f"target {fraction(target)}, run {shown.number}"
    number, valid = len(results.runs), sum(run.verdict.passed for run in results.runs)
    official = sum(run.verdict.official == "pass" for run in results.runs)
    return [
        ("Time to train", duration(seconds), over),
        ("Sequences per second", rate(mean_rate), each),
        ("Masked-LM accuracy", fraction(shown.logged.accuracy), aim),
        ("Valid runs", f"{valid} of {number}", f"official checker: {official} of {number}"),
    ]


def _experiment_figures(results: Results) -> list[tuple[str, str, str]]:
    shown, outcomes = results.shown, Counter(run.outcome for run in results.runs)
    samples, accuracy = shown.best
    error = f"± {shown.best_error:.4f}, " if shown.best_error is not None else ""
    best = f"{error}run {shown.number} after {count(samples)} sequences" if samples else "no evaluation"
    of_run = f"run {shown.number}, evaluations included"
    return [
        ("Best accuracy", fraction(accuracy), best),
        ("Training time", duration(shown.logged.seconds), of_run),
        ("Sequences per second", rate(shown.logged.sequences_per_s), of_run),
        ("Runs", str(len(results.runs)), ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())),
    ]


def _lines(results: Results, points_of: Callable[[ReportedRun], Points]) -> list[Line]:
    """Return a line for each run that has points. The best runs of an experiment have colours of their own."""
    ranked = results.ranked if results.is_experiment and len(results.runs) > 1 else []
    colours = {run.log.path: colour for run, colour in zip(ranked, RUN_COLOURS, strict=False)}
    return [
        Line(
            f"run {run.number}, {run.outcome}",
            points,
            run.outcome,
            colours.get(run.log.path, "other" if ranked else ""),
        )
        for run in results.runs
        if (points := points_of(run))
    ]


def _accuracy(results: Results) -> Figure | None:
    """Plot the accuracy of all runs over sequences, with the target and the reference's sequences to the target."""
    lines = _lines(results, lambda run: run.logged.curve)
    if not lines:
        return None
    targets = {run.logged.target for run in results.runs if run.logged.target is not None}
    guides = [Guide("target", f"target {target:g}", target) for target in targets if len(targets) == 1]
    description = f"Masked-LM accuracy over sequences trained, {counted(len(lines), 'run')}"
    axes = Axes(description, "sequences trained", level, [*guides, *_reference_guides(results, "x")])
    is_noted = {"aborted", "invalid"} & {line.kind for line in lines}
    note = "Dashed: aborted. Dotted: no valid result." if is_noted else ""
    return Figure("", line_chart(lines, axes, dots=True), note)


def _reference_guides(results: Results, along: Literal["x", "y"]) -> list[Guide]:
    found = results.convergence.reference if results.convergence else None
    if found is None:
        return []
    low, high = found.mean - found.stdev, found.mean + found.stdev
    spread = f"reference {short_count(found.mean)} ± {short_count(found.stdev)} sequences"
    return [
        Guide("band", spread, low, high, along),
        Guide("minimum", f"minimum of the mean {short_count(found.minimum)}", found.minimum, along=along),
    ]


def _times(results: Results) -> Figure | None:
    """Plot the time to train of every run, with the Olympic mean."""
    timed = [(run, run.logged.seconds) for run in results.runs if run.logged.seconds is not None]
    if not timed:
        return None
    # `duration` formats the mean and changes to minutes at 120 s. Do the same here, so that the axis has the same unit.
    unit, size = ("minutes", 60.0) if max(seconds for _, seconds in timed) >= 120 else ("seconds", 1.0)
    bars = []
    for run, seconds in timed:
        dropped = results.dropped.get(run.number, "")
        kind = run.outcome if run.outcome != "valid" else "dropped" if dropped else "valid"
        bars.append(Bar(str(run.number), seconds / size, kind, dropped or ("" if kind == "valid" else kind)))
    score = results.score_seconds
    guides = [] if score is None else [Guide("mean", f"mean {duration(score)} without the hollow bars", score / size)]
    axes = Axes(f"Time to train of {counted(len(bars), 'run')} in {unit}", "run", level, guides)
    return Figure(f"Time to train, {unit}", run_chart(bars, axes, columns=True))


def _convergence(results: Results) -> Figure | None:
    """Plot the number of sequences that each run needed to reach the target, and the reference's number."""
    samples = [(run, run.logged.converged_samples()) for run in results.runs]
    bars = [Bar(str(run.number), float(taken), run.outcome) for run, taken in samples if taken is not None]
    if not bars:
        return None
    mean = results.convergence.mean if results.convergence else None
    guides = [*_reference_guides(results, "y"), *([Guide("mean", f"mean {short_count(mean)}", mean)] if mean else [])]
    description = f"Sequences to the target of {counted(len(bars), 'run')}"
    axes = Axes(description, "run", lambda taken: short_count(taken, 4), guides)
    missing = len(samples) - len(bars)
    note = f"{counted(missing, 'run')} did not reach the target." if missing else ""
    return Figure("Sequences to the target", run_chart(bars, axes, columns=False), note)


def _in_score(results: Results, run: ReportedRun) -> str:
    dropped = results.dropped.get(run.number)
    return f"no, {dropped}" if dropped else "yes" if run in results.valid and results.dropped else "-"


def _curve(results: Results, title: str, key: str) -> Figure | None:
    lines = _lines(
        results,
        lambda run: [(step.samples, each) for step in run.metrics.steps if abs(each := getattr(step, key)) < MAX_VALUE],
    )
    if not lines:
        return None
    description = f"{title} over sequences trained, {counted(len(lines), 'run')}"
    axes = Axes(description, "sequences trained", level, from_zero=key != "loss")
    skipped = sum(step.skipped_steps for run in results.runs for step in run.metrics.steps) if key == "loss" else 0
    note = f"{counted(skipped, 'step')} skipped: a gradient was not finite." if skipped > 0 else ""
    return Figure(title, line_chart(lines, axes), note)


def _parts(runs: Sequence[ReportedRun]) -> tuple[dict[str, dict[str, float]], list[tuple[str, str]]]:
    """Return a bar for each run, or a single bar if there are many runs, and the legend with shares and times."""
    parts = {run.number: seconds for run in runs if (seconds := breakdown(run))}
    if not parts:
        return {}, []
    totals = {
        name: sum(seconds.get(name, 0.0) for seconds in parts.values())
        for name in PART_CLASSES
        if any(name in seconds for seconds in parts.values())
    }
    rows = {f"run {number}": seconds for number, seconds in parts.items()}
    steps = sum(max(step.step for step in run.metrics.steps) - run.first_step for run in runs if run.number in parts)
    whole = sum(totals.values())
    key = []
    for name, seconds in totals.items():
        each = f", {1000 * seconds / steps:.3g} ms a step" if name in (*STEP_PARTS, SITE_PART) and steps > 0 else ""
        if name == SITE_PART:
            sent = sum(step.site_bytes for run in runs if run.number in parts for step in run.metrics.steps)
            each += f", {decimal(sent)} sent between them"
        key.append((PART_CLASSES[name], f"{name} {100 * seconds / whole:.1f} %{each}"))
    return rows if len(rows) <= MAX_BARS else {f"{counted(len(rows), 'run')}": totals}, key


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
