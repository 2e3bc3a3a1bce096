"""Summarise a results folder in words and tables: for the terminal, Markdown, JSON, CSV, and the page of the report."""

import csv
import io
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

from compliance.log.rules import SUBMISSION_RUNS
from compliance.report.results import MIN_RUNS_FOR_SCORE, ReportedRun, Results, breakdown
from console.html.page import MAX_SENTENCE, MAX_TEXT
from console.program import say
from console.text import counted, duration, json_document, visible

COLUMNS = ("run", "official", "ours", "time to train", "accuracy", "target", "sequences", "sequences/s")

Kind = Literal["good", "warn", "bad", "plain"]

_KINDS: dict[str, Kind] = {"pass": "good", "scaled": "warn", "fail": "bad", "unknown": "bad"}


class Statement(NamedTuple):
    """A sentence about the folder, with its kind: good, warn, bad, or plain (neutral)."""

    kind: Kind
    title: str
    text: str


def statements(results: Results) -> list[Statement]:
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


# The score drops one invalid run as the slowest. With two invalid runs there is no score.
def _share(part: int, whole: int) -> Kind:
    return "good" if part == whole else "warn" if whole - part == 1 and whole >= MIN_RUNS_FOR_SCORE else "bad"


def _score_statement(results: Results) -> Statement:
    if results.lost > 1:
        why = f"{results.lost} of {len(results.submitted)} runs are no valid results, and only one may be"
        return Statement("bad", "Score", f"No score: {why}.")
    if results.score_seconds is None:
        needed = f"it needs at least {MIN_RUNS_FOR_SCORE} runs"
        needed += f", a submission {SUBMISSION_RUNS}" if results.for_submission else ""
        return Statement("plain", "Score", f"No score yet: {needed}.")
    kept = len(results.runs) - len(results.dropped)
    text = f"Mean of {counted(kept, 'run')} without the fastest and the slowest: "
    text += duration(results.score_seconds)
    if results.convergence is not None and results.convergence.scaling > 1:
        text += f", scaled by {results.convergence.scaling:.6f} to {duration(results.scaled_seconds)}"
    text += "."
    invalid = next((run.number for run in results.submitted if run not in results.valid), None)
    if invalid is not None:
        text += f" Run {invalid} is no valid result and counts as the slowest."
    if len(results.runs) != SUBMISSION_RUNS and (results.for_submission or results.submitted != results.runs):
        text += f" A submission has {SUBMISSION_RUNS} runs, here are {len(results.runs)}"
        text += (
            ": these are the consecutive ones of median score (TR 12.1)." if results.submitted != results.runs else "."
        )
    return Statement("good" if len(results.submitted) == SUBMISSION_RUNS else "plain", "Score", text)


def cells(run: ReportedRun) -> tuple[str, ...]:
    """Return the run's table row, in the order of `COLUMNS`."""
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
    rows = [COLUMNS, *(cells(run) for run in results.runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    say(heading(results))
    for row in rows:
        say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    valid = f"{sum(run.verdict.passed for run in results.runs)} of {len(results.runs)} runs valid"
    score = results.score_seconds
    mean = f"; mean time to train without the fastest and the slowest: {duration(score)}" if score is not None else ""
    say(valid + mean)
    say(results.notice)


def heading(results: Results) -> str:
    return f"BERT on {visible(results.system, MAX_TEXT)}"


def as_markdown(results: Results) -> str:
    """Return the summary as Markdown: statements, the table of the runs, findings."""
    head = f"| {' | '.join(COLUMNS)} |\n|{'---:|' * len(COLUMNS)}\n"
    rows = "".join(f"| {' | '.join(cells(run))} |\n" for run in results.runs)
    said = "".join(f"- **{item.title}**: {_markdown(item.text)}\n" for item in statements(results))
    findings = "".join(f"- {_markdown(about)}, {_markdown(finding)}\n" for about, finding in results.findings)
    parts = [f"# {_markdown(heading(results))}\n", f"{results.notice}\n", said, head + rows]
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
    return {
        "note": results.notice,
        "system": results.system,
        "ruleset": results.ruleset,
        "division": results.division,
        "accelerator": results.accelerator or None,
        "accelerators": results.accelerators,
        "global_batch_size": results.global_batch_size,
        "score_seconds": results.score_seconds,
        "scaled_score_seconds": results.scaled_seconds,
        "statements": [statement._asdict() for statement in statements(results)],
        "convergence": asdict(outlook) if outlook else None,
        "beside": [verdict.as_dict() for verdict in results.beside],
        "runs": [_run_as_dict(run, results.dropped.get(run.number)) for run in results.runs],
        "description": results.description,
    }


def _run_as_dict(run: ReportedRun, dropped: str | None) -> dict[str, Any]:
    return _figures(run, dropped) | {
        "evaluations": [{"samples": samples, "accuracy": accuracy} for samples, accuracy in run.logged.curve],
        "seconds_by_part": breakdown(run),
        "configuration": run.log.header,
        "verdict": run.verdict.as_dict(),
    }


def _figures(run: ReportedRun, dropped: str | None) -> dict[str, Any]:
    return {
        "run": run.number,
        "official": run.verdict.official,
        "ours": run.verdict.ours,
        "outcome": run.outcome,
        "dropped": dropped,
        "seconds": run.logged.seconds,
        "init_seconds": run.logged.init_seconds,
        "accuracy": run.logged.accuracy,
        "target": run.logged.target,
        "samples": run.logged.trained,
        "converged_samples": run.logged.converged_samples(),
        "sequences_per_s": run.logged.sequences_per_s,
        "global_batch_size": run.logged.global_batch_size,
        "seed": run.logged.seed,
    }


def as_csv(results: Results) -> str:
    """Return one CSV row per run. Unknown figures are empty."""
    rows = [_figures(run, results.dropped.get(run.number)) for run in results.runs]
    # No cell contains text from a log, which a spreadsheet could interpret as a formula.
    writer = csv.DictWriter(text := io.StringIO(), list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def fraction(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
