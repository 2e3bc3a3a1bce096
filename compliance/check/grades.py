"""Decide whether each violation of a rule in a log becomes an error, a warning or no finding.

`compliance.log.order` yields the violations. A violation that accepted submissions contain too is only a warning. Logs of
other software may have settings on any line and an init_start from every process, which gives no finding. A violation that
is only the consequence of a reported fault, such as a missing record, gives no finding either.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from statistics import median_high
from typing import Literal

from compliance.log import rules
from compliance.log.findings import Finding, Severity, shown
from compliance.log.logged_run import LoggedRun
from compliance.log.order import Violation, left_open, violations
from compliance.log.reader import Log
from compliance.log.record import Record

TIMELINE = tuple(rules.NEXT_PHASE)
"""Keys of the records that begin the phases of a log, in order."""

SHORTEST_RESTART_MS = 10_000
"""Shortest time between the last record of a process that died and the first record of the next attempt."""

Defect = Literal["joined", "ranks", "cut off", "headless"]


class CheckedLog:
    """A log under check. `run` is the state of the run at the end of the log."""

    def __init__(self, log: Log, ruleset: str) -> None:
        self.log, self.ruleset, self.run = log, ruleset, log.run

    @cached_property
    def broken(self) -> list[tuple[Record, Violation]]:
        """Pairs of a record and a violation by this record, in file order."""
        # Give the run all settings in advance: in logs of other software they may follow the records that need them.
        run = LoggedRun(self.log.header, self.run.first)
        broken: list[tuple[Record, Violation]] = []
        for record in self.log.records:
            # Skip unknown keys: other software logs many, and the official checker ignores them.
            if record.key in rules.KEYS:
                broken += [(record, violation) for violation in violations(run, record, self.ruleset)]
            run.add(record)
        return broken

    @property
    def aborted(self) -> bool:
        return self.run.status == "aborted"

    @cached_property
    def defect(self) -> Defect | None:
        """Why the file is not the log of one complete run; None if it may be one."""
        run, log = self.run, self.log
        if not run.first or log.given_up:
            return None
        if self.second_start:
            return "joined"
        if self.writers > 1:
            return "ranks"
        if not {"run_stop"} & {*run.first, *self.lost_keys}:
            return "cut off"
        if not {"init_start", "submission_benchmark", "run_start"} & {*run.first, *self.lost_keys}:
            return "headless"
        return None

    @cached_property
    def writers(self) -> int:
        """Number of processes that each logged the whole run to this file, with their own run_start."""
        first, starts = self.run.first, self.log.all("run_start")
        if len(starts) < 2 or ("run_stop" in first and starts[1].line > first["run_stop"].line):
            return 1
        return median_high(len(self.log.all(key)) for key in (*rules.SETTINGS, *TIMELINE) if key in first)

    @cached_property
    def second_start(self) -> Record | None:
        """First record of a second attempt, such as a restart that logs to the same file; None if there is none."""
        begin: Record | None = None  # first record of the latest group of cache_clear and init_start records
        previous: Record | None = None
        silence_ms = 0  # time from the record before this group to its first record
        is_begun = is_cleared = False  # whether an init_start was logged, and whether a cache_clear followed it
        records = self.log.records
        for index, record in enumerate(records):
            if record.key not in rules.PER_RANK:
                begin = None if record.key in rules.KEYS else begin
                continue
            if begin is None:
                begin, silence_ms = record, record.time_ms - records[max(0, index - 1)].time_ms
            # If the next record has an earlier time, this record's clock was ahead, so its time does not prove a restart.
            is_ahead = any(following.time_ms < record.time_ms for following in records[index + 1 : index + 2])
            if previous and not is_ahead and self._is_late(record, previous):
                return record
            previous = record
            if record.key == "cache_clear":
                is_cleared = is_begun
            elif self._is_restart(record, silence_ms, is_cleared=is_cleared):
                return begin
            else:
                is_begun = True
        return None

    def _is_late(self, record: Record, previous: Record) -> bool:
        """Tell whether `record` is before all settings and so long after `previous` that it begins another attempt."""
        # A long time from cache_clear to init_start does not prove another attempt: a job may wait in a queue between them.
        if self.misdated or (previous.key == "cache_clear" and record.key != "cache_clear"):
            return False
        limit_ms = 60_000 * rules.init_limit_minutes(self.ruleset, self.run.division)
        begins = all(self.run.first[key].line > record.line for key in rules.SETTINGS if key in self.run.first)
        return begins and record.time_ms - previous.time_ms >= limit_ms

    def _is_restart(self, start: Record, silence_ms: int, *, is_cleared: bool) -> bool:
        """Tell whether an init_start begins another attempt. If not, a late process of the same run has logged it."""
        first, last = self.run.first, self.run.last
        before = {key for key in (*rules.SETTINGS, *TIMELINE) if key in first and first[key].line < start.line}
        again = {key for key in before if last[key].line > start.line}
        if "run_stop" in before:
            return True
        if "init_stop" in before:
            return bool(again - {"init_start"})
        # A second attempt logs all settings again. If a setting is logged no more often than init_stop, there is only one
        # attempt: each of its processes has logged the setting and init_stop once.
        if silence_ms < SHORTEST_RESTART_MS:
            return False
        before = before.intersection(rules.SETTINGS)
        ends = max(1, len(self.log.all("init_stop")))
        if not before or before - again or min(len(self.log.all(key)) for key in before) <= ends:
            return False
        # A launcher may repeat submission_*, and every process may log a seed. Therefore a second attempt is proven only by
        # a cache_clear after the first init_start, or by at least two repeated settings other than submission_*.
        return is_cleared or sum(not key.startswith("submission_") for key in before) > 1

    @cached_property
    def lost_keys(self) -> frozenset[str]:
        """Keys of unreadable records, as far as the keys can be recognised."""
        return frozenset().union(*(problem.keys for problem in self.log.problems if problem.severity == "error"))

    @cached_property
    def misdated(self) -> list[Record]:
        """Records whose time is not in milliseconds since 1970."""
        return [record for record in self.log.records if not rules.FIRST_MS <= record.time_ms < rules.LAST_MS]

    @cached_property
    def disorder(self) -> tuple[Record, str] | None:
        """A record that begins its phase too early, and the key that must come before it; None if the order is right."""
        first = self.run.first
        for earlier, later in combinations(TIMELINE, 2):
            if earlier in first and later in first and first[earlier].line > first[later].line:
                return first[later], earlier
        return None


def at(
    record: Record, found: str, expected: str, remedy: str, rule: str | None = None, severity: Severity = "error"
) -> Finding:
    """Return a finding about a record. `rule` defaults to the rule of the record's key."""
    where = rule or rules.KEYS[record.key].source
    # Escape an unknown key, and remove the quotes that shown() adds.
    key = record.key if record.key in rules.KEYS else shown(record.key)[1:-1]
    return Finding(record.line, key, where, f"{found}; expected {expected}", remedy, record.logged_at, severity)


