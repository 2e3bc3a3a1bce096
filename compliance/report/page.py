"""The report of a results folder: one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from compliance.artefact import write_whole
from compliance.convergence.outlook import Outlook
from compliance.convergence.reference_points import Reference
from compliance.log.records import RunRecord
from compliance.log.rules import NEWEST_RULESET
from compliance.report import Format
from compliance.report.charts import Axes, Bar, Guide, Line, level, line_chart, run_chart, short_count
from compliance.report.markup import MAX_FACTS, escaped, fact_list, figure, pair, scrolling_table, section
from compliance.report.published import SOURCE, Published
from compliance.report.results import ReportedRun, Results, load_results
from compliance.report.summary import (
    MAX_SENTENCE,
    as_csv,
    as_json,
    as_markdown,
    count,
    duration,
    fraction,
    heading,
    rate,
    statements,
)
from compliance.report.time_section import time_section
from console.text import counted, visible

STYLE_SHEET = Path(__file__).with_name("report.css")

MARKS = {"good": ("✓", "good"), "warn": ("!", "to look at"), "bad": ("✕", "not good"), "plain": ("·", "")}
"""Sign of a kind of statement, and how it is read out."""
MAX_FINDINGS = 200
MAX_WARNINGS = 20
MAX_DIFFERENCES = 16


def write_report(folder: Path, ruleset: str = NEWEST_RULESET, format: Format = "html", out: Path | None = None) -> Path:
    """Write the report of `folder` to `out`, or else to report.<format> in it, and return its path.

    Raises:
        ValueError: no runs in the folder, or the file cannot be written.
    """
    path = out or folder / f"report.{format}"
    write_whole(path, render_as(load_results(folder, ruleset), format))
    return path


def render_as(results: Results, format: Format) -> str:
    """The report in any of its formats."""
    renderers = {"html": render, "markdown": as_markdown, "json": as_json, "csv": as_csv}
    return renderers[format](results)


def render(results: Results) -> str:
    """The report as HTML. Everything from the files is escaped, and a policy forbids the page to run or load anything."""
    footer = (
        f"Checked with the official compliance checker (mlperf-logging), ruleset {escaped(results.ruleset)}, and "
        f"this repository's stricter rules. {escaped(results.notice)}"
    )
    body = [
        _header(results),
        _figures(results),
        section("In short", _statements(results)),
        section("Masked-LM accuracy", _accuracy(results)),
        section("Runs", pair(_times(results), _convergence(results)), _table(results), _warnings(results.runs)),
        section("Findings", _findings(results)),
        time_section(results),
        section("Among published results", _published(results)),
        section(
            "System", fact_list({name.replace("_", " "): value for name, value in results.description.items() if value})
        ),
        section("Environment and configuration", _configuration(results)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        # Nothing may be loaded and nothing run; the style sheet stands in the page itself.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(heading(results))}</title><style>{STYLE_SHEET.read_text(encoding='utf-8')}</style></head>\n"
        "<body>\n" + "\n".join(filter(None, body)) + f"<footer>{footer}</footer>\n</body></html>\n"
    )


def _header(results: Results) -> str:
    run = results.shown.metrics.run or RunRecord()
    recipe, batch, processes = results.shown.log.header.get("recipe"), results.global_batch_size, run.world_size
    header = results.shown.log.header
    # "1" where the log does not say: then nothing is said of it.
    tensor, pipeline = (header.get(f"config.parallel.{name}", "1") for name in ("tensor", "pipeline"))
    pieces = [
        f"recipe {recipe}" if recipe else "",
        f"{results.division} division" if results.division else "",
        f"{results.accelerators} x {results.accelerator}" if results.accelerators else "",
        f"{processes} process{'es' if processes != 1 else ''}" if processes and not results.accelerators else "",
        f"tensor parallel {tensor}" if tensor != "1" else "",
        f"pipeline parallel {pipeline}" if pipeline != "1" else "",
        f"global batch size {batch:,}" if batch else "",
        f"started {run.started.replace('T', ' ')[:16]}" if run.started else "",
    ]
    return (
        f"<header><h1>{escaped(heading(results))}</h1>"
        f'<p class="subtitle">{escaped(", ".join(filter(None, pieces)), MAX_SENTENCE)}</p>'
        f'<p class="notice">{escaped(results.notice)}</p></header>'
    )


def _figures(results: Results) -> str:
    """The few numbers to see first; the time is the score where there is one."""
    shown, kept = results.shown, [run for run in results.valid if run.number not in results.dropped]
    over = f"mean of {counted(len(kept), 'run')}, fastest and slowest dropped"
    # The score after scaling, as the rules count it.
    seconds = results.scaled_seconds
    if not results.dropped:
        # Without a score one run stands for the folder; after two lost runs, none may.
        seconds, over = (None, "no score") if results.lost > 1 else (shown.logged.seconds, f"run {shown.number}")
    # Before there is a score, the run that is shown.
    rates = [run.logged.sequences_per_s for run in kept or [shown] if run.logged.sequences_per_s]
    mean_rate = sum(rates) / len(rates) if rates else None
    each = "evaluations included"
    if mean_rate and results.accelerators:
        each = f"{rate(mean_rate / results.accelerators)} an accelerator, {each}"
    aim = shown.logged.target
    target = "no target logged" if aim is None else f"target {fraction(aim)}, run {shown.number}"
    number, valid = len(results.runs), sum(run.verdict.passed for run in results.runs)
    official = sum(run.verdict.official == "pass" for run in results.runs)
    figures = [
        ("Time to train", duration(seconds), over),
        ("Sequences per second", rate(mean_rate), each),
        ("Masked-LM accuracy", fraction(shown.logged.accuracy), target),
        ("Valid runs", f"{valid} of {number}", f"official checker: {official} of {number}"),
    ]
    if results.convergence is not None and results.convergence.reference is not None:
        figures.append(("Convergence", *_convergence_figure(results.convergence, results.convergence.reference)))
    item = "<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>".format
    # The values are numbers and words of this program; a note may hold a name out of a file.
    return f'<dl class="figures">{"".join(item(name, value, escaped(note)) for name, value, note in figures)}</dl>'


def _convergence_figure(outlook: Outlook, found: Reference) -> tuple[str, str]:
    said = {"pass": "passes", "scaled": "passes", "fail": "fails", "unfinished": "open"}.get(outlook.verdict, "-")
    scaled = f"score x {outlook.scaling:.4f}, " if outlook.verdict == "scaled" else ""
    mean = f"mean {short_count(outlook.mean)}, " if outlook.mean else ""
    return said, f"{scaled}{mean}minimum {short_count(found.minimum)} sequences"


def _statements(results: Results) -> str:
    items = []
    for item in statements(results):
        sign, said = MARKS[item.kind]
        # For who has the page read out, to whom a sign says nothing.
        spoken = f'<span class="spoken">{said}: </span>' if said else ""
        items.append(
            f'<li class="{item.kind}"><i aria-hidden="true">{sign}</i><div>{spoken}<strong>{escaped(item.title)}</strong> '
            f"<p>{escaped(item.text, MAX_SENTENCE)}</p></div></li>"
        )
    return f'<ul class="statements">{"".join(items)}</ul>'


def _accuracy(results: Results) -> str:
    """Accuracy against sequences of all runs, with the target and the reference's sequences to it."""
    drawn = [run for run in results.runs if run.logged.curve]
    lines = [Line(f"run {run.number}, {run.outcome}", run.logged.curve, run.outcome) for run in drawn]
    if not lines:
        return ""
    targets = {run.logged.target for run in results.runs if run.logged.target is not None}
    # Runs of different targets have no line in common.
    guides = [Guide("target", f"target {target:g}", target) for target in targets if len(targets) == 1]
    axes = Axes(
        f"Masked-LM accuracy over sequences trained, {counted(len(lines), 'run')}",
        "sequences trained",
        level,
        [*guides, *_reference_guides(results, "x")],
    )
    note = "Dashed: aborted. Dotted: no valid result." if any(line.kind != "valid" for line in lines) else ""
    return f'<div class="wide">{figure("", line_chart(lines, axes, dots=True), note)}</div>'


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


