"""Grade the violations of a log's records: errors, warnings if accepted submissions have them too, or no finding.

`compliance.log.order` yields the violations. Some do not apply to logs of other software, where settings may be on any
line and every process may log the start of initialisation. Consequences of a reported fault, such as a missing record, are
not reported.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Literal

from compliance.log import rules
from compliance.log.findings import Finding, Severity, shown
from compliance.log.order import Violation, left_open, violations
from compliance.log.reader import Log
from compliance.log.record import Record
from compliance.log.run import LoggedRun
from console.text import counted

TIMELINE = tuple(rules.NEXT_PHASE)
"""Records that divide a log into phases, in their order."""

Defect = Literal["joined", "cut off", "headless"]


@dataclass
class CheckedLog:
    """A log under check.

    `run` is the state of the run at the end of the log. `broken` holds (record, violation) pairs in file order.
    """

    log: Log
    ruleset: str
    run: LoggedRun = field(init=False)
    broken: list[tuple[Record, Violation]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        # In logs of other software, settings may follow the records that depend on them.
        self.run = LoggedRun(self.log.header, {key: records[0] for key, records in self.log.by_key.items()})
        for record in self.log.records:
            # Other software logs many keys of its own, which the official checker ignores.
            if record.key in rules.KEYS:
                self.broken += [(record, violation) for violation in violations(self.run, record, self.ruleset)]
            self.run.add(record)

    @property
    def aborted(self) -> bool:
        return self.run.status == "aborted"

    @cached_property
    def defect(self) -> Defect | None:
        """Why the file is not the log of one complete run; None if it may be one."""
        run, log = self.run, self.log
        if not run.first or log.given_up:
            return None
        start = run.first.get("run_start")
        if start:
            later = {key: record.line for key, record in run.last.items() if record.line > start.line}
            # Every process may log init_start, but a later init_start with new settings belongs to another run.
            if "init_start" in later and {"submission_benchmark", "init_stop"} & later.keys():
                return "joined"
        if not {"run_stop"} & {*run.first, *self.lost_keys}:
            return "cut off"
        if not {"init_start", "submission_benchmark", "run_start"} & {*run.first, *self.lost_keys}:
            return "headless"
        return None

    @cached_property
    def lost_keys(self) -> frozenset[str]:
        """Keys of unreadable records, as far as the keys can be recognised."""
        return frozenset().union(*(problem.keys for problem in self.log.problems if problem.severity == "error"))

    @cached_property
    def disorder(self) -> tuple[Record, str] | None:
        """The first record that begins its phase too early, and the key of the earlier phase that begins after it."""
        first = self.run.first
        for earlier, later in combinations(TIMELINE, 2):
            if earlier in first and later in first and first[earlier].line > first[later].line:
                return first[later], earlier
        return None


def at(
    record: Record, found: str, expected: str, remedy: str, rule: str | None = None, severity: Severity = "error"
) -> Finding:
    """Return a finding about a record. `rule` defaults to the rule of the record's key."""
    known = rules.KEYS.get(record.key)
    where = rule or (known.source if known else "")
    # An unknown key is escaped, without the quotes that shown() adds.
    key = record.key if known else shown(record.key)[1:-1]
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
    # For a log that was cut off, another finding covers the open intervals.
    for violation in left_open(context.run) if context.run.is_ended else ():
        record = context.run.open[violation.key]
        if severity := _grade(context, record, violation):
            yield finding_of(record, violation, severity)
    yield from _check_evaluations(context)


def _grade(context: CheckedLog, record: Record, violation: Violation) -> Severity | None:
    rule = rules.KEYS[record.key]
    match violation.kind:
        case "type":
            # The official parser ignores event_type. An invalid event_type, which `parse_line` reports, is empty here.
            return "warning" if rule.event_type != "POINT_IN_TIME" and record.event_type else None
        case "place":
            return _grade_of_place(context, record)
        case "repeat":
            # As in the official checker, repeating a required key is an error only if the values differ. Seeds are
            # compared by `compliance.submission.check`.
            needed = rule.required_in(context.ruleset, context.run.division) and rule.key != "seed"
            same = record.value == context.run.first[record.key].value
            # A second run_start or run_stop changes the score, but the official checker only warns of it.
            return "error" if rule.key in ("run_start", "run_stop") or (needed and not same) else "warning"
        case "value":
            return _grade_of_value(record)
        case "pair":
            return _grade_of_pair(context, record.key)
        case "metadata" | "init time":
            return "error"
        # "span" and "evaluation" bind only our writer. `_check_evaluations` grades "schedule" and "count".
        case _:
            return None


