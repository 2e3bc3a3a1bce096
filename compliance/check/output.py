"""Write verdicts as lines of text with a total, as SARIF 2.1.0, as GitHub's workflow annotations, or as JUnit XML.

Specification: OASIS, Static Analysis Results Interchange Format 2.1.0. A SARIF rule stands for a section of the benchmark's
rules or for a rule file, and a SARIF result for one finding. Paths are relative to the current folder, as code scanning
expects. Code review shows files, not folders, so a finding about a folder is attached to its first log.
"""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree.ElementTree import Element, SubElement, tostring

from compliance.artefact import MAX_FILE_BYTES, write_whole
from compliance.folders import absolute
from compliance.log.findings import Finding, Verdict
from compliance.log.rules import NEWEST_RULESET
from console.files import read_json
from console.program import say, say_annotation
from console.text import counted, json_document, visible

MAX_NAMED = 5  # maximum number of failures that the total, which is the last line, lists by name

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
TOOL = "compliance"
# GitHub code scanning's name for the root of the checked-out source.
ROOT = "%SRCROOT%"

Known = frozenset[tuple[str, str, str, str]]
"""Known findings, each as (file, key, rule, found). The line number is left out, because lines may move."""


def read_known(path: Path) -> Known:
    """Read the findings that an earlier `check --json` printed. Raises ``ValueError`` for any other file."""
    verdicts = read_json(path, MAX_FILE_BYTES, "write it by `python -m compliance check PATH... --json > FILE`")
    try:
        found = [(verdict["file"], finding) for verdict in verdicts for finding in verdict["findings"]]
        return frozenset((file, finding["key"], finding["rule"], finding["found"]) for file, finding in found)
    except (TypeError, KeyError) as error:
        expected = "expected what `python -m compliance check PATH... --json` prints"
        raise ValueError(f"{path}: not a list of verdicts with findings, {expected}") from error


def without_known(verdicts: Sequence[Verdict], known: Known) -> tuple[list[Verdict], int]:
    """Return the verdicts without the known findings, and the number of findings left out."""
    kept = []
    for verdict in verdicts:
        keyed = [((str(verdict.path), each.key, each.rule, each.sentence), each) for each in verdict.findings]
        kept.append(replace(verdict, findings=tuple(finding for key, finding in keyed if key not in known)))
    return kept, sum(len(verdict.findings) for verdict in verdicts) - sum(len(verdict.findings) for verdict in kept)


def say_verdicts(verdicts: Sequence[Verdict], *, quiet: bool = False) -> None:
    """Print each verdict with its findings. If `quiet`, print only errors."""
    for verdict in verdicts:
        if quiet and verdict.passed:
            continue
        _say_verdict(verdict)
        for finding in verdict.errors if quiet else verdict.findings:
            say(f"    {finding}")


def _say_verdict(verdict: Verdict) -> None:
    word = "PASS" if verdict.passed else "FAIL"
    text = f" {verdict.path}: official {verdict.official}, ours {verdict.ours}: {verdict.summary}"
    if not sys.stdout.isatty():
        say(word + text)
        return
    from rich.console import Console
    from rich.text import Text

    line = Text(word, style="bold green" if verdict.passed else "bold red")
    Console(highlight=False).print(line.append(visible(text), style="not bold default"), soft_wrap=True)


def total(verdicts: Sequence[Verdict], *, is_accepted: bool, ignored: int = 0) -> str:
    """Return one line that counts the passing and failing logs, folders and descriptions, and names the failing ones."""
    others = [verdict for verdict in verdicts if verdict.part != "log"]
    logs = [verdict for verdict in verdicts if verdict.part == "log"]
    parts = [_share(counted(len(logs), "log"), logs)] if logs or not others else []
    if others:
        noun = "folder or description" if len(others) == 1 else "folders and descriptions"
        parts.append(_share(f"{len(others):,} {noun}", others))
    if is_accepted and not all(verdict.passed for verdict in logs):
        parts.append("each folder passes without the log that fails")
    rulesets = {verdict.ruleset for verdict in verdicts}
    if rulesets - {NEWEST_RULESET}:
        parts.append(f"checked under ruleset {', '.join(sorted(rulesets))}")
    return "; ".join([*parts, *([f"{counted(ignored, 'known finding')} ignored"] if ignored else [])])


def _share(counted_noun: str, verdicts: Sequence[Verdict]) -> str:
    failed = [str(verdict.path) for verdict in verdicts if not verdict.passed]
    passed = len(verdicts) - len(failed)
    said = [f"{passed} {'passes' if passed == 1 else 'pass'}"] if passed or not failed else []
    if failed:
        more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        verb = "fails" if len(failed) == 1 else "fail"
        said.append(f"{len(failed)} {verb}: {', '.join(failed[:MAX_NAMED])}{more}")
    return f"{counted_noun}: {', '.join(said)}"