def finding_of(record: Record, violation: Violation, severity: Severity = "error") -> Finding:
    return at(record, violation.found, violation.expected, violation.remedy, violation.rule, severity)


def check_records(context: CheckedLog) -> Iterator[Finding]:
    if context.disorder:
        record, earlier = context.disorder
        found = f"before {earlier} on line {context.run.first[earlier].line}"
        yield at(record, found, f"{record.key} after {earlier}", "log the phases in order", "common.yaml; TR 11")
    for record, violation in context.broken:
        if severity := _grade(context, record, violation):
            yield finding_of(record, violation, severity)
    # Skip a log without run_stop: it may end within an interval, and `_check_defect` reports that it was cut off.
    for violation in left_open(context.run) if context.run.is_ended else ():
        record = context.run.open[violation.key]
        if record.line < context.run.last["run_stop"].line and (severity := _grade(context, record, violation)):
            yield finding_of(record, violation, severity)
    yield from _check_extension(context)
    yield from _check_evaluations(context)


def _grade(context: CheckedLog, record: Record, violation: Violation) -> Severity | None:
    rule = rules.KEYS[record.key]
    decides: Severity = "error" if rule.decides_in(context.ruleset, context.run.division) else "warning"
    match violation.kind:
        case "type":
            # Only warn, because the official parser ignores event_type. If it is empty, `parse_line` has reported it.
            return "warning" if rule.event_type != "POINT_IN_TIME" and record.event_type else None
        case "place":
            return _grade_of_place(context, record)
        case "repeat":
            # Like the official checker, report a repeated required key as an error only if its values differ. Do the same
            # for an open run's target, because it decides the result. `compliance.submission` compares the seeds.
            division = context.run.division
            needed = rule.required_in(context.ruleset, division) and rule.key != "seed"
            needed |= division == "open" and rule.key == "quality_target"
            same = record.value == context.run.first[record.key].value
            # A second run_start or run_stop is an error, because it changes the score. The official checker only warns.
            return "error" if rule.key in ("run_start", "run_stop") or (needed and not same) else "warning"
        case "value":
            return "warning" if decides == "warning" else _grade_of_value(record)
        case "pair":
            return _grade_of_pair(context, record.key)
        case "metadata":
            return decides
        case "init time":
            return None if context.misdated else "error"
        # Only our writer must follow the rules "span" and "evaluation". `_check_evaluations` grades "schedule" and "count".
        case _:
            return None


