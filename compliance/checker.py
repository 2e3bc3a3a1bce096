"""Is this log a valid result? The rules of this repository first, then the official checker, one list of findings.

The official checker leaves much unsaid (it accepts a second run_start, an aborted run, evaluations off schedule), so
the checks here are stricter; and it says the rest badly (record indices, raw expressions, crashes), so its verdict is
translated in `compliance.official` and dropped where a finding here explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from compliance import official, rules
from compliance.log import Log, Record, read_log

TIMELINE = tuple(rules.NEXT_PHASE)
"""The records that divide a log into phases, in their order."""

MAX_SHOWN = 80
"""Most characters of a logged value in a message."""


@dataclass(frozen=True)
class Finding:
    """One thing that keeps a log from being a valid result.

    Attributes:
        line: line in the file, from 1; None when something is absent.
        key: key of the record, "" when the line is no record.
        found, expected: what stands there, and what should.
        source: where the rule stands.
        remedy: what to do about it.
        logged_at: source position "file:lineno" that logged the record, where the log names it.
        more: how many further records have the same fault.
    """

    line: int | None
    key: str
    found: str
    expected: str
    source: str
    remedy: str
    logged_at: str | None = None
    more: int = 0

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        key = f"{self.key}: " if self.key else ""
        more = f" (and {self.more} more like it)" if self.more else ""
        logged_at = f"; logged at {self.logged_at}" if self.logged_at else ""
        return f"{where}{key}{self.found}; expected {self.expected}{more} [{self.source}{logged_at}]; {self.remedy}"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check; it passes when nothing was found.

    Attributes:
        division: as logged, or None when the log does not say.
        status: of run_stop, or None.
    """

    path: Path
    ruleset: str
    division: str | None
    status: str | None
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether the log is a valid result under the rules."""
        return not self.findings

    @property
    def summary(self) -> str:
        """One line without the path."""
        if self.passed:
            return f"valid {self.division} log, ruleset {self.ruleset}"
        aborted = "not a valid result (aborted), " if self.status == "aborted" else ""
        count = len(self.findings)
        return f"{aborted}{count} finding{'s' if count > 1 else ''}, ruleset {self.ruleset}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": str(self.path),
            "passed": self.passed,
            "ruleset": self.ruleset,
            "division": self.division,
            "status": self.status,
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass(frozen=True)
class _Context:
    log: Log
    ruleset: str
    division: rules.Division
    aborted: bool

    def integer(self, key: str) -> int | None:
        """The value of the first record of `key`, when it is an integer > 0."""
        record = self.log.first(key)
        return record.value if record and rules.POSITIVE_INTEGER.accepts(record.value) else None


def check_file(path: Path, ruleset: str = rules.NEWEST_RULESET) -> Verdict:
    """Read and check one log.

    Raises:
        ValueError: no such file or ruleset, or the official checker is not installed.
    """
    return check_log(read_log(path), ruleset)


def check_log(log: Log, ruleset: str = rules.NEWEST_RULESET) -> Verdict:
    """Check a log that has been read, whose file is still in place: the official checker reads it again.

    Raises:
        ValueError: no such ruleset, or the official checker is not installed.
    """
    rules.check_ruleset(ruleset)
    stop = log.last("run_stop")
    status = stop.metadata.get("status") if stop else None
    named = log.first("submission_division")
    # A division in the wrong case is a finding of its own; the other rules then follow what was meant.
    division: rules.Division = "open" if named and str(named.value).lower() == "open" else "closed"
    context = _Context(log, ruleset, division, aborted=status == "aborted")
    findings = [finding for check in _CHECKS for finding in check(context)]
    findings += _official_findings(context, findings)
    return Verdict(
        path=log.path,
        ruleset=ruleset,
        division=str(named.value) if named else None,
        status=str(status) if status is not None else None,
        findings=tuple(sorted(_collapse(findings), key=lambda finding: finding.line or 0)),
    )


def _at(record: Record, found: str, expected: str, remedy: str, source: str | None = None) -> Finding:
    rule = rules.KEYS.get(record.key)
    source = source or (rule.source if rule else "")
    return Finding(record.line, record.key, found, expected, source, remedy, record.logged_at)


def _show(value: object) -> str:
    """A value from the log for a message: what steers a terminal is escaped, and it is short."""
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _check_lines(context: _Context) -> Iterator[Finding]:
    for problem in context.log.problems:
        remedy = "write every record from one process, whole, on a line of its own"
        yield Finding(problem.line, "", problem.found, problem.expected, "log format", remedy)
    if not context.log.token_lines:
        remedy = "check the file that the run logged to"
        yield Finding(None, "", "no MLLOG record in the file", "the log of a run", "log format", remedy)


def _check_whole_run(context: _Context) -> Iterator[Finding]:
    if resumed := context.log.header.get("resumed from"):
        remedy = "submit a run that was timed from its start to its end"
        found = f"the run went on from a checkpoint, {_show(resumed)}"
        yield Finding(None, "", found, "a run trained from run_start on", "TR 11", remedy)


def _check_presence(context: _Context) -> Iterator[Finding]:
    if not context.log.token_lines:
        return
    present = {*context.log.by_key}.union(*(problem.keys for problem in context.log.problems))
    for rule in rules.KEYS.values():
        if not rule.required_in(context.ruleset, context.division) or rule.key in present:
            continue
        if rule.key.replace("block", "epoch") in present:
            continue  # blocks and epochs are alternatives
        if context.aborted and rule.key not in TIMELINE:
            continue  # an early end explains it, and the run is no result anyway
        times = "one record" if rule.once else "at least one record"
        found = "no record"
        remedy = f"log {rule.key} {' or '.join(rules.PHASE_NAMES[phase] for phase in rule.phases)}"
        yield Finding(None, rule.key, found, times, rule.source, remedy)


def _check_repeats(context: _Context) -> Iterator[Finding]:
    for key, records in context.log.by_key.items():
        rule = rules.KEYS.get(key)
        if rule is None or not rule.once:
            continue
        for record in records[1:]:
            why = "it would change the measured time" if key in ("run_start", "run_stop") else "values may not compete"
            found = f"logged again, first on line {records[0].line}"
            yield _at(record, found, f"exactly one record: {why}", "log it once, from one process")


def _check_values(context: _Context) -> Iterator[Finding]:
    for record in context.log.records:
        rule = rules.KEYS.get(record.key)
        if rule is None:
            continue
        if rule.value is not None and not rule.value.accepts(record.value):
            yield _at(record, f"value {_show(record.value)}", rule.value.wording, "correct the value that is logged")
        if rule.event_type != "POINT_IN_TIME" and record.event_type != rule.event_type:
            yield _at(record, f"event_type {record.event_type}", rule.event_type, "use the logger's start and end")
        if rules.COUNT.accepts(record.metadata.get(rules.alternative_metadata(record.key, context.ruleset) or "")):
            continue
        for name, expected in rule.metadata:
            if name not in record.metadata:
                yield _at(record, f"no metadata {name}", f"{name}: {expected.wording}", f"log {name} with it")
            elif not expected.accepts(record.metadata[name]):
                found = f"metadata {name} is {_show(record.metadata[name])}"
                yield _at(record, found, f"{name}: {expected.wording}", f"correct {name}")


def _check_time(context: _Context) -> Iterator[Finding]:
    latest = None
    for record in context.log.records:
        if record.key in rules.PER_RANK:
            continue
        if latest and record.time_ms < latest.time_ms:
            found = f"time_ms {record.time_ms} is {latest.time_ms - record.time_ms} ms before line {latest.line}"
            remedy = "log from one process with a clock that is not set back, and leave the file as written"
            yield _at(record, found, "times that never decrease", remedy, "TR 11")
        else:
            latest = record


def _check_order(context: _Context) -> Iterator[Finding]:
    """Each record in its phase. Absent records are reported by their absence, not by their consequences."""
    log = context.log
    # init_start may be logged by every rank; of the others a second one is reported as a repetition.
    position = {key: log.by_key[key][0].line for key in TIMELINE if key in log.by_key}
    for earlier, later in combinations(TIMELINE, 2):
        record = log.first(later)
        if record and earlier in position and position[earlier] > record.line:
            found = f"before {earlier} on line {position[earlier]}"
            yield _at(record, found, f"{later} after {earlier}", "log the phases in order", "common.yaml; TR 11")
            return
    for record in log.records:
        rule = rules.KEYS.get(record.key)
        if rule is None or record.key in TIMELINE[1:] or not _has_place(record.key):
            continue
        if record.key == "init_start" and record.line == position["init_start"]:
            continue
        if rule.phases == ("run",) and not {"run_start", "run_stop"} <= position.keys():
            continue
        phase = _phase_at(record.line, position)
        if phase not in rule.phases:
            expected = " or ".join(rules.PHASE_NAMES[allowed] for allowed in rule.phases)
            remedy = "log it when it happens"
            yield _at(record, f"logged {rules.PHASE_NAMES[phase]}", expected, remedy, "common.yaml; TR 11")


def _has_place(key: str) -> bool:
    """Whether the place of a record carries meaning; settings may stand anywhere in other people's logs."""
    rule = rules.KEYS[key]
    return key in rules.INTERVALS or key in rules.INTERVALS.values() or rule.phases == ("run",) or key == "cache_clear"


