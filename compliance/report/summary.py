"""Summarise a results folder in words and tables: for the terminal, Markdown, JSON, CSV, and the page of the report."""

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

from compliance.log.rules import SUBMISSION_RUNS
from compliance.report.results import MIN_RUNS_FOR_SCORE, ReportedRun, Results, breakdown
from console.html.page import MAX_SENTENCE, MAX_TEXT
from console.program import say
from console.text import counted, duration, json_document, visible

COLUMNS = ("run", "official", "ours", "time to train", "accuracy", "target", "sequences", "sequences/s")
EXPERIMENT_COLUMNS = ("run", "status", "best accuracy", "after", "time", "sequences")
RULED_FIELDS = {
    "official", "ours", "dropped", "target", "converged_samples", "verdict", "note", "ruleset", "division",
    "score_seconds", "scaled_score_seconds", "convergence", "beside", "description",
}  # fmt: skip
"""Fields about the rules of MLPerf, which reports on experiments omit."""

MAX_NAMED = 3
MAX_CELL = 40
HEAD_WIDTH = 13
"""Maximum width of a column's name in the printed table. A longer name is broken after dots and underscores."""

Kind = Literal["good", "warn", "bad", "plain"]

_KINDS: dict[str, Kind] = {"pass": "good", "scaled": "warn", "fail": "bad", "unknown": "bad"}


class Statement(NamedTuple):
    """A sentence about the folder. Its kind says whether it is good news, a warning, bad news, or plain (neutral)."""

    kind: Kind
    title: str
    text: str


def statements(results: Results) -> list[Statement]:
    if results.is_experiment:
        return _experiment_statements(results)
    number = len(results.runs)
    official = sum(run.verdict.official == "pass" for run in results.runs)
    passed = sum(run.verdict.passed for run in results.runs)
    warnings = sum(finding.severity == "warning" for _, finding in results.findings)
    beside = [finding for verdict in results.beside for finding in verdict.errors]
    ruleset = f"ruleset {results.ruleset}"
    ours = f"{passed} of {number} logs pass the stricter rules"
    ours += f"; {counted(warnings, 'warning')}." if warnings else "."
    said = [
        Statement(_share(official, number), "Official checker", f"{official} of {number} logs pass, {ruleset}."),
        Statement(_share(passed, number), "Our checks", ours),
        _score_statement(results),
    ]
    if beside:
        first = beside[0]
        text = f"{first.key}: {first.sentence}." if first.key else f"{first.sentence}."
        text += f" {len(beside) - 1} more below." if len(beside) > 1 else ""
        said.insert(2, Statement("bad", "The folder and its description", text))
    if outlook := results.convergence:
        sentence = outlook.sentence[:1].upper() + outlook.sentence[1:]
        said.append(Statement(_KINDS.get(outlook.verdict, "plain"), "Convergence (RCP)", sentence))
    return said


# One failing log is only a warning, because the score drops its run as the slowest. Two failing logs prevent a score.
def _share(part: int, whole: int) -> Kind:
    return "good" if part == whole else "warn" if whole - part == 1 and whole >= MIN_RUNS_FOR_SCORE else "bad"


def _experiment_statements(results: Results) -> list[Statement]:
    best = results.shown
    samples, accuracy = best.best
    if samples is None:
        return [Statement("warn", "Best accuracy", "No run was evaluated yet.")]
    error = f" ± {best.best_error:.4f}" if best.best_error is not None else ""
    record = best.best_record
    perplexity = f", perplexity {record.perplexity:.1f}" if record and math.isfinite(record.perplexity) else ""
    text = f"Run {best.number}: {fraction(accuracy)}{error}{perplexity} after {count(samples)} sequences."
    said = [Statement("good", "Best accuracy", text)]
    place = "config.save_checkpoint"
    if (path := best.log.header.get(place, "None")) != "None":
        # Ignore resumed runs, because they overwrite the saved weights only with better ones.
        writers = [run for run in results.runs if run.log.header.get(place) == path and run.outcome != "resumed"]
        later = [run.number for run in writers if (run.logged.start_ms or 0) > (best.logged.start_ms or 0)]
        text = f"{visible(path, MAX_TEXT)}{f', to which run {later[-1]} wrote later' if later else ''}."
        said.append(Statement("warn" if later else "good", "Best weights", text))
    if any(run.logged.resumed_samples for run in results.runs):
        said.append(Statement("plain", "Resumed runs", "Their time begins at their checkpoint."))
    return said