def _grade_of_place(context: CheckedLog, record: Record) -> Severity | None:
    rule, run = rules.KEYS[record.key], context.run
    # Accept settings on any line. Intervals, records of the timed run and cache_clear must be in their phase.
    has_place = rule.event_type != "POINT_IN_TIME" or rule.phases == ("run",) or record.key == "cache_clear"
    # `check_records` reports a wrong order of the phases, so do not report its consequences.
    if context.disorder or record.key in TIMELINE[1:] or not has_place:
        return None
    if rule.phases == ("run",) and not {"run_start", "run_stop"} <= run.first.keys():
        return None
    if record.key == "cache_clear":
        return "warning"
    # `_check_extension` gives one warning for all records after run_stop, so report none of them here.
    return None if rule.phases == ("run",) and record.line > run.first["run_stop"].line else "error"


def _grade_of_value(record: Record) -> Severity:
    # Only warn of values that accepted submissions contain: cache_clear null, seeds as text, and 0 for unused settings.
    value = record.value
    if record.key == "cache_clear":
        return "warning"
    if record.key == "seed":
        return "warning" if isinstance(value, str) and re.fullmatch(r"\s*-?\d+\s*", value, re.ASCII) else "error"
    if record.key.startswith("opt_") or record.key in ("num_warmup_steps", "start_warmup_step"):
        return "warning" if rules.is_number(value) else "error"
    return "error"


def _grade_of_pair(context: CheckedLog, key: str) -> Severity | None:
    # Only warn of an unclosed epoch, because it may end with the run (common.yaml). Only warn of other unclosed intervals
    # in open runs, because these may log one block for many evaluations.
    name, division = key.partition("_")[0], context.run.division
    start, stop = f"{name}_start", f"{name}_stop"
    if start in TIMELINE or start not in context.run.first or {start, stop} & context.lost_keys:
        return None
    if stop not in context.run.first and rules.KEYS[stop].required_in(context.ruleset, division):
        return None  # `_check_presence` reports the missing stop
    return "warning" if name == "epoch" or division == "open" else "error"


# Evaluations