def _phase_at(line: int, position: dict[str, int]) -> rules.Phase:
    passed = [key for key in TIMELINE if key in position and position[key] < line]
    return rules.NEXT_PHASE[passed[-1]] if passed else "before"


def _check_pairs(context: _Context) -> Iterator[Finding]:
    remedy = "log the start and the stop of every interval"
    for start, stop in rules.INTERVALS.items():
        if start in TIMELINE or start not in context.log.by_key:
            continue
        if stop not in context.log.by_key and rules.KEYS[stop].required_in(context.ruleset, context.division):
            continue  # its absence has been reported
        opened: Record | None = None
        for record in context.log.records:
            if record.key == start:
                if opened:
                    yield _at(record, f"the one of line {opened.line} is still open", f"{stop} first", remedy, "TR 11")
                opened = record
            elif record.key == stop:
                if opened is None:
                    yield _at(record, "nothing is open", f"{start} first", remedy, "TR 11")
                opened = None
        if opened:
            yield _at(opened, "never closed", f"a {stop} after it", remedy, "TR 11")


def _check_init_time(context: _Context) -> Iterator[Finding]:
    starts, stop = context.log.all("init_start"), context.log.first("init_stop")
    if not starts or not stop:
        return
    limit = rules.INIT_LIMIT_MINUTES[context.division]
    minutes = (stop.time_ms - min(start.time_ms for start in starts)) / 60_000
    if minutes >= limit:
        remedy = "shorten compilation and warm-up, or start the clock sooner"
        yield _at(stop, f"initialisation took {minutes:.1f} min", f"less than {limit} min", remedy)


