"""Decide whether the runs in a folder make a valid submission, choose the runs to submit, and write the tree.

A fault that prevents the submission raises ValueError before anything is written. Other faults become findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from compliance.artefact import MAX_FILE_BYTES
from compliance.check.checker import check_log
from compliance.convergence.outlook import outlook
from compliance.convergence.selection import FAILED, Selection, select
from compliance.convergence.standing import batch_size_of, division_of, minutes_of, result_logs
from compliance.folders import BENCHMARK, absolute
from compliance.log import rules
from compliance.log.findings import Finding, Verdict
from compliance.log.reader import Log
from compliance.log.rules import SUBMISSION_RUNS
from compliance.package.source import SourceTree, tracked_source
from compliance.package.tree import Package, PackageRequest, SubmittedRun, write_tree
from compliance.submission.description import against_logs, description_findings, read_description
from console.files import sha256_of

INDISPENSABLE_FIELDS = ("submitter", "division", "status", "system_name", "framework")


def make_package(request: PackageRequest) -> Package:
    """Write the submission tree request.out/request.org.

    Raises:
        ValueError: the logs, the description or the location do not allow a submission. Nothing was written.
    """
    if request.tree.exists():
        raise ValueError(f"{request.tree} exists already: choose another --out, or remove it")
    logs = result_logs(request.runs)
    division = division_of(logs)
    folder, system = absolute(request.runs), request.system.stem
    # The parent's name is a system only for a benchmark folder. A folder of another name may be anywhere.
    if folder.name == BENCHMARK and folder.parent.name != system:
        raise ValueError(
            f"{request.runs} holds the runs of {folder.parent.name!r}, but --system {request.system} describes {system!r}. "
            f"Give --system .../{folder.parent.name}.json, or rename one of the two if they are the same system"
        )
    description, differences = _description(request, division, logs)
    _refuse_unsuitable(logs)
    chosen, selection = _choose(logs, request.ruleset)
    samples = [run.log.run.converged_samples() for run in chosen]
    ahead = outlook(samples, batch_size_of(logs), request.ruleset, division=division)
    source = tracked_source()
    findings = (*differences, *_source_findings(logs, source))
    package = Package(request, division, chosen, selection, len(logs), ahead, source.left_out, findings)
    write_tree(package, description, source)
    return package


def _description(
    request: PackageRequest, division: rules.Division, logs: list[Log]
) -> tuple[dict[str, Any], list[Finding]]:
    """Return the description's fields, and findings about differences from the logs that do not prevent a submission."""
    path = request.system
    description = read_description(path)
    faults = [fault for fault in description_findings(description, request.ruleset) if fault.severity == "error"]
    for name in INDISPENSABLE_FIELDS:
        if not faults and description.text(name) is None:
            remedy = f"`python -m compliance system --out {quote(str(path))} --set {name}=...`"
            raise ValueError(f"{path}: {name} is empty: {remedy}")
    # No official tool compares the divisions, and the tools check seeds and convergence only if the file says "closed".
    if not faults and description.fields["division"] != division:
        found = f"division is {description.fields['division']!r}, but the logs say {division!r}"
        raise ValueError(f"{path}: {found}: correct the wrong one")
    differences = [] if faults else [*against_logs(description, [log.run for log in logs])]
    for fault in (*faults, *(finding for finding in differences if finding.severity == "error")):
        raise ValueError(f"{path}: {f'{fault.key}: ' if fault.key else ''}{fault.found}; {fault.remedy}")
    return description.fields, differences


def _refuse_unsuitable(logs: list[Log]) -> None:
    folder = logs[0].path.parent
    ended = [log for log in logs if log.run.is_ended]
    if len(ended) < SUBMISSION_RUNS:
        running = f", and {len(logs) - len(ended)} without an end" if len(ended) < len(logs) else ""
        raise ValueError(
            f"{folder}: {len(ended)} complete logs{running}, expected {SUBMISSION_RUNS} (TR 12): make the missing runs; "
            f"`python -m compliance convergence {quote(str(folder))}` says what they must do"
        )
    digests: dict[str, Path] = {}
    for log in logs:
        if log.path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{log.path}: larger than {MAX_FILE_BYTES >> 20} MiB, the most that a submission may hold")
        # Compare contents, because a copy under another name would count one run twice.
        same = digests.setdefault(sha256_of(log.path), log.path)
        if same != log.path:
            raise ValueError(
                f"{log.path} is a copy of {same.name}, expected a run of its own: remove the copy and run again"
            )
        if log.run.resumed_from is not None:
            raise ValueError(
                f"{log.path}: the run was resumed from {log.run.resumed_from!a}, so it was not timed from its start "
                "(TR 11): move the log away and run again"
            )


def _choose(logs: list[Log], ruleset: str) -> tuple[tuple[SubmittedRun, ...], Selection]:
    verdicts = [check_log(log, ruleset) for log in logs]
    # A log that fails a check counts as a failed run, even if its status is success.
    times = [minutes_of(log) if verdict.passed else FAILED for log, verdict in zip(logs, verdicts, strict=True)]
    selection = select([log.run.start_ms or 0 for log in logs], times, SUBMISSION_RUNS)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    # The score is infinite if even the median window contains two failed runs.
    if selection.score == FAILED:
        named = "; ".join(f"{verdict.path.name}: {_why(verdict)}" for verdict in failed)
        raise ValueError(
            f"{logs[0].path.parent}: {len(failed)} runs are not valid results, and a set of {SUBMISSION_RUNS} may hold one "
            f"(TR 12): {named}. Run again"
        )
    # Faults of runs that are not submitted do not matter.
    for run in selection.chosen:
        if verdicts[run].official == "pass" and not verdicts[run].passed:
            raise ValueError(
                f"{logs[run].path}: {_why(verdicts[run])}. The official tools do not see it and would count the run: move "
                "the log away and run again"
            )
    # Renumber the runs from 0 in the order of their start.
    chosen = enumerate(selection.chosen)
    return tuple(SubmittedRun(f"result_{number}.txt", logs[run], times[run]) for number, run in chosen), selection


def _why(verdict: Verdict) -> str:
    return f"{verdict.errors[0]}" if verdict.errors else verdict.summary


def _source_findings(logs: list[Log], source: SourceTree) -> Iterator[Finding]:
    rule = "SR Source code requirements for replication"
    # Logs of other software do not name a commit.
    if commits := {log.header["commit"] for log in logs if "commit" in log.header} - {source.commit}:
        found = f"a log was made at commit {min(commits)!a}, but the source is packaged at {source.commit!r}"
        remedy = "check out the commit of the runs and package from there"
        yield Finding(None, "", rule, found, remedy, severity="warning")
    if source.modified:
        found, more = f"{source.modified[0]} differs from its commit", len(source.modified) - 1
        remedy = "commit it, or package from a clean checkout: the packaged source must be the source that ran"
        yield Finding(None, "", rule, found, remedy, severity="warning", more=more)
