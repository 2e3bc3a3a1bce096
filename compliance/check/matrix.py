"""Find which rulesets would accept a log, and what keeps it from the others.

The rulesets ask for different keys, and the same tool of today judges logs of all rounds: a log that was accepted in
its round may fail under it, and one that holds what all of them ask passes in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compliance.check.checker import judge
from compliance.log import rules
from compliance.log.findings import Finding, Verdict
from compliance.log.reader import read_log


@dataclass(frozen=True)
class Acceptance:
    """A ruleset's answer for a log.

    Attributes:
        reasons: what keeps the official checker from accepting it; empty when it does.
    """

    verdict: Verdict
    reasons: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {
            "file": str(self.verdict.path),
            "ruleset": self.verdict.ruleset,
            "official": self.verdict.official,
            "ours": self.verdict.ours,
            "reasons": [_in_words(reason) for reason in self.reasons],
        }


def acceptance(path: Path) -> list[Acceptance]:
    """Judge the log at `path` under every ruleset, the oldest first.

    Raises:
        ValueError: no such file, or the official checker is not installed.
    """
    # Read once: what the records are does not depend on the ruleset.
    log = read_log(path)
    rows = []
    for ruleset in rules.RULESETS:
        verdict, opinion = judge(log, ruleset)
        reasons: tuple[Finding, ...] = ()
        if verdict.official == "fail":
            keys = frozenset().union(*(said.keys for said in opinion.complaints if said.severity == "error"))
            # The checker names no key for a line that it cannot read.
            # A failure without any reason would help nobody.
            reasons = tuple(found for found in verdict.errors if found.key in keys or not found.key) or verdict.errors
        rows.append(Acceptance(verdict, reasons))
    return rows


def table(rows: list[Acceptance]) -> list[str]:
    """Format the answers of all rulesets for a terminal, line by line."""
    lines = [f"{rows[0].verdict.path}", "ruleset  official  ours  what keeps it out"]
    for row in rows:
        reasons = [_in_words(reason) for reason in row.reasons] or [""]
        head = f"{row.verdict.ruleset:<9}{row.verdict.official:<10}{row.verdict.ours:<6}"
        lines += [f"{head if not index else ' ' * len(head)}{reason}".rstrip() for index, reason in enumerate(reasons)]
    return lines


def _in_words(finding: Finding) -> str:
    place = f"line {finding.line}: " if finding.line else ""
    return f"{place}{finding.key + ': ' if finding.key else ''}{finding.sentence}"
