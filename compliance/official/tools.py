"""Run the official tools on a submission tree, and pass on what they object to.

Four of the five end with exit status 0 whatever they found, print their verdict in the middle of hundreds of lines, and
skip what they do not recognise. So each one's own words decide: passed is what says that it passed and shows that it
looked. What they print is kept beside the tree.
"""

from __future__ import annotations

import csv
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compliance.artefact import write_whole
from compliance.log.findings import Finding
from compliance.log.rules import SUBMISSION_RUNS
from compliance.official.process import run_program
from console.text import visible

TIMEOUT_S = 1800
MAX_MESSAGE_CHARACTERS = 400
MAX_LINE_CHARACTERS = 4000
"""Maximum characters of a line that are searched: some patterns need time quadratic in them."""


@dataclass(frozen=True)
class ToolReport:
    """Report of one tool on the tree.

    Attributes:
        verdict: its own words, in one line; "not asked" for a tool that does not apply.
        findings: its complaints in its own words; the check of this repository explains them.
    """

    tool: str
    passed: bool
    verdict: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Summary:
    """The row of the result summarizer for one system.

    Attributes:
        minutes: the score; None where it gives none.
        scaling: the factor in it.
        samples: mean samples to the target; None in the open division.
    """

    minutes: float | None
    scaling: float
    samples: float | None


def ask_all(tree: Path, system: str, ruleset: str, division: str) -> tuple[list[ToolReport], Summary | None]:
    """Run all five tools on the tree of one organisation.

    The package checker goes first, because it writes the scaling.json that the summarizer reads.

    Args:
        tree: the folder <org>/.
        system: name of the system whose score is wanted.

    Raises:
        ValueError: mlperf-logging is not installed, or the output of the tools cannot be written beside the tree.
    """
    # Named from the root on, because each tool runs in a folder of its own.
    tree = tree.resolve()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        # In this order: a list is built from left to right.
        reports = [
            _package_checker(place, tree, ruleset, division),
            _repository_checker(place, tree, ruleset),
            _system_checker(place, tree / "systems" / f"{system}.json", ruleset),
            _convergence_checker(place, tree / "results" / system / "bert", ruleset, division),
        ]
        report, summary = _summarizer(place, tree, system, ruleset)
        for printed in place.glob("*.txt"):
            # Their lines hold names from the tree, which may steer a terminal.
            lines = printed.read_text("utf-8", "replace").split("\n")
            write_whole(output_folder(tree) / printed.name, "\n".join(map(visible, lines)))
    return [*reports, report], summary


def output_folder(tree: Path) -> Path:
    """The folder that keeps what the tools printed."""
    return tree.with_name(f"{tree.name}-official-tools")


def _run(place: Path, tool: str, *arguments: str | Path, log_output: bool = True) -> tuple[int, str]:
    """Exit status and output of one tool, in a folder of its own: they leave files behind."""
    folder, output = place / tool, place / f"{tool}.txt"
    folder.mkdir()
    # Each would write a log file into the folder where it runs; the summarizer knows no such option.
    options = ["--log_output", os.devnull] if log_output else []
    status = run_program(tool, [*map(str, arguments), *options], folder, output, TIMEOUT_S)
    return status, output.read_text("utf-8", "replace")


def _package_checker(place: Path, tree: Path, ruleset: str, division: str) -> ToolReport:
    tool = "package checker"
    _, output = _run(place, "package_checker", tree, "training", ruleset)
    success = "PACKAGE CHECKER FOUND NO ERRORS" in output
    # What it prints only while it reads a log, the seeds, the reference points.
    looked = [f"Run {SUBMISSION_RUNS}/{SUBMISSION_RUNS}"]
    looked += ["Running Seed Checker", "Running RCP Checker"] if division == "closed" else []
    blind: list[Finding] = []
    if success and (unseen := [step for step in looked if step not in output]):
        found = f"it reports success without {', '.join(map(repr, unseen))}: it has not looked"
        remedy = "the folder must be named bert, the ruleset one with BERT, and the division in lower case"
        blind.append(Finding(None, "", tool, found, remedy))
    return _report(tool, success and not blind, "found no errors" if success else "found errors", output, blind)


def _repository_checker(place: Path, tree: Path, ruleset: str) -> ToolReport:
    known = max(ruleset, "2.0.0")  # it asks the same of every round, and knows none before
    _, output = _run(place, "repo_checker", tree, "training", known)
    passed = "ALL CHECKS PASSED" in output
    return _report("repository checker", passed, "all checks passed" if passed else "checks failed", output)


def _system_checker(place: Path, description: Path, ruleset: str) -> ToolReport:
    _, output = _run(place, "system_desc_checker", description, "training", ruleset)
    passed = "System description checker passed" in output
    return _report("system description checker", passed, "passed" if passed else "failed", output)


