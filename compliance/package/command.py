"""`python -m compliance package`: choose the runs, write the tree, check it by the official tools, and compare figures.

A fault raises ``ValueError`` only if nothing can be packaged. The check of the written tree finds all other faults.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from compliance.artefact import MAX_FILE_BYTES
from compliance.check.checker import check_logs
from compliance.convergence.outlook import outlook_of
from compliance.convergence.selection import FAILED, Selection, counted_seconds, select
from compliance.folders import BENCHMARK, absolute, numbered_logs
from compliance.log import rules
from compliance.log.findings import Finding
from compliance.log.reader import Log, read_log
from compliance.log.rules import NOT_A_RESULT, SUBMISSION_RUNS
from compliance.official.process import NAMES, the_worker
from compliance.package.tree import Package, PackageRequest, SourceTree, SubmittedRun, tracked_source, write_tree
from compliance.submission.check import TOOLS, accepted, check_paths
from compliance.submission.description import read_description
from console.files import read_json, shown
from console.program import say
from console.text import visible

AGREEMENT = 1e-9
"""Maximum relative difference between our figures and the official figures."""

INDISPENSABLE_FIELDS = ("submitter", "division", "status", "system_name", "framework")


def run(request: PackageRequest) -> int:
    """Make the submission, run all checks on it, and print the findings.

    Returns 0 if all tools pass and their figures agree with ours, else 1. Raises ``ValueError`` if the request does not
    allow a submission.
    """
    package = make_package(request)
    # Check the written tree, with its copied and renamed files, because a reviewer gets this tree.
    verdicts = check_paths([request.tree], rules.NEWEST_RULESET)
    rows = [(NAMES[TOOLS[each.part]], each.official == "pass") for each in verdicts if each.part in TOOLS]
    score = the_worker().answer("score", absolute(request.tree), rules.NEWEST_RULESET)
    differences, is_valid = [*_differences(package, score)], accepted(verdicts)
    rows += [("result summarizer", score.get("minutes") is not None), ("check of this repository", is_valid)]
    rows += [("score, scaling, samples equal", not differences)]

    say(f"{request.tree}: {request.system.stem}, {package.division} division, ruleset {rules.NEWEST_RULESET}")
    say(f"score {package.minutes:.4f} minutes. {package.choice}")
    say(package.outlook.sentence)
    say()
    for name, passed in rows:
        say(f"{name:<30} {'pass' if passed else 'FAIL'}")
    say()
    for verdict in verdicts:
        findings = verdict.findings
        # One log of ten may fail. If the submission passes, print no findings of its logs, and otherwise only errors.
        if verdict.path.parent == package.results:
            findings = () if is_valid else verdict.errors
        for finding in findings:
            say(replace(finding, found=f"{verdict.path.name}: {finding.found}"))
    for finding in (*package.findings, *differences):
        say(finding)
    say(NOT_A_RESULT)
    return 0 if all(passed for _, passed in rows) else 1


def make_package(request: PackageRequest) -> Package:
    """Write the submission tree request.out/request.org.

    Raises ``ValueError`` without writing anything if the logs, the description or the location do not allow a
    submission.
    """
    if request.tree.exists():
        raise ValueError(f"{request.tree} exists already: choose another --out, or remove it")
    folder, system = absolute(request.runs), request.system.stem
    # A folder named bert must lie in a folder with the system's name. A folder with any other name may be anywhere.
    if folder.name == BENCHMARK and folder.parent.name != system:
        raise ValueError(
            f"{request.runs} holds the runs of {folder.parent.name!r}, but --system {request.system} describes {system!r}. "
            f"Give --system .../{folder.parent.name}.json, or rename one of the two if they are the same system"
        )
    every = [read_log(path) for _, path in numbered_logs(request.runs)]
    logs = [log for log in every if log.run.is_ended]
    fields = _description(request.system)
    chosen, selection = _choose(logs, request)
    valid = [run.log.run for run in chosen if run.minutes < FAILED]
    first, failed = valid[0], len(chosen) - len(valid)
    ahead = outlook_of(valid, first.global_batch_size or 0, rules.NEWEST_RULESET, first.division, failed=failed)
    source = tracked_source()
    findings = (*_unended(every), *_source_findings(logs, source))
    package = Package(request, first.division, chosen, selection, ahead, findings)
    write_tree(package, fields, source)
    return package


def _description(path: Path) -> dict[str, Any]:
    description = read_description(path)
    if description.fault:
        raise ValueError(f"{path}: {description.fault}, expected a system description")
    for name in INDISPENSABLE_FIELDS:
        if description.text(name) is None:
            remedy = f"`python -m compliance system --out {quote(str(path))} --set {name}=...`"
            raise ValueError(f"{path}: {name} is empty, expected text: {remedy}")
    return description.fields


def _choose(logs: list[Log], request: PackageRequest) -> tuple[tuple[SubmittedRun, ...], Selection]:
    if len(logs) < SUBMISSION_RUNS:
        remedy = f"`python -m compliance convergence {quote(str(request.runs))}` says what the missing runs must do"
        raise ValueError(f"{request.runs}: {len(logs)} complete logs, expected {SUBMISSION_RUNS} (TR 12): {remedy}")
    verdicts = check_logs(logs, rules.NEWEST_RULESET)
    checked = zip(logs, verdicts, strict=True)
    times = [counted_seconds(log.run, passed=verdict.passed) / 60 for log, verdict in checked]
    selection = select([log.run.start_ms or 0 for log in logs], times)
    # The score is infinite if even the median of the windows of ten consecutive runs contains two failed runs.
    if selection.score == FAILED:
        failed = [verdict for verdict in verdicts if not verdict.passed]
        named = "; ".join(f"{verdict.path.name}: {verdict.errors[0]}" for verdict in failed)
        raise ValueError(
            f"{request.runs}: {len(failed)} runs are not valid results, but a set of {SUBMISSION_RUNS} may have at most one "
            f"(TR 12): {named}. Repeat these runs"
        )
    # Renumber the runs from 0 in the order of their start.
    chosen = enumerate(selection.chosen)
    return tuple(SubmittedRun(f"result_{number}.txt", logs[run], times[run]) for number, run in chosen), selection


def _unended(logs: list[Log]) -> Iterator[Finding]:
    if left_out := [log.path.name for log in logs if not log.run.is_ended]:
        found = f"{visible(left_out[0])} has no run_stop and is left out, expected every run that was started"
        remedy = "a run that was killed counts as failed: log its run_stop with status aborted (TR 12.1)"
        yield Finding(None, "run_stop", "TR 12.1", found, remedy, severity="warning", more=len(left_out) - 1)


def _source_findings(logs: list[Log], source: SourceTree) -> Iterator[Finding]:
    rule = "SR Source code requirements for replication"
    # Logs of other software name no commit, so skip them.
    if commits := {log.header["commit"] for log in logs if "commit" in log.header} - {source.commit}:
        found = f"a log was made at commit '{shown(min(commits))}', but the source is packaged at {source.commit!r}"
        remedy = "check out the commit of the runs and package from there"
        yield Finding(None, "", rule, found, remedy, severity="warning")
    if source.modified:
        found, more = f"{source.modified[0]} differs from its commit", len(source.modified) - 1
        remedy = "commit it, or package from a clean checkout: the packaged source must be the source that ran"
        yield Finding(None, "", rule, found, remedy, severity="warning", more=more)


def _differences(package: Package, score: dict[str, Any]) -> Iterator[Finding]:
    # The summarizer's convergence check writes this file if the score is scaled, and removes it otherwise.
    written = package.results / "scaling.json"
    factor = read_json(written, MAX_FILE_BYTES, "")["scaling_factor"] if written.is_file() else 1.0
    figures = [
        ("score in minutes", package.minutes, score.get("minutes")),
        ("scaling of scaling.json", package.outlook.applied_scaling, factor),
    ]
    # The summarizer always reads epoch_num of the last evaluation. Skip its figures if ours come from another count.
    if not package.outlook.note:
        figures.append(("scaling", package.outlook.applied_scaling, score.get("scaling")))
    if package.division == "closed" and not package.outlook.note:
        figures.append(("mean samples to the target", package.outlook.mean, score.get("samples")))
    fault = f" ({visible(score['crash'])})" if "crash" in score else ""
    for name, ours, theirs in figures:
        # A figure that only one of the two programs computes is also a difference.
        if ours is None or theirs is None or not math.isclose(ours, theirs, rel_tol=AGREEMENT):
            remedy = "do not submit it: one of the two programs is wrong about these logs"
            found = f"the {name} is {ours} by this program and {theirs} by the official tools{fault}"
            yield Finding(None, "", "result summarizer", found, remedy)