def _times(results: Results) -> str:
    """Time to train of every run, with the olympic mean."""
    timed = [(run, run.logged.seconds) for run in results.runs if run.logged.seconds is not None]
    if not timed:
        return ""
    longest = max(seconds for _, seconds in timed)
    # From the same bound on as in `duration`, so that the chart and its guide speak of one unit.
    unit, size = ("minutes", 60.0) if longest >= 120 else ("seconds", 1.0)
    bars = []
    for run, seconds in timed:
        dropped = results.dropped.get(run.number, "")
        # Of the valid ones, the two that the score drops are hollow.
        kind = run.outcome if run.outcome != "valid" else "dropped" if dropped else "valid"
        bars.append(Bar(str(run.number), seconds / size, kind, dropped or ("" if kind == "valid" else kind)))
    score = results.score_seconds
    guides = [] if score is None else [Guide("mean", f"mean {duration(score)} without the hollow ones", score / size)]
    axes = Axes(f"Time to train of {counted(len(bars), 'run')} in {unit}", "run", level, guides)
    return figure(f"Time to train, {unit}", run_chart(bars, axes, columns=True))


def _convergence(results: Results) -> str:
    """Sequences to the target of every run, against the reference."""
    samples = [(run, run.logged.converged_samples()) for run in results.runs]
    bars = [Bar(str(run.number), float(taken), run.outcome) for run, taken in samples if taken is not None]
    if not bars:
        return ""
    mean = results.convergence.mean if results.convergence else None
    guides = [*_reference_guides(results, "y"), *([Guide("mean", f"mean {short_count(mean)}", mean)] if mean else [])]
    description = f"Sequences to the target of {counted(len(bars), 'run')}"
    axes = Axes(description, "run", lambda taken: short_count(taken, 4), guides)
    missing = len(samples) - len(bars)
    note = f"{counted(missing, 'run')} did not reach the target." if missing else ""
    return figure("Sequences to the target", run_chart(bars, axes, columns=False), note)