def _check_evaluations(context: _Context) -> Iterator[Finding]:
    batch = context.integer("global_batch_size")
    interval = context.integer("eval_interval_samples")
    if context.division == "closed":
        interval = rules.evaluation_interval(batch) if batch else None
    previous = 0
    for index, record in enumerate(context.log.all("eval_accuracy"), start=1):
        samples = record.metadata.get("epoch_num")
        if not rules.is_integer(samples):
            return  # reported with the values
        if samples <= previous:
            found = f"epoch_num {samples} after {previous}"
            yield _at(record, found, "epoch_num = sequences trained, increasing", "log the true count", "TR 24.6")
        elif batch and interval and not rules.is_on_schedule(index, samples, previous, interval, batch):
            due = rules.evaluation_samples(index, interval, batch)
            expected = f"evaluation {index} at {due}: every {interval} samples, rounded up to a whole batch"
            remedy = "evaluate on the schedule, and skip no evaluation"
            yield _at(record, f"evaluation at {samples} samples", expected, remedy, "TR 24.4")
        previous = samples


def _check_fixed_settings(context: _Context) -> Iterator[Finding]:
    if context.division != "closed" or context.aborted:
        return
    batch = context.integer("global_batch_size")
    fixed = {
        "quality_target": rules.QUALITY_TARGET,
        "eval_interval_samples": rules.evaluation_interval(batch) if batch else None,
        "eval_samples": rules.EVAL_SAMPLES,
    }
    remedy = "keep to the benchmark's setting, or say division open"
    for key, expected in fixed.items():
        record = context.log.first(key)
        if not record or expected is None or record.value == expected or not rules.is_number(record.value):
            continue
        yield _at(record, f"value {_show(record.value)} in a closed log", f"{expected}", remedy)
    cleared = context.log.all("cache_clear")
    if cleared and all(record.value is False for record in cleared):
        remedy = "drop the caches before each run (needs root), and log what was done"
        yield _at(cleared[0], f"value {_show(cleared[0].value)}: caches kept", "caches dropped before the run", remedy)


