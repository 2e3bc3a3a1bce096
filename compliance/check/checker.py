"""Judge whether a log is a valid result, by this repository's rules and by the official checker.

A fault that only the official checker reports becomes a finding too, so that no log passes here and fails there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

from compliance.check.checks import checks_of
from compliance.check.grades import TIMELINE, CheckedLog
from compliance.log import rules
from compliance.log.findings import Finding, Verdict
from compliance.log.reader import MAX_LINE_BYTES, Log, read_log
from compliance.official import checker as official
from console.text import counted


def check_file(path: Path, ruleset: str = rules.NEWEST_RULESET) -> Verdict:
    """Read and check one log.

    Raises ``ValueError`` if the file or the ruleset does not exist, or if the official checker is not installed.
    """
    return check_logs([read_log(path)], ruleset)[0]


def check_logs(logs: Sequence[Log], ruleset: str, limit: str = rules.NEWEST_RULESET) -> list[Verdict]:
    """Check logs under one ruleset. Raises as `check_file` does.

    With `rules.AUTO`, the ruleset is chosen from those up to `limit`: it is the one that accepts the most logs, and the
    newest one if several accept equally many.
    """

    @cache
    def under(ruleset: str) -> list[_Examination]:
        return [_Examination(log, ruleset) for log in logs]

    if ruleset != rules.AUTO:
        rules.check_ruleset(ruleset)
        return [_verdict(each) for each in under(ruleset)]
    tried: dict[int, list[Verdict]] = {}
    for candidate, expected in _candidates(logs, under, limit):
        # Under this ruleset, at most `expected` logs can pass both our own checks and the official checker. Stop if as many
        # logs have passed under an earlier ruleset, usually the first, which saves calls of the official checker.
        if tried and max(tried) >= expected:
            break
        pairs = zip(under(candidate), under(rules.NEWEST_RULESET), strict=True)
        verdicts = [replace(_verdict(each), missed=_missed(each, newest)) for each, newest in pairs]
        tried.setdefault(sum(verdict.passed for verdict in verdicts), verdicts)
    return tried[max(tried)]


class _Examination(CheckedLog):
    """A log with the results of our own checks and of the official checker. Each check runs when its result is needed."""

    @cached_property
    def findings(self) -> list[Finding]:
        """Findings of our own checks."""
        return [finding for check in checks_of(self) for finding in check(self)]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def may_pass(self) -> bool:
        # Look for missing records first. This is ten times faster than all checks, and it rules out most rulesets.
        is_complete = all(self.ruleset in rules.KEYS[key].advised for key in self.log.missing(self.ruleset))
        return is_complete and not self.errors

    @cached_property
    def opinion(self) -> official.Opinion:
        log = self.log
        # Do not ask about a log with overlong lines. `log.evidence` omits them, so the checker would see a part of the log.
        overlong = f"it would need hours for a record of more than {MAX_LINE_BYTES} bytes" if log.overlong else ""
        if why := log.given_up or overlong:
            return official.Opinion("fail", (official.Complaint(f"not asked: {why}"),))
        return official.opinion(log.evidence, self.ruleset)


def _candidates(logs: Sequence[Log], under: Callable[[str], list[_Examination]], limit: str) -> list[tuple[str, int]]:
    """Return pairs, the best first: a ruleset for all logs, and the number of logs that pass our own checks under it.

    The best ruleset is the newest of those under which the most logs pass our own checks. The official checker is not
    asked. If all logs fail under all rulesets, only the ruleset with the fewest errors is returned.
    """
    newest_first = rules.RULESETS[rules.RULESETS.index(limit) :: -1]
    # A log with a digest chain comes from this repository, whose logs satisfy all rulesets. Try only the newest ruleset.
    if any(log.chain.opened for log in logs):
        return [(rules.NEWEST_RULESET, 0)]
    passing: dict[str, int] = {}
    for ruleset in newest_first:
        passing[ruleset] = sum(each.may_pass for each in under(ruleset))
        if passing[ruleset] == len(logs):
            break
    # sorted() keeps the order of equally good rulesets, so the newest of them comes first.
    accepting = sorted(((ruleset, number) for ruleset, number in passing.items() if number), key=lambda each: -each[1])
    if accepting:
        return accepting

    def faults(ruleset: str) -> tuple[int, int]:
        # Among rulesets with equally many errors, take the one with the fewest missing records.
        errors = sum(len(each.errors) for each in under(ruleset))
        return errors, sum(len(log.missing(ruleset)) for log in logs)

    return [(min(newest_first, key=faults), 0)]


def _verdict(examined: _Examination) -> Verdict:
    log, run = examined.log, examined.run
    # If the file is not the log of one complete run, this defect causes the official complaints. Ignore them.
    findings = [*examined.findings, *(() if examined.defect else _unexplained(examined))]
    return Verdict(
        path=log.path,
        ruleset=examined.ruleset,
        official=examined.opinion.outcome,
        findings=tuple(sorted(_collapse(findings), key=lambda finding: finding.line or 0)),
        # Report the division as logged: `LoggedRun.division` would replace a missing one by its default.
        division=str(named.value) if (named := run.first.get("submission_division")) else None,
        status=None if run.status is None else str(run.status),
        is_one_run=examined.defect not in ("joined", "ranks"),
    )


def _missed(examined: _Examination, newest: _Examination) -> str:
    if examined is newest:
        return ""
    said = missed_text(newest.errors)
    if not said and newest.opinion.outcome == "fail":
        return f"the official checker rejects it under {newest.ruleset}"
    return said


def missed_text(errors: Sequence[Finding]) -> str:
    """Return a text that names the first of these errors under the newest ruleset and counts the others; "" if none."""
    if not errors:
        return ""
    keys = dict.fromkeys(f"{finding.key}: {finding.found}" if finding.key else finding.found for finding in errors)
    first, more = next(iter(keys)), len(keys) - 1
    return f"{rules.NEWEST_RULESET} would fail it: {first}" + (f" and {counted(more, 'other error')}" if more else "")


def _unexplained(examined: _Examination) -> Iterator[Finding]:
    """Yield findings for the complaints of the official checker that our own findings do not explain."""
    log, ruleset, opinion = examined.log, examined.ruleset, examined.opinion
    errors = {finding.key for finding in examined.errors} | examined.lost_keys
    # An official error is explained only by one of our errors. Otherwise a log could pass here and fail there.
    # An official warning is explained by any of our findings.
    explained = {"error": errors, "warning": errors | {finding.key for finding in examined.findings}}
    fails = bool(errors)
    for complaint in opinion.complaints:
        if not log.token_lines or explained[complaint.severity] & complaint.keys:
            continue
        if complaint.severity == "error" and fails:
            # If our errors about phases explain it, skip a complaint about earlier records ("the run has not started").
            is_disordered = examined.misdated or errors & {*TIMELINE, "submission_division"}
            if not complaint.keys or (complaint.about_state and is_disordered):
                continue
            # Skip complaints about missing records of an aborted run, because it ended before it could log them.
            if complaint.absent and examined.aborted:
                continue
        record = next((record for record in log.records if record.line == complaint.line), None)
        yield Finding(
            complaint.line,
            min(complaint.keys, default=""),
            f"mlperf-logging, ruleset {ruleset}",
            f"the official checker says: {complaint.text}",
            f"see the rule files in mlperf_logging/compliance_checker/training_{ruleset}",
            record.logged_at if record else None,
            complaint.severity,
        )
        fails = fails or complaint.severity == "error"
    if opinion.outcome == "fail" and not fails:
        found = "the official checker fails the log without saying why"
        remedy = "run `python -m mlperf_logging.compliance_checker` on this file"
        yield Finding(None, "", f"mlperf-logging, ruleset {ruleset}", found, remedy)


def _collapse(findings: list[Finding]) -> list[Finding]:
    """Keep only the first finding of each fault. Its field `more` counts the other findings of this fault."""
    kinds: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        # Do not compare the text `found`, because it contains numbers that differ from record to record.
        kind = (finding.key, finding.remedy, finding.rule, finding.severity)
        kinds.setdefault(kind, []).append(finding)
    return [replace(same[0], more=len(same) - 1 + sum(each.more for each in same)) for same in kinds.values()]