def sarif(verdicts: Sequence[Verdict], root: Path) -> dict[str, Any]:
    """Build a SARIF log with one run. Paths are relative to `root`, except for files outside of `root`."""
    pairs = [(verdict, finding) for verdict in verdicts for finding in verdict.findings]
    # List each rule once. Results refer to a rule by its index in this list.
    texts = {_rule_id(finding): finding.rule or "log format" for _, finding in pairs}
    places = {name: index for index, name in enumerate(texts)}
    run = {
        "tool": {"driver": {"name": TOOL, "rules": [_rule(name, text) for name, text in texts.items()]}},
        # Without the trailing slash, resolving a path against this URI would drop the last folder (RFC 3986).
        "originalUriBaseIds": {ROOT: {"uri": absolute(root).as_uri() + "/"}},
        "results": [_result(verdict, finding, places, root) for verdict, finding in pairs],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def write_sarif(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the findings to a file, with paths relative to the current folder. Raises as `write_whole` does."""
    write_whole(path, json_document(sarif(verdicts, Path.cwd())) + "\n")


def write_junit(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Write a JUnit test case for each verdict. Errors become the failure, and warnings the output."""
    failures = sum(not verdict.passed for verdict in verdicts)
    suite = Element("testsuite", name=TOOL, tests=str(len(verdicts)), failures=str(failures), errors="0")
    for verdict in verdicts:
        # `visible` escapes control characters, which XML cannot contain.
        name = visible(verdict.path)
        case = SubElement(suite, "testcase", classname="compliance.check", name=name, file=name)
        if verdict.errors:
            failure = SubElement(case, "failure", message=visible(verdict.summary))
            failure.text = "\n".join(visible(finding) for finding in verdict.errors)
        if warnings := [finding for finding in verdict.findings if finding.severity == "warning"]:
            SubElement(case, "system-out").text = "\n".join(visible(finding) for finding in warnings)
    write_whole(path, f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(suite, encoding="unicode")}\n')


def say_annotations(verdicts: Sequence[Verdict]) -> None:
    """Print a workflow annotation for each finding, with paths relative to the current folder."""
    for verdict in verdicts:
        # Use os.path.relpath(), because Path.relative_to() would refuse a log outside of the current folder.
        file = os.path.relpath(absolute(_shown_file(verdict.path)))
        for finding in verdict.findings:
            properties = {"file": file, "line": finding.line or 1, "title": finding.rule}
            say_annotation(finding.severity, _describe(verdict, finding), properties)


def _rule_id(finding: Finding) -> str:
    """Return the identifier of a rule, such as "TR-24.4" for "TR 24.4". It does not change with the message."""
    return re.sub(r"[^\w.]+", "-", finding.rule, flags=re.ASCII).strip("-")


def _rule(name: str, text: str) -> dict[str, Any]:
    return {
        "id": name,
        "shortDescription": {"text": text},
        "help": {"text": f"{text}. TR: training_rules.adoc, SR: submission_rules.adoc, *.yaml: the official checker."},
        "properties": {"tags": ["compliance"]},
    }


def _result(verdict: Verdict, finding: Finding, places: dict[str, int], root: Path) -> dict[str, Any]:
    name = _rule_id(finding)
    artifact = _location(_shown_file(verdict.path), root)
    # Paths and values may contain characters that UTF-8 cannot encode, so escape them.
    identity = "\n".join((artifact["uri"], name, finding.key, finding.found)).encode("utf-8", "backslashreplace")
    return {
        "ruleId": name,
        "ruleIndex": places[name],
        "level": finding.severity,
        "message": {"text": visible(_describe(verdict, finding))},
        # Show a finding without a line on line 1, which is the first line in SARIF.
        "locations": [{"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": finding.line or 1}}}],
        # The fingerprint identifies a finding by its content, because lines move when a log is rewritten. It has the form
        # that code scanning uses: 16 hex digits, a colon and a number.
        "partialFingerprints": {"primaryLocationLineHash": hashlib.sha256(identity).hexdigest()[:16] + ":1"},
    }


def _describe(verdict: Verdict, finding: Finding) -> str:
    folder = "" if _shown_file(verdict.path) == verdict.path else "In this folder: "
    key = f"{finding.key}: " if finding.key else ""
    logged_at = f" Logged at {finding.source}." if finding.source else ""
    return f"{folder}{key}{finding.sentence}. Remedy: {finding.remedy}.{logged_at}"


def _shown_file(path: Path) -> Path:
    # Show a finding about a folder at its first log, because code review shows files, not folders. Misnamed logs match
    # the pattern, too, because the finding may be about one of them.
    logs = sorted(path.glob("result*")) if path.is_dir() else []
    return next((log for log in logs if log.is_file()), path)


def _location(path: Path, root: Path) -> dict[str, str]:
    """Return the SARIF location of a file, relative to `root` if the file is in it."""
    whole, base = absolute(path), absolute(root)
    if not whole.is_relative_to(base):
        return {"uri": whole.as_uri()}
    # Quote the bytes of the name, because they may not be UTF-8.
    return {"uri": quote(os.fsencode(whole.relative_to(base).as_posix())) or ".", "uriBaseId": ROOT}