def _table(results: Results) -> str:
    names = ("run", "official", "ours", "time to train", "initialisation", "accuracy", "target")
    head = [*names, "sequences", "sequences/s", "in the score"]
    rows = []
    for run in results.runs:
        in_score = results.dropped.get(run.number, "yes" if run in results.valid and results.dropped else "-")
        values = (
            duration(run.logged.seconds),
            duration(run.logged.init_seconds),
            fraction(run.logged.accuracy),
            fraction(run.logged.target),
            count(run.logged.train_samples),
            rate(run.logged.sequences_per_s),
            in_score if in_score in ("yes", "-") else f"no, {in_score}",
        )
        verdicts = ((run.verdict.official, run.verdict.official), (run.outcome, run.outcome))
        said = "".join(f'<td class="verdict {kind}">{word}</td>' for kind, word in verdicts)
        rows.append([f'<th scope="row">{run.number}</th>{said}', *(f"<td>{value}</td>" for value in values)])
    return scrolling_table("All runs", head, rows)


def _warnings(runs: Iterable[ReportedRun]) -> str:
    """List what the runs warned of while they ran."""
    said = [(run.number, warning) for run in runs for warning in run.metrics.warnings]
    item = "<li>Run {}, step {}: {}</li>".format
    items = [item(number, warning.step, escaped(warning.text)) for number, warning in said[:MAX_WARNINGS]]
    if len(said) > MAX_WARNINGS:
        items.append(f"<li>and {len(said) - MAX_WARNINGS} more</li>")
    return f'<h3>Warnings while it ran</h3><ul class="plain">{"".join(items)}</ul>' if items else ""


