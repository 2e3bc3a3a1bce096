"""Results of a check: one `Finding` per fault, and one `Verdict` per file or folder."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from console.text import counted

Severity = Literal["error", "warning"]
Outcome = Literal["pass", "fail"]
Part = Literal["log", "folder", "description", "submission"]


@dataclass(frozen=True)
class Finding:
    """A rule violation in a log, a folder or a description.

    Attributes:
        line: line in the file, from 1; None if the fault is not in a single line.
        key: key of the record or field of the system description; "" if there is none.
        rule: document of the rule, such as "TR 24.4", "closed_bert.yaml" or "SR Directory structure".
        found: what was found and what was expected, in one sentence.
        source: source position "file:lineno" of the call that logged the record, if known.
        severity: "error" if it makes the log an invalid result; "warning" if accepted submissions have the same fault.
        more: number of further records with the same fault.
    """

    line: int | None
    key: str
    rule: str
    found: str
    remedy: str
    source: str | None = None
    severity: Severity = "error"
    more: int = 0

    @property
    def sentence(self) -> str:
        """The text `found`, followed by the number of further records that have the same fault."""
        return self.found + (f" (and {self.more} more like it)" if self.more else "")

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        key = f"{self.key}: " if self.key else ""
        logged_at = f"; logged at {self.source}" if self.source else ""
        return f"{self.severity}: {where}{key}{self.sentence} [{self.rule}{logged_at}]; {self.remedy}"

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self) | {"found": self.sentence}
        del fields["more"]  # `sentence` already states this number
        return fields


@dataclass(frozen=True)
class Verdict:
    """Outcome of checking a log, a folder or a description.

    Attributes:
        official: verdict of the official checker under the same ruleset. Its warnings do not count as errors.
        division: division as logged; None if not logged.
        status: status of run_stop; None if not logged.
        missed: what the newest ruleset would reject, if `rules.AUTO` chose an older one; else "".
        part: what was checked.
        is_one_run: False for a log that holds several attempts, or the records of several processes.
    """

    path: Path
    ruleset: str
    official: Outcome
    findings: tuple[Finding, ...]
    division: str | None
    status: str | None
    missed: str = ""
    part: Part = "log"
    is_one_run: bool = True

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def passed(self) -> bool:
        return not self.errors

    @property
    def ours(self) -> Outcome:
        return "pass" if self.passed else "fail"

    @property
    def summary(self) -> str:
        errors, warnings = len(self.errors), len(self.findings) - len(self.errors)
        counts = ((errors, "error"), (warnings, "warning"))
        said = ", ".join(counted(number, noun) for number, noun in counts if number)
        ruleset = f"ruleset {self.ruleset}" + (f" ({self.missed})" if self.missed else "")
        if self.passed:
            valid = f"valid {self.division} log" if self.division else "no errors"
            return f"{valid}, {ruleset}" + (f", {said}" if said else "")
        aborted = "not a valid result (aborted), " if self.status == "aborted" else ""
        return f"{aborted}{said}, {ruleset}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "ruleset": self.ruleset,
            "missed": self.missed,
            "official": self.official,
            "ours": self.ours,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def shown(value: object, limit: int = 80) -> str:
    """Format a value from a file for a message: shortened, with control characters escaped."""
    # Format the value as in JSON, because the reader sees JSON in the file.
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    # Shorten before escaping, because escaping may make the text ten times longer.
    text = ascii(value[:limit]) if isinstance(value, str) else ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
