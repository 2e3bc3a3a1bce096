"""Check that the files beside the logs agree with them: scaling.json, metrics, reports, and a package's tables.

The official tools and people read these files in place of the logs, so a file that contradicts its logs is a fault.
"""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from compliance.convergence.outlook import Outlook, outlook, outlook_of
from compliance.convergence.selection import FAILED, olympic_mean
from compliance.folders import BenchmarkFolder, log_number
from compliance.log import rules
from compliance.log.findings import Finding, Severity, shown
from compliance.log.logged_run import LoggedRun
from compliance.log.metrics import Metrics, read_metrics
from console.files import read_bounded, read_json
from console.text import visible

SCALING = "scaling.json"

TOLERANCE = 1e-6
"""Maximum relative difference between a number in such a file and the same number computed from the logs."""

MAX_RATIO = 100
"""Maximum ratio of the rate in the metrics, of steps only, to the rate in the log, whose time includes evaluations."""

README_ROW = re.compile(r"\| ([\w.+-]+) \| (?:closed|open) \| bert \| \d+ \| (\d+\.\d+) \| (\d+\.\d+) \|", re.ASCII)
"""Row of the table in a package's README.md: system, division, benchmark, runs, minutes, scaling factor."""

MAX_BYTES = 4 * 2**20
"""Maximum size of a derived file that is read."""

MAX_DERIVED = 20
"""Maximum number of reports that are read in one folder."""

MAX_ROWS = 1_000
"""Maximum number of rows that are read in one report."""


def scaling_findings(
    folder: BenchmarkFolder, convergence: Outlook | None, runs: Sequence[LoggedRun], failed: int
) -> Iterator[Finding]:
    """Compare scaling.json, by which the result summarizer multiplies the score, with the valid and the failed runs."""
    path = folder.path / SCALING
    if not path.is_file():
        return
    try:
        content = read_json(path, MAX_BYTES, "remove it")
    except ValueError as error:
        content = str(error).removeprefix(f"{path}: ")
    factor = content.get("scaling_factor", 1.0) if isinstance(content, dict) else None
    expected, why = [1.0], "no file, because the score of these logs is not scaled"
    if convergence and convergence.verdict in ("pass", "scaled"):
        # Accept the factor that the reference points of any ruleset give. Accept it for both counts of samples: up to the
        # first evaluation at the target or, as in the RCP checker, up to the last evaluation.
        batch = runs[0].global_batch_size or 0
        last = [*(run.epoch_nums[-1] if run.epoch_nums else None for run in runs), *[None] * failed]
        expected = [convergence.applied_scaling]
        for ruleset in rules.RULESETS:
            outlooks = outlook_of(runs, batch, ruleset, failed=failed), outlook(last, batch, ruleset)
            expected += [each.applied_scaling for each in outlooks]
        if convergence.verdict == "scaled":
            why = f"{convergence.scaling:.6f}, the mean of the reference divided by the mean of the runs"
    if rules.is_number(factor) and any(math.isclose(factor, each, rel_tol=TOLERANCE) for each in expected):
        return
    found = f"{SCALING} has scaling_factor {shown(content if factor is None else factor)}, expected {why}"
    remedy = "remove it: the package checker and `python -m compliance package` write the true one"
    # Only warn of a larger factor. It makes the score worse, and reference points may have changed since the round.
    is_harmless = rules.is_number(factor) and factor > min(expected)
    severity: Severity = "warning" if is_harmless else "error"
    yield Finding(None, "scaling_factor", "TR 13; RCP checker", found, remedy, severity=severity)


def metrics_fault(metrics: Metrics, run: LoggedRun) -> str:
    """Return a text that says why a metrics file cannot be of the same run as a log; "" if it can."""
    curve, batch, seconds, end = dict(run.curve), run.global_batch_size, run.seconds, metrics.end
    if metrics.run and metrics.run.global_batch_size and batch and metrics.run.global_batch_size != batch:
        return f"global_batch_size {metrics.run.global_batch_size}, the log has {batch}"
    for each in metrics.evaluations:
        logged = curve.get(each.samples)
        if logged is not None and abs(each.masked_lm_accuracy - logged) > 1e-5:
            return f"accuracy {each.masked_lm_accuracy:.5f} at {each.samples} samples, the log has {logged:.5f}"
    known = {each.samples for each in metrics.evaluations if math.isfinite(each.masked_lm_accuracy)}
    if known and curve and known.isdisjoint(curve):
        return f"an evaluation at {min(known)} samples, the log has none there"
    if end and run.is_ended and end.status != run.status:
        return f"status {shown(end.status)}, the log has {shown(run.status)}"
    rates = [step.sequences_per_s for step in metrics.steps]
    if rates and run.sequences_per_s and median(rates) > MAX_RATIO * run.sequences_per_s:
        return f"{median(rates):,.0f} sequences a second, the log has {run.sequences_per_s:,.0f} with evaluations"
    if end and end.time_s and seconds and abs(end.time_s - seconds) > max(2.0, 0.05 * seconds):
        return f"{end.time_s:.1f} s, the log has {seconds:.1f} s"
    return ""