def _findings(results: Results) -> str:
    found = results.findings
    if not found:
        return ""
    items = []
    for about, finding in found[:MAX_FINDINGS]:
        where = about + (f", line {finding.line}" if finding.line else "")
        source = f", logged at {finding.source}" if finding.source else ""
        items.append(
            f'<li class="{finding.severity}"><div class="where"><b>{finding.severity}</b> {escaped(where)} '
            f"<code>{escaped(finding.key)}</code></div><p>{escaped(finding.sentence)}</p>"
            f'<p class="remedy">{escaped(finding.remedy)} <span>{escaped(finding.rule + source)}</span></p></li>'
        )
    more = f'<p class="aside">and {len(found) - MAX_FINDINGS} more</p>' if len(found) > MAX_FINDINGS else ""
    return f'<ul class="findings">{"".join(items)}</ul>{more}'


def _published(results: Results) -> str:
    placement = results.placement
    if not placement.compared:
        # Without a time to place there are no neighbours, and the statements have said why.
        return ""
    minutes = (results.scaled_seconds or 0.0) / 60
    longest = max([minutes, *(result.minutes for result in (*placement.faster, *placement.slower))])
    rate_each = results.shown.logged.sequences_per_s
    own = Published(
        round="-",
        submitter="this folder, unverified",
        system=results.system,
        accelerator=results.accelerator,
        accelerators=results.accelerators or 0,
        minutes=minutes,
        global_batch_size=results.global_batch_size or 0,
        rate=rate_each / results.accelerators if rate_each and results.accelerators else None,
    )
    shown = (*placement.faster, own, *placement.slower)
    rows = [_published_row(result, longest, ' class="own"' if result is own else "") for result in shown]
    head = ("result", "minutes", "round", "batch", "sequences/s an accelerator")
    left_out = placement.compared - len(placement.faster) - len(placement.slower)
    rest = f" {left_out} further ones are not shown." if left_out else ""
    return (
        f'<div class="standing"><p>{escaped(placement.sentence, MAX_SENTENCE)}{rest}</p>'
        f"{scrolling_table('Neighbours among published results', head, rows)}"
        f'<p class="aside">Source: {escaped(SOURCE)}. Later rounds are not in it.</p></div>'
    )


def _published_row(result: Published, longest: float, attribute: str) -> list[str]:
    bar = f'<div class="length" style="width:{6 * result.minutes / longest:.2f}rem"></div>'
    machine = f"<small>{escaped(f'{result.system}, {result.accelerator}')}</small>"
    return [
        f'<th{attribute} scope="row">{escaped(result.submitter)}{machine}</th>',
        f'<td class="minutes">{bar}{result.minutes:.2f}</td>',
        f"<td>{escaped(result.round)}</td>",
        f"<td>{result.global_batch_size:,}</td>",
        f"<td>{rate(result.rate)}</td>",
    ]


def _configuration(results: Results) -> str:
    header = results.shown.log.header
    settings = {key.removeprefix("config."): value for key, value in header.items() if key.startswith("config.")}
    environment = {key: value for key, value in header.items() if not key.startswith("config.")}
    differing = _differences(results.runs)
    parts = [fact_list(environment)]
    if differing:
        parts.append(f"<h3>What differs between the runs</h3>{fact_list(differing)}")
    if settings:
        number = f"{len(settings)} settings of run {results.shown.number}"
        parts.append(f"<details><summary>{number}</summary>{fact_list(settings)}</details>")
    return "\n".join(filter(None, parts))


def _differences(runs: Sequence[ReportedRun]) -> dict[str, str]:
    """Lines of the logs' heads that are not the same in all runs."""
    # Bounded, as the head of a log may have thousands of lines.
    keys = dict.fromkeys(key for run in runs for key in islice(run.log.header, MAX_FACTS))
    found = {}
    for key in keys:
        # A line that only some of the logs have is a difference too.
        values = list(dict.fromkeys(run.log.header.get(key, "absent") for run in runs))
        if len(values) > 1:
            few = ", ".join(visible(value, 60) for value in values[:10])
            found[key] = few if len(values) <= 10 else f"{len(values)} different values: {few}, ..."
    return dict(islice(found.items(), MAX_DIFFERENCES))
