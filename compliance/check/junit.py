"""Write the verdicts as JUnit XML, which CI servers show as tests: a test case for each log, folder and description."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from compliance.artefact import write_whole
from compliance.log.findings import Verdict
from console.text import visible


def write_junit(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Write one test case for each verdict; errors are its failure, warnings its output.

    Raises:
        ValueError: the file cannot be written.
    """
    failures = sum(not verdict.passed for verdict in verdicts)
    suite = Element("testsuite", name="compliance", tests=str(len(verdicts)), failures=str(failures), errors="0")
    for verdict in verdicts:
        # `visible` leaves no control character, which XML could not hold.
        name = visible(verdict.path)
        case = SubElement(suite, "testcase", classname="compliance.check", name=name, file=name)
        if verdict.errors:
            failure = SubElement(case, "failure", message=visible(verdict.summary))
            failure.text = "\n".join(visible(finding) for finding in verdict.errors)
        if warnings := [finding for finding in verdict.findings if finding.severity == "warning"]:
            SubElement(case, "system-out").text = "\n".join(visible(finding) for finding in warnings)
    write_whole(path, f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(suite, encoding="unicode")}\n')