def _named(settings: Iterable[str]) -> str:
    names = [_cell(name) for name in settings]
    more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    *first, last = [*names[:MAX_NAMED], *more]
    return f"{', '.join(first)} and {last}" if first else last


def _score_statement(results: Results) -> Statement:
    if results.differing:
        return Statement("plain", "Score", f"No score: the runs differ in {_named(results.differing)}.")
    if results.invalid_count > 1:
        why = f"{results.invalid_count} of {len(results.submitted)} runs are not valid results, and only one may be invalid"
        return Statement("bad", "Score", f"No score: {why}.")
    if results.score_seconds is None:
        needed = f"it needs at least {MIN_RUNS_FOR_SCORE} runs"
        needed += f", a submission {SUBMISSION_RUNS}" if results.for_submission else ""
        return Statement("plain", "Score", f"No score yet: {needed}.")
    kept = len(results.runs) - len(results.dropped)
    text = f"Mean of {counted(kept, 'run')} without the fastest and the slowest: "
    text += duration(results.score_seconds)
    if results.convergence is not None and results.convergence.applied_scaling > 1:
        text += f", scaled by {results.convergence.applied_scaling:.6f} to {duration(results.scaled_seconds)}"
    text += "."
    invalid = next((run.number for run in results.submitted if run not in results.valid), None)
    if invalid is not None:
        text += f" Run {invalid} is not a valid result and counts as the slowest."
    if len(results.runs) != SUBMISSION_RUNS and (results.for_submission or results.submitted != results.runs):
        text += f" A submission has {SUBMISSION_RUNS} runs, here are {len(results.runs)}"
        text += (
            ": the ten consecutive runs with the median score count (TR 12.1)."
            if results.submitted != results.runs
            else "."
        )
    return Statement("good" if len(results.submitted) == SUBMISSION_RUNS else "plain", "Score", text)


def table(results: Results) -> list[tuple[str, ...]]:
    """Return the head and the rows of the table of the runs."""
    if not results.is_experiment:
        return [COLUMNS, *(_cells(run) for run in results.runs)]
    seeds = [str(run.logged.seed or "-") for run in results.runs]
    settings = results.differing | ({"seed": seeds} if len(set(seeds)) > 1 else {})
    rows = [
        (
            str(run.number),
            run.outcome,
            fraction(run.best[1]),
            count(run.best[0]),
            duration(run.logged.seconds),
            count(run.logged.trained),
            *map(_cell, values),
        )
        for run, *values in zip(results.runs, *settings.values(), strict=True)
    ]
    return [(*EXPERIMENT_COLUMNS, *map(_cell, settings)), *rows]


def _cell(text: str) -> str:
    shown = visible(text, MAX_TEXT)
    # If a path is too long, cut its beginning, because its end tells more.
    return shown if len(shown) <= MAX_CELL else f"...{shown[3 - MAX_CELL :]}"


def _cells(run: ReportedRun) -> tuple[str, ...]:
    return (
        str(run.number),
        run.verdict.official,
        run.outcome,
        duration(run.logged.seconds),
        fraction(run.logged.accuracy),
        fraction(run.logged.target),
        count(run.logged.trained),
        rate(run.logged.sequences_per_s),
    )