def _check_weights(context: _Context) -> Iterator[Finding]:
    records = context.log.all("weights_initialization")
    if (
        not records
        or context.aborted
        or not rules.KEYS["weights_initialization"].required_in(context.ruleset, context.division)
    ):
        return
    expected = set(rules.weight_tensors(rules.BERT_LARGE_LAYERS))
    seen: set[str] = set()
    for record in records:
        tensor = record.metadata.get("tensor")
        if not isinstance(tensor, str):
            continue  # reported with the values
        if tensor not in expected or tensor in seen:
            fault = "logged again" if tensor in seen else "not a tensor of BERT-Large"
            yield _at(
                record, f"{tensor}: {fault}", f"the {len(expected)} tensors, once each", "log the reference's names"
            )
        seen.add(tensor)
    missing = sorted(expected - seen)
    if missing:
        found = f"{len(missing)} tensors missing, among them {missing[0]}"
        yield _at(records[-1], found, f"the {len(expected)} tensors, once each", "log the reference's names")


def _check_result(context: _Context) -> Iterator[Finding]:
    log = context.log
    stop, last = log.last("run_stop"), log.last("eval_accuracy")
    if stop and context.aborted:
        remedy = "run again; a run that misses its target is no result"
        yield _at(stop, "status aborted: not a valid result (aborted)", "status success", remedy, "TR 11, 12")
        return
    if last is None or not rules.FRACTION.accepts(last.value):
        return
    logged = log.first("quality_target")
    target = rules.QUALITY_TARGET if context.division == "closed" else logged.value if logged else None
    if rules.is_number(target) and last.value < target:
        remedy = "train to the target, or log the run as aborted"
        yield _at(last, f"last accuracy {last.value:.5f}", f"at least the target {target:g}", remedy, "TR 24.2")
    trained, evaluated = log.first("train_samples"), last.metadata.get("epoch_num")
    if trained and rules.is_integer(trained.value) and rules.is_integer(evaluated) and trained.value != evaluated:
        expected = f"{evaluated}, the samples at the last evaluation (line {last.line})"
        yield _at(trained, f"value {_show(trained.value)}", expected, "log the samples at convergence", "TR 24.6")


_CHECKS: tuple[Callable[[_Context], Iterator[Finding]], ...] = (
    _check_lines,
    _check_whole_run,
    _check_presence,
    _check_repeats,
    _check_values,
    _check_time,
    _check_order,
    _check_pairs,
    _check_init_time,
    _check_evaluations,
    _check_fixed_settings,
    _check_weights,
    _check_result,
)


def _official_findings(context: _Context, own: list[Finding]) -> Iterator[Finding]:
    """What the official checker finds and `own` does not explain.

    It opens the rule files that division and benchmark name, wherever that leads, and its parser takes lines that are no
    records: it is run only on a log whose lines and names are in order. Otherwise `own` has the reason already.
    """
    names = [context.log.all("submission_division"), context.log.all("submission_benchmark")]
    if context.log.problems or not all(names) or not all(map(_is_valid, chain(*names))):
        return
    own_keys = {finding.key for finding in own}
    for complaint in official.complaints(context.log.path, context.ruleset):
        if own_keys & complaint.keys or (own and not complaint.keys):
            continue
        if complaint.about_state and own_keys & {*TIMELINE}:
            continue  # "the run has not started" and the like: the order has been reported
        if complaint.absent and context.aborted:
            continue
        record_line = context.log.token_lines[complaint.record] if complaint.record is not None else None
        record = next((record for record in context.log.records if record.line == record_line), None)
        yield Finding(
            record_line,
            min(complaint.keys, default=""),
            complaint.text,
            "no complaint of the official checker",
            f"mlperf-logging, ruleset {context.ruleset}",
            "see the rule file it names",
            record.logged_at if record else None,
        )


def _is_valid(record: Record) -> bool:
    value = rules.KEYS[record.key].value
    return value is None or value.accepts(record.value)


def _collapse(findings: list[Finding]) -> list[Finding]:
    """One finding for all records with the same fault: the first, with the number of the others."""
    kinds: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        kind = (finding.key, finding.remedy, finding.source)
        kinds.setdefault(kind, []).append(finding)
    return [replace(same[0], more=len(same) - 1) for same in kinds.values()]
