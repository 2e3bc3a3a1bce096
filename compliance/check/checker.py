"""Judge whether a log is a valid result: by this repository's rules, and by the official checker beside them.

What only the official checker objects to becomes a finding as well, so that nothing passes here that fails there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from compliance.check.checks import checks_of
from compliance.check.grades import TIMELINE, CheckedLog
from compliance.log import rules
from compliance.log.findings import Finding, Verdict
from compliance.log.reader import MAX_LINE_BYTES, Log, read_log
from compliance.official import checker as official


def check_file(path: Path, ruleset: str = rules.NEWEST_RULESET) -> Verdict:
    """Read and check one log.

    Raises:
        ValueError: no such file or ruleset, or the official checker is not installed.
    """
    return check_log(read_log(path), ruleset)


def check_log(log: Log, ruleset: str = rules.NEWEST_RULESET) -> Verdict:
    """Check a log that has been read, under one ruleset or, by `rules.AUTO`, the newest one that accepts it.

    Raises:
        ValueError: no such ruleset, or the official checker is not installed.
    """
    if ruleset == rules.AUTO:
        return _newest_acceptance(log)
    rules.check_ruleset(ruleset)
    return _verdict(log, ruleset, _official_opinion(log, ruleset))


def _newest_acceptance(log: Log) -> Verdict:
    """The verdict under the newest ruleset that accepts the log, or else the one with the fewest official errors."""
    opinion = _official_opinion(log, rules.NEWEST_RULESET)
    best = _verdict(log, rules.NEWEST_RULESET, opinion)
    # The logs of this repository satisfy every ruleset: what the newest one objects to is a fault.
    if best.passed or log.chain.opened or not opinion.judged:
        return best
    fewest = opinion.errors
    for older in reversed(rules.RULESETS[:-1]):
        opinion = _official_opinion(log, older)
        if opinion.outcome == "fail" and (opinion.errors >= fewest or not opinion.judged):
            continue
        verdict = _verdict(log, older, opinion)
        if verdict.passed:
            return verdict
        if opinion.errors < fewest:
            best, fewest = verdict, opinion.errors
    return best


def _verdict(log: Log, ruleset: str, opinion: official.Opinion) -> Verdict:
    context = CheckedLog(log, ruleset)
    own = [finding for check in checks_of(context) for finding in check(context)]
    # If the file is not the log of one whole run, the official checker's complaints all follow from that.
    findings = own if context.defect else [*own, *_unexplained(context, own, opinion)]
    return Verdict(
        path=log.path,
        ruleset=ruleset,
        official=opinion.outcome,
        # What belongs to no line stands above; sorted() leaves findings of one line in the order of the checks.
        findings=tuple(sorted(_collapse(findings), key=lambda finding: finding.line or 0)),
        # As logged: the run's own `division` falls back to closed where the log does not say, and a verdict must not
        # claim that.
        division=str(named.value) if (named := context.run.first.get("submission_division")) else None,
        status=None if context.run.status is None else str(context.run.status),
    )


def _official_opinion(log: Log, ruleset: str) -> official.Opinion:
    if log.given_up:
        return official.Opinion("fail", (official.Complaint(f"not asked: {log.given_up}"),), judged=False)
    # The evidence lacks that line, so that an answer would be about another log.
    if log.overlong:
        text = f"not asked: it would need hours for a record of more than {MAX_LINE_BYTES} bytes"
        return official.Opinion("fail", (official.Complaint(text),), judged=False)
    return official.opinion(log.evidence, ruleset)


def _unexplained(context: CheckedLog, own: list[Finding], opinion: official.Opinion) -> Iterator[Finding]:
    """Yield findings for what the official checker says and `own` does not explain."""
    errors = {finding.key for finding in own if finding.severity == "error"}
    errors = errors.union(*(problem.keys for problem in context.log.problems if problem.severity == "error"))
    # A complaint that fails the log needs an error of the checks here, or the log would pass here and fail there; a
    # warning is explained by any finding about its key.
    explained = {"error": errors, "warning": errors | {finding.key for finding in own}}
    # A file without a record is one finding of our own, whatever else is missing in it.
    is_log = context.log.token_lines > 0
    fails = bool(errors)
    for complaint in opinion.complaints:
        if not is_log or explained[complaint.severity] & complaint.keys:
            continue
        if complaint.severity == "error" and fails:
            # What follows from faults that have been named: a message about no key in particular, "the run has not
            # started" after records out of order, records that an aborted run did not come to.
            if not complaint.keys or (complaint.about_state and errors & {*TIMELINE, "submission_division"}):
                continue
            if complaint.absent and context.aborted:
                continue
        line = complaint.line
        record = next((record for record in context.log.records if record.line == line), None) if line else None
        yield Finding(
            line,
            # Of several keys the first by name: the order of a set of texts is another one in each process.
            min(complaint.keys, default=""),
            f"mlperf-logging, ruleset {context.ruleset}",
            f"the official checker says: {complaint.text}",
            f"see the rule files in mlperf_logging/compliance_checker/training_{context.ruleset}",
            record.logged_at if record else None,
            complaint.severity,
        )
        # From here on, vaguer complaints may follow from this one.
        fails = fails or complaint.severity == "error"
    if opinion.outcome == "fail" and not fails:
        found = "the official checker fails the log without saying why"
        remedy = "run `python -m mlperf_logging.compliance_checker` on this file"
        yield Finding(None, "", f"mlperf-logging, ruleset {context.ruleset}", found, remedy)


def _collapse(findings: list[Finding]) -> list[Finding]:
    """Collapse all records with the same fault into one finding: the first, with the number of the others."""
    kinds: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        # Without `found`, whose numbers differ from record to record of one fault.
        kind = (finding.key, finding.remedy, finding.rule, finding.severity)
        kinds.setdefault(kind, []).append(finding)
    return [replace(same[0], more=len(same) - 1) for same in kinds.values()]