def _grade_of_place(context: CheckedLog, record: Record) -> Severity | None:
    rule, run = rules.KEYS[record.key], context.run
    is_interval = record.key in rules.INTERVALS or record.key in rules.INTERVALS.values()
    # Records of settings may be on any line of the log.
    has_place = is_interval or rule.phases == ("run",) or record.key == "cache_clear"
    # A wrong order of the phases is a separate finding.
    if context.disorder or record.key in TIMELINE[1:] or not has_place:
        return None
    if rule.phases == ("run",) and not {"run_start", "run_stop"} <= run.first.keys():
        return None
    is_late = record.key in ("block_stop", "epoch_stop") and record.line > run.first["run_stop"].line
    return "warning" if is_late or record.key == "cache_clear" else "error"


def _grade_of_value(record: Record) -> Severity:
    # Logs of accepted submissions contain cache_clear null, seeds as text, and 0 for unused settings.
    value = record.value
    if record.key == "cache_clear":
        return "warning"
    if record.key == "seed":
        return "warning" if isinstance(value, str) and value.strip().removeprefix("-").isdecimal() else "error"
    if record.key.startswith("opt_") or record.key in ("num_warmup_steps", "start_warmup_step"):
        return "warning" if rules.is_number(value) else "error"
    return "error"


def _grade_of_pair(context: CheckedLog, key: str) -> Severity | None:
    # An epoch may end with the run (common.yaml), and open submissions log one block for many evaluations.
    name, division = key.partition("_")[0], context.run.division
    start, stop = f"{name}_start", f"{name}_stop"
    if start in TIMELINE or start not in context.run.first or {start, stop} & context.lost_keys:
        return None
    if stop not in context.run.first and rules.KEYS[stop].required_in(context.ruleset, division):
        return None  # another finding reports the missing start
    return "warning" if name == "epoch" or division == "open" else "error"


# Evaluations


def _check_evaluations(context: CheckedLog) -> Iterator[Finding]:
    """Check evaluations against the schedule. If epoch_num does not count sequences, only warn about that."""
    run, schedule, batch = context.run, context.run.schedule, context.run.global_batch_size
    samples = epoch_nums(run)
    is_complete = len(samples) == len(context.log.all("eval_accuracy")) and "eval_accuracy" not in context.lost_keys
    if not samples or not is_complete:
        return  # other findings report these
    if counts_no_sequences(samples, batch):
        found = f"epoch_num {samples[0]}" + (f" to {samples[-1]}" if samples[-1] != samples[0] else "")
        found += f" at {counted(len(samples), 'evaluation')}"
        trained = run.count_of("train_samples")
        if trained and schedule and (due := round(trained / schedule.interval)) != len(samples):
            found += f", and train_samples {trained} would be after evaluation {due}"
        remedy = "log the true count; the RCP checker reads it, unless it is told to take train_samples"
        yield at(run.accuracies[0], found, "the sequences trained so far", remedy, "TR 24.6", "warning")
        return
    # The schedule does not include an evaluation of the untrained model.
    is_regular = _is_regular(samples[1:] if samples[0] == 0 else samples, run)
    for record, violation in context.broken:
        if record.key == "eval_accuracy" and violation.kind in ("schedule", "count"):
            lenient = violation.kind == "schedule" and is_regular
            yield finding_of(record, violation, "warning" if lenient else "error")


def epoch_nums(run: LoggedRun) -> list[int]:
    """Return epoch_num of every evaluation; empty if any evaluation lacks it."""
    counts = [record.metadata.get("epoch_num") for record in run.accuracies]
    samples = [count for count in counts if rules.is_integer(count)]
    return samples if len(samples) == len(counts) else []


def counts_no_sequences(samples: list[int], batch: int | None) -> bool:
    """Tell whether epoch_num holds placeholders, or counts evaluations or epochs instead of sequences."""
    if max(samples) < (batch or 1):
        return True
    constant, counted = [samples[0]] * len(samples), list(range(samples[0], samples[0] + len(samples)))
    return len(samples) > 1 and samples in (constant, counted)


def _is_regular(samples: list[int], run: LoggedRun) -> bool:
    """Tell whether the evaluations follow a regular interval near the interval of the rules.

    Accepted submissions count a partial last batch, round the interval differently, or use the interval of a
    neighbouring batch size. Each interval may therefore differ from the median interval by 3 % or a batch, and the
    median interval from the rules' interval by 25,000 samples plus a batch.
    """
    if not samples or run.schedule is None:
        return False
    interval, batch = run.schedule.interval, run.schedule.global_batch_size
    steps = sorted(after - before for before, after in zip([0, *samples], samples, strict=False))
    median = steps[len(steps) // 2]
    slack = max(batch, 0.03 * interval)
    return steps[-1] - median <= slack and median - steps[0] <= slack and abs(median - interval) <= 25_000 + batch