def _check_extension(context: CheckedLog) -> Iterator[Finding]:
    """Warn of training after run_stop. It is no error, because a short run may go on until its power has been measured."""
    stop = context.run.first.get("run_stop")
    timed = [each for each in context.log.records if each.key in rules.KEYS and rules.KEYS[each.key].phases == ("run",)]
    later = [record for record in timed if stop and record.line > stop.line and record.key != "run_stop"]
    if later:
        found, expected = "logged after run_stop", "no training after it, except for a power measurement"
        remedy = "make sure that the run had reached its target at run_stop: what follows does not count"
        first = at(later[0], found, expected, remedy, "power_measurement.adoc; TR 11", "warning")
        yield replace(first, more=len(later) - 1)


def _check_evaluations(context: CheckedLog) -> Iterator[Finding]:
    """Check evaluations against the schedule. If epoch_num does not count sequences, only warn that it does not."""
    run, schedule = context.run, context.run.schedule
    evaluations = context.log.all("eval_accuracy")
    # Skip logs in which an eval_accuracy is unreadable, lacks epoch_num or precedes run_start: other findings say so.
    if not run.epoch_nums or "eval_accuracy" in context.lost_keys or evaluations[0] is not run.accuracies[0]:
        return
    off_schedule = [*_off_schedule(context)] if not run.other_unit else []
    yield from off_schedule
    if run.doubt and not any(finding.severity == "error" for finding in off_schedule):
        found, trained = run.doubt, run.train_samples
        if trained and schedule and run.trained is None:
            found += f", and train_samples {trained} would be after evaluation {round(trained / schedule.interval)}"
        remedy = "log the true count; the RCP checker reads it, unless it is told to take train_samples"
        yield at(run.accuracies[0], found, "the sequences trained so far", remedy, "TR 24.6", "warning")


def _off_schedule(context: CheckedLog) -> Iterator[Finding]:
    run = context.run
    broken = [(record, each) for record, each in context.broken if record.key == "eval_accuracy"]
    uncounted = [(record, violation) for record, violation in broken if violation.kind == "count"]
    off_schedule = [(record, violation) for record, violation in broken if violation.kind == "schedule"]
    irregular = _irregular_evaluation(run) if off_schedule else None
    for record, violation in uncounted:
        yield finding_of(record, violation)
    if irregular is not None and not uncounted:
        index, step, usual = irregular
        record = run.accuracies[index]
        violation = next((violation for each, violation in off_schedule if each is record), off_schedule[0][1])
        found = f"evaluation at {run.epoch_nums[index]} samples, {step} after the previous one"
        found += "" if usual is None else f" instead of about {usual}"
        yield replace(finding_of(record, violation._replace(found=found)), more=len(off_schedule) - 1)
    elif not uncounted:
        for record, violation in off_schedule:
            yield finding_of(record, violation, "warning")


def _irregular_evaluation(run: LoggedRun) -> tuple[int, int, int | None] | None:
    """Return the first evaluation whose distance from the previous one is irregular; None if all distances are regular.

    The result has the evaluation's index, its distance, and the usual distance. The usual distance is None if it equals the
    rules' interval or is far from it. Accepted submissions count a partial last batch, round the interval differently, or
    use the interval of a neighbouring batch size. Packed batches hold more or fewer sequences than their nominal size.
    Therefore a distance may be off by two batches or by 3 % of the interval. The usual distance may differ from the rules'
    interval by 25,000 samples and a batch.
    """
    schedule, samples = run.schedule, run.epoch_nums
    if schedule is None:
        return None
    interval, batch = schedule.interval, schedule.global_batch_size
    # Skip an evaluation of the untrained model, which is not in the schedule.
    skipped = int(samples[0] == 0)
    steps = [after - before for before, after in zip([0, *samples[skipped:]], samples[skipped:], strict=False)]
    usual = median_high(steps) if steps else interval
    is_near = abs(usual - interval) <= 25_000 + batch
    slack = max(2 * batch, round(0.03 * interval))
    for index, step in enumerate(steps):
        if abs(step - (usual if is_near else interval)) > slack:
            return index + skipped, step, usual if is_near and usual != interval else None
    return None
