"""Judge whether a log is a valid result, by this repository's rules and by the official checker.

A fault that only the official checker reports becomes a finding too, so that no log passes only this check.
"""

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

    Raises ``ValueError`` if the file or the ruleset does not exist, or if the official checker is not installed.
    """
    return check_log(read_log(path), ruleset)


def check_log(log: Log, ruleset: str = rules.NEWEST_RULESET) -> Verdict:
    """Check a log under a ruleset; `rules.AUTO` takes the newest ruleset that accepts it. Raises as `check_file` does."""
    if ruleset == rules.AUTO:
        return _newest_acceptance(log)
    rules.check_ruleset(ruleset)
    return _verdict(log, ruleset, _official_opinion(log, ruleset))


def _newest_acceptance(log: Log) -> Verdict:
    """Return the verdict of the newest ruleset that accepts the log, else of the ruleset with the fewest official errors."""
    opinion = _official_opinion(log, rules.NEWEST_RULESET)
    best = _verdict(log, rules.NEWEST_RULESET, opinion)
    # Logs of this repository open a digest chain. They are written for all rulesets, so older rulesets cannot help.
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
    # If the file is not the log of one complete run, this defect causes the official checker's complaints.
    findings = own if context.defect else [*own, *_unexplained(context, own, opinion)]
    return Verdict(
        path=log.path,
        ruleset=ruleset,
        official=opinion.outcome,
        findings=tuple(sorted(_collapse(findings), key=lambda finding: finding.line or 0)),
        # Report the division as logged, without the default of `LoggedRun.division`.
        division=str(named.value) if (named := context.run.first.get("submission_division")) else None,
        status=None if context.run.status is None else str(context.run.status),
    )


def _official_opinion(log: Log, ruleset: str) -> official.Opinion:
    # `log.evidence` omits overlong lines, so the official checker would judge an incomplete log.
    overlong = f"it would need hours for a record of more than {MAX_LINE_BYTES} bytes" if log.overlong else ""
    if why := log.given_up or overlong:
        return official.Opinion("fail", (official.Complaint(f"not asked: {why}"),), judged=False)
    return official.opinion(log.evidence, ruleset)


def _unexplained(context: CheckedLog, own: list[Finding], opinion: official.Opinion) -> Iterator[Finding]:
    """Yield findings for the complaints of the official checker that `own` does not explain."""
    errors = {finding.key for finding in own if finding.severity == "error"} | context.lost_keys
    # An official error is explained only by one of our errors. Otherwise a log could pass here and fail there.
    # An official warning is explained by any of our findings.
    explained = {"error": errors, "warning": errors | {finding.key for finding in own}}
    is_log = context.log.token_lines > 0
    fails = bool(errors)
    for complaint in opinion.complaints:
        if not is_log or explained[complaint.severity] & complaint.keys:
            continue
        if complaint.severity == "error" and fails:
            # These complaints are consequences of faults already found: a message without a key, "the run has not
            # started" after records out of order, or records that an aborted run did not reach.
            if not complaint.keys or (complaint.about_state and errors & {*TIMELINE, "submission_division"}):
                continue
            if complaint.absent and context.aborted:
                continue
        line = complaint.line
        record = next((record for record in context.log.records if record.line == line), None) if line else None
        yield Finding(
            line,
            min(complaint.keys, default=""),
            f"mlperf-logging, ruleset {context.ruleset}",
            f"the official checker says: {complaint.text}",
            f"see the rule files in mlperf_logging/compliance_checker/training_{context.ruleset}",
            record.logged_at if record else None,
            complaint.severity,
        )
        fails = fails or complaint.severity == "error"
    if opinion.outcome == "fail" and not fails:
        found = "the official checker fails the log without saying why"
        remedy = "run `python -m mlperf_logging.compliance_checker` on this file"
        yield Finding(None, "", f"mlperf-logging, ruleset {context.ruleset}", found, remedy)


def _collapse(findings: list[Finding]) -> list[Finding]:
    """Keep the first finding of each fault, and store the number of further findings of this fault in its `more`."""
    kinds: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        # Do not compare `found`: its numbers differ from record to record.
        kind = (finding.key, finding.remedy, finding.rule, finding.severity)
        kinds.setdefault(kind, []).append(finding)
    return [replace(same[0], more=len(same) - 1) for same in kinds.values()]