def _convergence_checker(place: Path, results: Path, ruleset: str, division: str) -> ToolReport:
    tool = "convergence (RCP) checker"
    if division == "open":
        return ToolReport(tool, True, "not asked: no reference in the open division", ())
    # Started by itself, it resets the scaling of a folder without a name, which is that of /.
    if Path("/scaling.json").exists():
        return ToolReport(tool, True, "not asked: it would delete the file /scaling.json", ())
    status, output = _run(place, "rcp_checker", results, "--rcp_usage", "training", "--rcp_version", ruleset)
    match = re.search(r"^\w+ - (.*), RCP test (PASSED|FAILED)", output, re.MULTILINE)
    # The only one of the five whose exit status says something; the words are asked all the same.
    passed = status == 0 and match is not None and match[2] == "PASSED"
    return _report(tool, passed, f"{match[1]}: {match[2].lower()}" if match else "no verdict", output)


def _summarizer(place: Path, tree: Path, system: str, ruleset: str) -> tuple[ToolReport, Summary | None]:
    out = place / "summary.csv"
    status, output = _run(place, "result_summarizer", tree, "training", ruleset, "--csv", out, log_output=False)
    summary = _read_summary(out, tree, system) if status == 0 else None
    scored = summary is not None and summary.minutes is not None
    words = f"{summary.minutes:.4f} minutes, scaling {summary.scaling:.6f}" if summary and scored else "no score"
    return _report("result summarizer", scored, words, output), summary


def _read_summary(out: Path, tree: Path, system: str) -> Summary | None:
    """The row of a system; the tables name it by the system_name of its description."""
    name = json.loads((tree / "systems" / f"{system}.json").read_text("utf-8"))["system_name"]
    rows = []
    # Two tables beside each other: the score stands in one, scaling and samples in the other.
    for path in (out, out.with_name("summary_detailed.csv")):
        if not path.is_file():
            return None
        with path.open(encoding="utf-8", newline="") as file:
            matching = [row for row in csv.DictReader(file) if row.get("system") == name]
        # Two systems of one name cannot be told apart in the tables.
        if len(matching) != 1:
            return None
        rows += matching
    score, detailed = rows
    return Summary(
        _optional_number(score.get("bert")),
        _optional_number(detailed.get("bert:rcp_scaling_factor")) or 1.0,
        _optional_number(detailed.get("bert:samples_to_converge")),
    )


def _optional_number(text: str | None) -> float | None:
    return float(text) if text and text != "nan" else None


def _report(tool: str, passed: bool, words: str, output: str, more: Sequence[Finding] = ()) -> ToolReport:
    """A report with the complaints; a failure that no known message explains is explained by the tool's last line."""
    findings = [*_complaints(tool, output), *more]
    # A failure must not stand there without a reason.
    if not passed and not any(finding.severity == "error" for finding in findings):
        last = visible(output.strip().rpartition("\n")[2], MAX_MESSAGE_CHARACTERS)
        findings.append(Finding(None, "", tool, f"it does not pass: {last}", "read what it printed, beside the tree"))
    return ToolReport(tool, passed, words, tuple(findings))


PROBLEM = re.compile(
    r"ERROR - |Result file |CRITICAL ERROR: |WARNING -  Skipping benchmark: |(?:\w+\.)*\w+(?:Error|Exception): "
)
"""Beginning of a line that says why a tool does not pass; the last one is the last line of a traceback."""

ONE_FAILED = "WARNING -  1 file does not comply, accepting this under olympic scoring"

ECHOES = re.compile(
    r"ERROR - (System description file checker failed|Seed checker failed|Please remove|Found|FAILED)|ERROR - -+$"
)
"""Lines that repeat or introduce another message."""


def _complaints(tool: str, output: str) -> Iterator[Finding]:
    """The complaints among the lines that a tool printed, each once."""
    seen: set[str] = set()
    for line in output.split("\n"):
        # A line may hold a whole record of a log.
        finding = _complaint(tool, line[:MAX_LINE_CHARACTERS])
        if finding and finding.found not in seen:
            seen.add(finding.found)
            yield finding


def _complaint(tool: str, line: str) -> Finding | None:
    if ONE_FAILED in line:
        found = "one log fails the compliance checker and is dropped as the slowest run"
        return Finding(None, "", tool, found, "nothing, if that is the run you know of", severity="warning")
    if not PROBLEM.match(line) or ECHOES.match(line):
        return None
    found = visible(line.removeprefix("ERROR - ").strip(), MAX_MESSAGE_CHARACTERS)
    return Finding(
        None, "", tool, found, "`python -m compliance check` on the tree says what to do, if a rule is broken"
    )