def print_summary(results: Results) -> None:
    head, *rows = table(results)
    broken = [textwrap.wrap(re.sub(r"(?<=[._])", " ", name), HEAD_WIDTH) for name in head]
    names = [[re.sub("(?<=[._]) ", "", line) for line in lines] for lines in broken]
    height = max(map(len, names))
    rows = [*zip(*([""] * (height - len(lines)) + lines for lines in names), strict=True), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    say(heading(results))
    for row in rows:
        say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    if results.is_experiment:
        for _, title, text in statements(results):
            say(f"{title}: {text}")
        return
    valid = f"{sum(run.verdict.passed for run in results.runs)} of {len(results.runs)} runs valid"
    score = results.score_seconds
    mean = f"; mean time to train without the fastest and the slowest: {duration(score)}" if score is not None else ""
    if results.differing:
        mean = f"; no mean: the runs differ in {_named(results.differing)}"
    say(valid + mean)
    say(results.notice)


def heading(results: Results) -> str:
    return f"BERT on {visible(results.system, MAX_TEXT)}"


def as_markdown(results: Results) -> str:
    """Return the summary as Markdown: statements, the table of the runs, findings."""
    cells = table(results)
    head, *rows = [f"| {' | '.join(map(_markdown, row))} |\n" for row in cells]
    head += f"|{'---:|' * len(cells[0])}\n"
    said = "".join(f"- **{item.title}**: {_markdown(item.text)}\n" for item in statements(results))
    findings = "".join(f"- {_markdown(about)}, {_markdown(finding)}\n" for about, finding in results.findings)
    parts = [f"# {_markdown(heading(results))}\n", f"{results.notice}\n", said, head + "".join(rows)]
    if findings:
        parts += ["## Findings\n", findings]
    return "\n".join(parts)


def _markdown(text: object) -> str:
    shown = visible(text, MAX_SENTENCE)
    # Escape $ and ~ too: GitHub renders them as formulas and strikethrough.
    return "".join(f"\\{character}" if character in "\\`*_{}[]<>#|&~$" else character for character in shown)


def as_json(results: Results) -> str:
    return json_document(as_dict(results)) + "\n"


def as_dict(results: Results) -> dict[str, Any]:
    """Return the report as a dictionary for JSON. Unknown figures are None."""
    outlook = results.convergence
    document = {
        "note": results.notice,
        "system": results.system,
        "ruleset": results.ruleset,
        "division": results.division,
        "accelerator": results.accelerator or None,
        "accelerators": results.accelerators,
        "global_batch_size": results.global_batch_size,
        "score_seconds": results.score_seconds,
        "scaled_score_seconds": results.scaled_seconds,
        "differing_settings": results.differing,
        "statements": [statement._asdict() for statement in statements(results)],
        "convergence": asdict(outlook) if outlook else None,
        "beside": [verdict.as_dict() for verdict in results.beside],
        "runs": [_run_as_dict(results, run) for run in results.runs],
        "description": results.description,
    }
    return _without_rules(results, document)


def _without_rules(results: Results, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not (results.is_experiment and name in RULED_FIELDS)}


def _run_as_dict(results: Results, run: ReportedRun) -> dict[str, Any]:
    fields = _figures(results, run) | {
        "evaluations": [{"samples": samples, "accuracy": accuracy} for samples, accuracy in run.logged.curve],
        "seconds_by_part": breakdown(run),
        "configuration": run.log.header,
        "verdict": run.verdict.as_dict(),
    }
    return _without_rules(results, fields)


def _figures(results: Results, run: ReportedRun) -> dict[str, Any]:
    best_samples, best_accuracy = run.best
    return {
        "run": run.number,
        "official": run.verdict.official,
        "ours": run.verdict.ours,
        "outcome": run.outcome,
        "dropped": results.dropped.get(run.number),
        "seconds": run.logged.seconds,
        "init_seconds": run.logged.init_seconds,
        "accuracy": run.logged.accuracy,
        "target": run.logged.target,
        "samples": run.logged.trained,
        "converged_samples": run.logged.converged_samples(),
        "sequences_per_s": run.logged.sequences_per_s,
        "global_batch_size": run.logged.global_batch_size,
        "seed": run.logged.seed,
        "best_accuracy": best_accuracy,
        "best_accuracy_error": run.best_error,
        "best_samples": best_samples,
    }


def as_csv(results: Results) -> str:
    """Return one CSV row per run, with the settings that differ. Unknown figures are empty."""
    rows = [_without_rules(results, _figures(results, run)) for run in results.runs]
    for name, values in results.differing.items():
        for row, value in zip(rows, values, strict=True):
            row[_no_formula(name)] = _no_formula(value)
    writer = csv.DictWriter(text := io.StringIO(), list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _no_formula(text: str) -> str:
    """Escape text from a log so that no spreadsheet interprets it as a formula."""
    shown = visible(text, MAX_TEXT)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown


def fraction(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
