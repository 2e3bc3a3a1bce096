"""`python -m compliance package`: write the tree, run the official tools on it, and compare their figures with ours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from compliance.artefact import MAX_FILE_BYTES
from compliance.log.findings import Finding
from compliance.log.rules import NOT_A_RESULT
from compliance.official.package import Score, ask_for_score
from compliance.package.assembly import make_package
from compliance.package.tree import Package, PackageRequest
from compliance.submission.check import accepted, check_paths
from console.files import read_json
from console.program import say
from console.text import visible

AGREEMENT = 1e-9
"""Maximum relative difference between our figures and the official figures."""
MAX_NAMED = 100
"""Maximum number of files that are named as left out of the source."""


def run(request: PackageRequest) -> int:
    """Make the submission, run all checks on it, and print the findings.

    Returns:
        0 if all tools pass and their figures agree with ours, else 1.

    Raises:
        ValueError: the request does not allow a submission.
    """
    package = make_package(request)
    # Check the written tree, with copied and renamed files, as a reviewer will get it.
    verdicts = check_paths([request.tree], request.ruleset)
    tools = {request.tree: "repository checker", package.results: "package checker"}
    rows = [(tools[each.path], each.official == "pass") for each in verdicts if each.path in tools]
    rows += [
        ("system description checker", each.official == "pass") for each in verdicts if each.path.suffix == ".json"
    ]
    score = ask_for_score(request.tree, request.ruleset)
    differences, is_valid = [*_differences(package, score)], accepted(verdicts)
    rows += [("result summarizer", score.minutes is not None), ("check of this repository", is_valid)]
    rows += [("score, scaling, samples equal", not differences)]

    say(f"{request.tree}: {request.system.stem}, {package.division} division, ruleset {request.ruleset}")
    say(f"score {package.minutes:.4f} minutes. {package.choice}")
    say(package.outlook.sentence)
    say()
    for name, passed in rows:
        say(f"{name:<30} {'pass' if passed else 'FAIL'}")
    say()
    # One log of ten may fail. Its errors do not count if the folder passes.
    for verdict in () if is_valid else verdicts:
        for finding in verdict.errors:
            say(replace(finding, found=f"{verdict.path.name}: {finding.found}"))
    for finding in (*package.findings, *differences):
        say(finding)
    if package.left_out:
        few, more = ", ".join(map(visible, package.left_out[:MAX_NAMED])), len(package.left_out) - MAX_NAMED
        say(f"not in the source, because of its name or size: {few}{f' and {more} more' if more > 0 else ''}")
    say(NOT_A_RESULT)
    return 0 if all(passed for _, passed in rows) else 1


def _differences(package: Package, score: Score) -> Iterator[Finding]:
    # The summarizer's convergence check writes this file if the score is scaled, and removes it otherwise.
    written = package.results / "scaling.json"
    factor = read_json(written, MAX_FILE_BYTES, "")["scaling_factor"] if written.is_file() else 1.0
    figures = [
        ("score in minutes", package.minutes, score.minutes),
        ("scaling", package.scaling, score.scaling),
        ("scaling of scaling.json", package.scaling, factor),
    ]
    if package.division == "closed":
        figures.append(("mean samples to the target", package.outlook.mean, score.samples))
    for name, ours, theirs in figures:
        # A figure that only one side has is also a difference.
        if ours is None or theirs is None or not math.isclose(ours, theirs, rel_tol=AGREEMENT):
            remedy = "do not submit it: one of the two programs is wrong about these logs"
            found = f"the {name} is {ours} here and {theirs} there" + (f" ({score.fault})" if score.fault else "")
            yield Finding(None, "", "result summarizer", found, remedy)
