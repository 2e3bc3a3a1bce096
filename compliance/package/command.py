"""`python -m compliance package`: the tree, the official tools on it, our figures against theirs, and the archive."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from compliance.log.findings import Finding
from compliance.log.rules import NOT_A_RESULT
from compliance.official.tools import Summary, ToolReport, ask_all, output_folder
from compliance.package.archive import check_request, write_archive
from compliance.package.assembly import make_package
from compliance.package.tree import Package, PackageRequest, describe_selection
from compliance.submission.check import accepted, check_paths
from console.program import say
from console.text import visible

AGREEMENT = 1e-9
"""Largest relative difference of a figure to the official one."""
MAX_NAMED = 100
"""Maximum number of names of files that are left out of the source."""


def run(request: PackageRequest, archive: Path | None, password_file: Path | None) -> int:
    """Make the submission, have it checked, print what was found.

    Returns:
        0 if all tools pass and their figures are ours, else 1.

    Raises:
        ValueError: why no submission can be made of this.
    """
    if (archive is None) != (password_file is None):
        raise ValueError("--archive and --password-file go together: the archive is encrypted")
    # First, as the tools take a while: what is wrong with the archive is said before they begin.
    if archive and password_file:
        check_request(archive, password_file)
    package = make_package(request)
    reports, summary = ask_all(package.tree, request.system.stem, request.ruleset, package.division)
    reports += [_own_check(package), _comparison(package, summary)]
    _print(package, reports)
    passed = all(report.passed for report in reports)
    if archive and password_file:
        done = f"sha1 {write_archive(package.tree, archive, password_file)}" if passed else None
        say()
        say(f"{archive}: {done or 'not written, because a check fails'}")
    return 0 if passed else 1


def _own_check(package: Package) -> ToolReport:
    # Read again from the tree, as a reviewer will have it: copied and renamed.
    verdicts = check_paths([package.tree], package.request.ruleset)
    passed = accepted(verdicts)
    findings = [
        replace(finding, found=f"{verdict.path.name}: {finding.found}")
        for verdict in verdicts
        # One log of ten may fail; its errors are no news when the folder passes.
        for finding in verdict.errors
        if not passed
    ]
    return ToolReport("check of this repository", passed, "valid" if passed else "not valid", tuple(findings))


def _comparison(package: Package, summary: Summary | None) -> ToolReport:
    """Report whether score, scaling and samples are the official ones."""
    findings = tuple(_differences(package, summary)) if summary else ()
    passed = summary is not None and not findings
    said = "not the official ones" if summary else "there are no official ones"
    said = "equal to the official ones" if passed else said
    return ToolReport("score, scaling, samples", passed, said, findings)


def _differences(package: Package, summary: Summary) -> Iterator[Finding]:
    written = package.results / "scaling.json"
    # The package checker writes the file where a score is scaled, and removes it where it is not.
    factor = json.loads(written.read_text("utf-8"))["scaling_factor"] if written.is_file() else 1.0
    figures = [
        ("the score in minutes", package.minutes, summary.minutes),
        ("the scaling of scaling.json", package.scaling, factor),
        ("the scaling of the summarizer", package.scaling, summary.scaling),
    ]
    if package.division == "closed":
        figures.append(("the mean samples to the target", package.outlook.mean, summary.samples))
    for name, ours, theirs in figures:
        # A figure that one of the two lacks is a difference as well.
        if ours is None or theirs is None or not math.isclose(ours, theirs, rel_tol=AGREEMENT):
            remedy = "do not submit it: one of the two programs is wrong about these logs; compare what it printed"
            yield Finding(None, "", "result summarizer", f"{name} is {ours} here and {theirs} there", remedy)


def _print(package: Package, reports: list[ToolReport]) -> None:
    request = package.request
    say(f"{package.tree}: {request.system.stem}, {package.division} division, ruleset {request.ruleset}")
    say(f"score {package.minutes:.4f} minutes. {describe_selection(package)}")
    say(package.outlook.sentence)
    say()
    say(f"{'':<28} {'verdict':<8} says")
    for report in reports:
        say(f"{report.tool:<28} {'pass' if report.passed else 'FAIL':<8} {report.verdict}")
    findings = [*package.findings, *(finding for report in reports for finding in report.findings)]
    if findings:
        say()
    for finding in findings:
        say(finding)
    if package.left_out:
        few = ", ".join(map(visible, package.left_out[:MAX_NAMED]))
        more = len(package.left_out) - MAX_NAMED
        say()
        say(f"not in the source, because of its name or size: {few}{f' and {more} more' if more > 0 else ''}")
    say()
    say(f"What the official tools printed: {output_folder(package.tree)}")
    say(NOT_A_RESULT)