def metrics_findings(log: Path, run: LoggedRun) -> Iterator[Finding]:
    number = log_number(log)
    path = log.with_name(f"metrics_{number}.jsonl") if number else log
    if path != log and path.is_file() and (fault := metrics_fault(read_metrics(path), run)):
        found = f"{path.name} is of another run: {fault}"
        yield Finding(
            None, "", "docs/compliance.md", found, "put the run's own metrics beside its log", severity="warning"
        )


def report_findings(folder: BenchmarkFolder, runs: Mapping[int, LoggedRun]) -> Iterator[Finding]:
    """Compare the tables that `python -m compliance report --format csv` or json wrote with the logs, by run number."""
    candidates = [path for place in (folder.path, folder.path.parent) for path in sorted(place.glob("*.[cj]s[vo]*"))]
    for path in candidates[:MAX_DERIVED]:
        for row in _rows(path):
            if fault := _row_fault(row, runs):
                found = f"{visible(path.name)} contradicts the logs: {fault}"
                remedy = "write it again: `python -m compliance report`"
                yield Finding(None, "", "docs/compliance.md", found, remedy, severity=folder.severity)
                break


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the runs in a report; empty for any other file."""
    try:
        if path.suffix == ".csv":
            text = read_bounded(path, MAX_BYTES, "").decode("utf-8", "replace")
            rows: list[Any] = list(islice(csv.DictReader(io.StringIO(text)), MAX_ROWS))
        elif path.suffix == ".json":
            content = read_json(path, MAX_BYTES, "")
            rows = content["runs"] if isinstance(content, dict) and isinstance(content.get("runs"), list) else []
        else:
            return []
    except (OSError, ValueError, csv.Error):
        return []
    return [row for row in rows if isinstance(row, dict) and {"run", "seconds", "converged_samples"} <= row.keys()]


def _row_fault(row: Mapping[str, Any], runs: Mapping[int, LoggedRun]) -> str:
    number = _number(row["run"])
    run = runs.get(int(number)) if number is not None else None
    if run is None:
        return f"there is no log of run {shown(row['run'])}"
    logged = {"seconds": run.seconds, "accuracy": run.accuracy, "converged_samples": run.converged_samples()}
    for name, value in logged.items():
        said = _number(row.get(name))
        if (said is None) != (value is None) or not math.isclose(said or 0, value or 0, rel_tol=TOLERANCE):
            return f"run {number:.0f} has {name} {shown(row.get(name))}, in the log {shown(value)}"
    return ""


def _number(value: object) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if abs(number) < 1e18 else None


def readme_findings(
    submission: Path, system: str, seconds: Sequence[float], convergence: Outlook | None
) -> Iterator[Finding]:
    """Compare the score in the README.md that `python -m compliance package` wrote with the logs of the system.

    `seconds` has the time to train of each run. It is infinite if the run is invalid.
    """
    try:
        text = read_bounded(submission / "README.md", MAX_BYTES, "").decode("utf-8", "replace")
    except (OSError, ValueError):
        return
    score = olympic_mean(seconds) / 60 if len(seconds) >= 3 else FAILED
    score *= convergence.applied_scaling if convergence else 1.0
    for name, minutes, scaling in README_ROW.findall(text):
        if name == system and abs(float(minutes) - score) > 1e-3:
            found = f"README.md says {minutes} minutes, scaled by {scaling}, and the logs say {score:.4f} minutes"
            yield Finding(
                None, "", "result summarizer", f"{found}, expected the same", "correct the table in README.md"
            )


def settings_findings(submission: Path, system: str, runs: Sequence[LoggedRun]) -> Iterator[Finding]:
    """Compare the settings that `python -m compliance package` wrote to benchmarks/bert/<system>/ with the logs."""
    described = submission / "benchmarks" / "bert" / system
    for path in sorted(described.glob(f"{system}_*.json"))[:MAX_DERIVED]:
        try:
            content = read_json(path, MAX_BYTES, "")
        except ValueError:
            continue
        settings = content.get("logged") if isinstance(content, dict) else None
        for key, value in settings.items() if isinstance(settings, dict) else ():
            logged = [run.value(key) for run in runs]
            if key in rules.KEYS and key != "seed" and logged and value not in logged:
                found = f"{visible(path.name)} has {key} {shown(value)}, expected {shown(logged[0])} as in the logs"
                yield Finding(None, key, "TR 9.1", found, "write the settings of these runs")
