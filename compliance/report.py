"""The report of a results folder: one HTML file that needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from compliance.artefact import write_whole
from compliance.charts import Line, line_chart, stacked_chart
from compliance.results import Results, Run, load_results, numbers
from compliance.rules import NEWEST_RULESET
from compliance.summary import COLUMNS, NOT_A_RESULT, cells, count, duration, fraction, rate, score_line

STYLE_SHEET = Path(__file__).with_name("report.css")

PARTS = (
    ("forward and backward", "compute", "forward_backward_ms"),
    ("exposed communication", "reduce", "reduce_ms"),
    ("update", "update", "update_ms"),
    ("waiting for data", "data-wait", "data_wait_ms"),
)
"""Parts of a step: name, class of the style sheet, key of the metrics."""

MAX_LOSS = 1e6
MAX_STEP_MS = 1e9

STEP_PARTS = {name for name, _, _ in PARTS}


def write_report(folder: Path, ruleset: str = NEWEST_RULESET) -> Path:
    """Write `folder`/report.html from the logs and metrics in it, and return its path.

    Raises:
        ValueError: no runs in the folder, or the file cannot be written.
    """
    path = folder / "report.html"
    write_whole(path, render(load_results(folder, ruleset)))
    return path


def render(results: Results) -> str:
    """The report as HTML. Everything from the files is escaped."""
    shown = _shown(results)
    title = f"BERT on {results.system}"
    body = [
        f"<header><h1>{escape(title)}</h1>",
        f'<p class="subtitle">{escape(_subtitle(shown))}</p>',
        f'<p class="notice">{NOT_A_RESULT}</p></header>',
        _figures(results),
        _section("Runs", _table(results), _findings(results.runs)),
        _section("Accuracy and loss", _curves(results.runs)),
        _section("Where the time went", _breakdown(results.runs), _timeline(shown)),
        _section("System", _facts(_named(results.description))),
        _section("Configuration", _configuration(shown)),
        f"<footer>Checked with the official compliance checker, ruleset {escape(shown.verdict.ruleset)}, and this "
        f"repository's stricter rules. {NOT_A_RESULT}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE_SHEET.read_text(encoding='utf-8')}</style></head>\n"
        "<body>\n" + "\n".join(part for part in body if part) + "\n</body></html>\n"
    )


def _shown(results: Results) -> Run:
    """The run that stands for all: the last valid one, or the last one."""
    return next((run for run in reversed(results.runs) if run.verdict.passed), results.runs[-1])


def _subtitle(run: Run) -> str:
    recipe = run.log.header.get("recipe", "")
    facts = run.metrics["run"][-1] if run.metrics["run"] else {}
    processes = facts.get("world_size")
    pieces = [
        f"recipe {recipe}" if recipe else "",
        f"{run.verdict.division} division" if run.verdict.division else "",
        f"{processes} process{'es' if processes != 1 else ''}" if processes else "",
        f"started {str(facts['started']).replace('T', ' ')}" if facts.get("started") else "",
    ]
    return ", ".join(piece for piece in pieces if piece)


def _section(title: str, *content: str) -> str:
    text = "\n".join(part for part in content if part)
    return f"<section><h2>{title}</h2>\n{text}</section>" if text else ""


def _figures(results: Results) -> str:
    """The four numbers to see first; the time is the score where there is one."""
    shown = _shown(results)
    scored = results.score_seconds is not None
    over = "mean, fastest and slowest dropped" if scored else f"run {shown.number}"
    target = f"target {fraction(shown.target)}" if shown.target is not None else "no target logged"
    valid = sum(run.verdict.passed for run in results.runs)
    figures = (
        ("Time to train", duration(results.score_seconds if scored else shown.seconds), over),
        ("Masked-LM accuracy", fraction(shown.accuracy), target),
        ("Sequences per second", rate(shown.sequences_per_s), f"over {count(shown.samples)} sequences"),
        ("Valid runs", f"{valid} of {len(results.runs)}", f"ruleset {shown.verdict.ruleset}"),
    )
    items = (
        f"<div><dt>{name}</dt><dd>{value}<small>{escape(note)}</small></dd></div>" for name, value, note in figures
    )
    return f'<dl class="figures">{"".join(items)}</dl>'


def _table(results: Results) -> str:
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    rows = []
    for run in results.runs:
        number, outcome, *values = cells(run)
        row = "".join(f"<td>{value}</td>" for value in values)
        rows.append(f'<tr><td>{number}</td><td class="verdict {outcome}">{outcome}</td>{row}</tr>')
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    return f'{table}<p class="soft">{escape(score_line(results))}.</p>'


def _findings(runs: Iterable[Run]) -> str:
    parts = []
    for run in runs:
        if run.verdict.passed:
            continue
        items = "".join(f"<li>{escape(str(finding))}</li>" for finding in run.verdict.findings)
        parts.append(f'<h3>Run {run.number}: {escape(run.verdict.summary)}</h3><ul class="findings">{items}</ul>')
    return "".join(parts)


def _curves(runs: Iterable[Run]) -> str:
    runs = tuple(runs)
    accuracy = [Line(f"run {run.number}", run.accuracies, run.outcome) for run in runs if run.accuracies]
    loss = [Line(f"run {run.number}", points, run.outcome) for run in runs if (points := _loss_points(run))]
    figures = []
    if accuracy:
        targets = {run.target for run in runs}
        chart = line_chart(
            accuracy,
            title="masked-LM accuracy over sequences trained",
            x_title="sequences trained",
            y_format=lambda value: f"{value:.3g}",
            target=targets.pop() if len(targets) == 1 else None,
            markers=True,
        )
        figures.append(f"<figure><h3>Masked-LM accuracy</h3>{chart}</figure>")
    if loss:
        chart = line_chart(
            loss,
            title="training loss over sequences trained",
            x_title="sequences trained",
            y_format=lambda v: f"{v:.3g}",
        )
        figures.append(f"<figure><h3>Training loss</h3>{chart}</figure>")
    dashed = any(not run.verdict.passed for run in runs)
    note = '<p class="aside">Dashed: runs that are no valid result.</p>' if dashed else ""
    return f'<div class="charts">{"".join(figures)}</div>{note}' if figures else ""


def _loss_points(run: Run) -> list[tuple[float, float]]:
    """(sequences trained, loss); a loss that has left all bounds is not drawn."""
    points = [numbers([step], "samples") + numbers([step], "loss") for step in run.metrics["step"]]
    return [(point[0], point[1]) for point in points if len(point) == 2 and point[0] >= 0 and abs(point[1]) < MAX_LOSS]


def breakdown(run: Run) -> dict[str, float]:
    """Seconds of the run by part, in drawing order; empty without step metrics.

    A step entry holds means over the steps since the entry before it. What the steps and evaluations do not account
    for is "other": start of the data pipeline, logging, checkpoints.
    """
    steps = [entry for entry in run.metrics["step"] if numbers([entry], "step")]
    if not steps or run.seconds is None or run.seconds <= 0:
        return {}
    seconds = {name: 0.0 for name, _, _ in PARTS}
    done = 0.0
    for entry in steps:
        taken = max(0.0, float(entry["step"]) - done)
        done += taken
        for name, _, key in PARTS:
            seconds[name] += max(0.0, sum(numbers([entry], key))) / 1000 * taken
    seconds["evaluation"] = max(0.0, sum(numbers(run.metrics["eval"], "eval_s")))
    seconds["other"] = max(0.0, run.seconds - sum(seconds.values()))
    return seconds


def _breakdown(runs: Iterable[Run]) -> str:
    classes = {name: css for name, css, _ in PARTS} | {"evaluation": "evaluation", "other": "other"}
    totals = dict.fromkeys(classes, 0.0)
    steps = 0.0
    rows = []
    for run in runs:
        seconds = breakdown(run)
        whole = sum(seconds.values())
        if not 0 < whole < math.inf:
            continue
        steps += max(numbers(run.metrics["step"], "step"))
        bars = []
        for name, part in seconds.items():
            totals[name] += part
            width = f"{100 * part / whole:.2f}"
            bars.append(
                f'<span class="{classes[name]}" style="width:{width}%" title="{name}: {duration(part)}"></span>'
            )
        rows.append(f'<div class="bar-row"><span>run {run.number}</span><div class="bar">{"".join(bars)}</div></div>')
    if not rows:
        return ""
    whole = sum(totals.values())
    key = []
    for name, part in totals.items():
        each = f", {1000 * part / steps:.3g} ms a step" if name in STEP_PARTS and steps > 0 else ""
        key.append(f'<li><i class="{classes[name]}"></i>{name} {100 * part / whole:.1f} %{each}</li>')
    return f'{"".join(rows)}<ul class="key">{"".join(key)}</ul>'


def _timeline(run: Run) -> str:
    """The parts of a step over the run, stacked; empty with fewer than two step records."""
    keys = ("samples", "step_ms", *(key for _, _, key in PARTS))
    rows = [tuple(value for key in keys for value in numbers([step], key)) for step in run.metrics["step"]]
    rows = [row for row in rows if len(row) == len(keys) and min(row) >= 0 and max(row[1:]) < MAX_STEP_MS]
    if len(rows) < 2:
        return ""
    xs, wholes, *parts = zip(*rows, strict=True)
    rests = tuple(max(0.0, whole - sum(row[2:])) for whole, row in zip(wholes, rows, strict=True))
    names = [(name, css) for name, css, _ in PARTS] + [("other", "other")]
    lines = [
        Line(name, list(zip(xs, heights, strict=True)), css)
        for (name, css), heights in zip(names, [*parts, rests], strict=True)
    ]
    chart = stacked_chart(
        lines,
        title="parts of a step over sequences trained",
        x_title="sequences trained",
        y_format=lambda value: f"{value:.3g}",
    )
    heading = f"<h3>Parts of a step of run {run.number}, milliseconds</h3>"
    return f'<div class="charts timeline"><figure>{heading}{chart}</figure></div>'


def _named(description: dict[str, str]) -> dict[str, str]:
    """The fields of a system description that say something, with readable names."""
    return {name.replace("_", " "): value for name, value in description.items() if value}


def _configuration(run: Run) -> str:
    settings = run.log.header
    if not settings:
        return ""
    return f"<details><summary>{len(settings)} settings of run {run.number}</summary>{_facts(settings)}</details>"


def _facts(facts: dict[str, Any]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{items}</dl>' if items else ""
