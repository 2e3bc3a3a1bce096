"""The findings as annotations of a workflow: GitHub shows each beside the line that it is about."""

from __future__ import annotations

import os
from collections.abc import Sequence

from compliance.check.sarif import described, shown_file
from compliance.folders import absolute
from compliance.log.file import STDIN
from compliance.log.findings import Verdict
from console.program import say_annotation


def say_annotations(verdicts: Sequence[Verdict]) -> None:
    """Print an annotation a finding, with paths relative to the current folder."""
    for verdict in verdicts:
        for finding in verdict.findings:
            properties: dict[str, object] = {"title": finding.rule} if finding.rule else {}
            # What came on standard input is no file beside whose lines GitHub could show anything.
            if verdict.path != STDIN:
                # Not relative_to(), which refuses a log outside of the current folder.
                file = os.path.relpath(absolute(shown_file(verdict.path)))
                properties = {"file": file, "line": finding.line or 1} | properties
            say_annotation(finding.severity, described(verdict, finding), properties)
