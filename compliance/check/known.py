"""Leave out known findings, which `check --json` wrote to a file earlier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compliance.artefact import MAX_FILE_BYTES
from compliance.log.findings import Finding, Verdict
from console.files import read_json

Known = frozenset[tuple[str, str, str, str]]
"""(file, key, rule, found) of each known finding. The line may have moved."""


def read_known(path: Path) -> Known:
    """Read the findings of an earlier check.

    Raises:
        ValueError: the file cannot be read, or is not what `check --json` writes.
    """
    verdicts = read_json(path, MAX_FILE_BYTES, "write it by `python -m compliance check PATH... --json > FILE`")
    try:
        found = [(verdict["file"], finding) for verdict in verdicts for finding in verdict["findings"]]
        return frozenset((file, finding["key"], finding["rule"], finding["found"]) for file, finding in found)
    except (TypeError, KeyError) as error:
        expected = "expected what `python -m compliance check PATH... --json` prints"
        raise ValueError(f"{path}: is no list of verdicts with findings, {expected}") from error


def without_known(verdicts: Sequence[Verdict], known: Known) -> tuple[list[Verdict], int]:
    """Return the verdicts without the known findings, and how many findings were left out."""
    kept = [replace(verdict, findings=tuple(_new(verdict, known))) for verdict in verdicts]
    return kept, sum(len(verdict.findings) for verdict in verdicts) - sum(len(verdict.findings) for verdict in kept)


def _new(verdict: Verdict, known: Known) -> list[Finding]:
    return [
        finding
        for finding in verdict.findings
        if (str(verdict.path), finding.key, finding.rule, finding.sentence) not in known
    ]
