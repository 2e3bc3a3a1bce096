"""Find the rules that a record would break as the next record of a log.

`LoggedRun` holds the state of the run, and `violations` yields the broken rules. For a broken rule, the writer
raises an error and does not write the record. The check collects and grades violations. The watch warns if a violation
invalidates the run.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from compliance.log import rules
from compliance.log.findings import shown
from compliance.log.logged_run import OPENED_BY, LoggedRun, samples_of
from compliance.log.record import Record
from compliance.log.schedule import evaluation_interval
from console.text import did_you_mean

Kind = Literal[
    "key",  # an unknown key
    "type",  # a wrong event type
    "place",  # a record in the wrong phase
    "repeat",  # a second record of a key that is logged once
    "value",
    "metadata",
    "pair",  # an interval opened twice, or closed while not open
    "span",  # an interval that ends with fewer sequences trained than it began with
    "evaluation",  # an accuracy outside of an evaluation, or an evaluation without one
    "init time",
    "schedule",  # an evaluation off schedule
    "count",  # an epoch_num that cannot be the number of sequences trained
    "setting",  # a setting of a closed run that differs from the benchmark's
    "result",  # a final status that the evaluations contradict
]


class Violation(NamedTuple):
    """A broken rule. `key` is the key of the record, and `rule` names the document that states the rule."""

    kind: Kind
    key: str
    found: str
    expected: str
    remedy: str
    rule: str

    @property
    def sentence(self) -> str:
        return f"{self.key}: {self.found}, expected {self.expected} ({self.rule})"

    def __str__(self) -> str:
        return f"{self.sentence}; {self.remedy}"


def violations(run: LoggedRun, record: Record, ruleset: str | None = None) -> Iterator[Violation]:
    """Yield the rules that `record` would break as the next record of the log of `run`.

    This repository's writer passes None as the ruleset. Its log must satisfy all rulesets, and its evaluations must follow
    the schedule exactly.
    """
    key = record.key
    rule = rules.KEYS.get(key)
    if rule is None:
        expected = f"a key of the log{did_you_mean(key, rules.KEYS)}"
        yield Violation("key", key, "an unknown key", expected, "correct the key", "common.yaml")
        return
    if record.event_type != rule.event_type:
        remedy = "use the logger's start and end"
        yield Violation("type", key, f"event_type {record.event_type}", rule.event_type, remedy, rule.source)
    if run.phase not in rule.phases:
        expected = " or ".join(rules.PHASE_NAMES[phase] for phase in rule.phases)
        found = f"logged {rules.PHASE_NAMES[run.phase]}"
        yield Violation("place", key, found, expected, "log it when it happens", "common.yaml; TR 11")
    if rule.once and key in run.first:
        yield _repeated(run.first[key], record, rule)
    yield from _wrong_content(rule, record, ruleset)
    if rule.event_type != "POINT_IN_TIME":
        yield from _unpaired(run, record)
    if key == "init_stop":
        yield from _slow_start(run, record, ruleset)
    elif key in ("eval_start", "eval_accuracy", "eval_stop"):
        yield from _misplaced_evaluation(run, record, is_exact=ruleset is None)


def _repeated(first: Record, record: Record, rule: rules.KeyRule) -> Violation:
    why = "it would change the measured time" if rule.key in ("run_start", "run_stop") else "more values are ambiguous"
    found = f"logged again, first on line {first.line}" + ("" if record.value == first.value else " with another value")
    return Violation(
        "repeat", rule.key, found, f"exactly one record: {why}", "log it once, from one process", rule.source
    )


def _wrong_content(rule: rules.KeyRule, record: Record, ruleset: str | None) -> Iterator[Violation]:
    key, metadata = rule.key, record.metadata
    if rule.value is not None and not rule.value.accepts(record.value):
        value, wording, remedy = record.value, rule.value.wording, "correct the value that is logged"
        if isinstance(value, list) and len(value) == 1 and rule.value.accepts(value[0]):
            wording, remedy = f"{wording}, not a list of one", f"log {shown(value[0])} itself"
        yield Violation("value", key, f"value {shown(value)}", wording, remedy, rule.source)
    # A missing field is None here, which no rule accepts.
    wrong = [(name, wanted) for name, wanted in rule.metadata if not wanted.accepts(metadata.get(name))]
    # In some rulesets, a count in one other field may replace all required fields.
    if not wrong or (ruleset and rules.COUNT.accepts(metadata.get(rules.alternative_metadata(key, ruleset) or ""))):
        return
    for name, wanted in wrong:
        expected = f"{name}: {wanted.wording}"
        if name not in metadata:
            yield Violation("metadata", key, f"no metadata {name}", expected, f"log {name} with it", rule.source)
        else:
            found = f"metadata {name} is {shown(metadata[name])}"
            yield Violation("metadata", key, found, expected, f"correct {name}", rule.source)


def _unpaired(run: LoggedRun, record: Record) -> Iterator[Violation]:
    key, remedy, where = record.key, "log the start and the stop of every interval", "TR 11"
    opening = OPENED_BY.get(key)
    if opening is None:
        if key in run.open:
            found = f"the {key} on line {run.open[key].line} is still open"
            yield Violation("pair", key, found, f"{rules.INTERVALS[key]} first", remedy, where)
    elif opening not in run.open:
        yield Violation("pair", key, "nothing is open", f"{opening} first", remedy, where)
    else:
        begin, end = (samples_of(each.metadata) or 0 for each in (run.open[opening], record))
        if end < begin:
            yield Violation("span", key, f"{end} samples", f"at least {begin}", "log the true count", where)


def _slow_start(run: LoggedRun, record: Record, ruleset: str | None) -> Iterator[Violation]:
    # A second init_stop is already reported as a repeat.
    if run.init_start_ms is None or "init_stop" in run.first:
        return
    limit = rules.init_limit_minutes(ruleset or rules.NEWEST_RULESET, run.division)
    minutes = (record.time_ms - run.init_start_ms) / 60_000
    where = rules.KEYS["init_stop"].source
    if minutes < 0:
        found, remedy = f"{-minutes:.1f} min before every init_start", KEEP_THE_CLOCK
        yield Violation("init time", "init_stop", found, "a later time", remedy, where)
    # The rule files compare with <, so an initialisation of exactly the limit is too long.
    if minutes >= limit:
        found, remedy = f"initialisation took {minutes:.1f} min", "shorten compilation and warm-up"
        yield Violation("init time", "init_stop", found, f"less than {limit} min", remedy, where)


KEEP_THE_CLOCK = "log from one process with a clock that is not set back, and leave the file as written"
"""Remedy for decreasing times."""


def _misplaced_evaluation(run: LoggedRun, record: Record, *, is_exact: bool) -> Iterator[Violation]:
    opened = run.open.get("eval_start")
    where = rules.KEYS["eval_accuracy"].source
    if record.key == "eval_stop":
        if not run.is_evaluated:
            found, remedy = "the evaluation has no result", "log the accuracy of every evaluation"
            yield Violation("evaluation", "eval_stop", found, "eval_accuracy first", remedy, where)
        return
    if record.key == "eval_start":
        samples = samples_of(record.metadata)
    else:
        samples = record.metadata.get("epoch_num")
        # Compare with the open eval_start. Other programs may log the start of the next block before the accuracy.
        at = samples_of(opened.metadata) if opened else None
        remedy = "log each accuracy once, within its evaluation"
        if opened is None:
            yield Violation("evaluation", record.key, "no evaluation is open", "eval_start first", remedy, where)
        elif samples != at:
            expected = f"{at}, the samples of its eval_start"
            yield Violation("evaluation", record.key, f"epoch_num {shown(samples)}", expected, remedy, where)
        elif run.is_evaluated:
            found = "logged a second time in one evaluation"
            yield Violation("evaluation", record.key, found, "eval_stop", remedy, where)
    # There is no schedule outside of the timed run. `violations` reports a record there as in the wrong phase.
    if rules.is_integer(samples) and run.phase == "run":
        yield from _off_schedule(run, record.key, samples, is_exact=is_exact)


def _off_schedule(run: LoggedRun, key: str, samples: int, *, is_exact: bool) -> Iterator[Violation]:
    counted = run.accuracies[-1].metadata.get("epoch_num") if run.accuracies else 0
    schedule, previous = run.schedule, counted if rules.is_integer(counted) else 0
    if samples == 0 and not run.accuracies and not is_exact:
        return  # an evaluation of the untrained model
    fewest = max(previous + 1, run.global_batch_size or 0)
    if samples < fewest and key == "eval_accuracy" and not is_exact:
        found, expected = f"epoch_num {samples} after {previous}", "epoch_num = sequences trained, increasing"
        yield Violation("count", key, found, expected, "log the true count", "TR 24.6")
        return
    if schedule is None:
        return
    # In a resumed run, count also the evaluations before its checkpoint, although they are in another log.
    done_before = schedule.index_after(run.resumed_samples) - 1 if run.resumed_samples else 0
    index = done_before + run.number_of_evaluations + 1
    due = schedule.samples(index)
    if samples != due and (is_exact or not schedule.allows(index, samples, previous)):
        expected = f"evaluation {index} at {due}: every {schedule.interval} samples, rounded up to a whole batch"
        remedy = "evaluate on the schedule, and skip no evaluation"
        yield Violation("schedule", key, f"evaluation at {samples} samples", expected, remedy, "TR 24.4")


# Rules about a whole run


def own_settings(run: LoggedRun) -> Iterator[Violation]:
    """Yield the settings of a closed run that differ from the benchmark's settings."""
    if run.division != "closed":
        return
    batch = run.global_batch_size
    fixed: Mapping[str, float | None] = {
        "quality_target": rules.QUALITY_TARGET,
        "eval_interval_samples": evaluation_interval(batch) if batch else None,
        "eval_samples": rules.EVAL_SAMPLES,
    } | rules.FIXED_SETTINGS
    for key, expected in fixed.items():
        value = run.value(key)
        # A missing setting is not a deviation. `Log.missing` finds the settings that are required.
        if expected is None or not rules.is_number(value):
            continue
        # Accept an interval that is rounded up to a whole batch. Accept also numbers logged in single precision.
        room = (batch or 1) - 1 if key == "eval_interval_samples" else 1e-6 * expected
        if not -1e-6 * expected <= value - expected <= room:
            found, remedy = f"value {shown(value)} in a closed log", "use the benchmark's setting"
            yield Violation("setting", key, found, f"{expected}", remedy, rules.KEYS[key].source)


def left_open(run: LoggedRun) -> Iterator[Violation]:
    """Yield the blocks, epochs and evaluations that have not been closed."""
    # Skip the intervals that are phases: their closing records are required, so `Log.missing` finds them.
    for key in run.open:
        if key not in rules.NEXT_PHASE:
            remedy = "log the start and the stop of every interval"
            yield Violation("pair", key, "never closed", f"{rules.INTERVALS[key]} after it", remedy, "TR 11")


def unearned_success(run: LoggedRun, train_samples: object) -> Iterator[Violation]:
    """Yield each contradiction to the claim that the run reached its target after `train_samples` sequences."""
    target, last = run.target, run.accuracies[-1] if run.accuracies else None
    if last is None:
        found, remedy = "no evaluation", "train to the target, or log the run as aborted"
        yield Violation("result", "eval_accuracy", found, f"at least the target {shown(target)}", remedy, "TR 24.2")
        return
    if target is not None and rules.FRACTION.accepts(last.value) and last.value < target:
        found, remedy = f"last accuracy {last.value:.5f}", "train to the target, or log the run as aborted"
        yield Violation("result", "eval_accuracy", found, f"at least the target {target:g}", remedy, "TR 24.2")
    samples = last.metadata.get("epoch_num")
    if train_samples != samples:
        found, remedy = f"value {shown(train_samples)}", "log the samples at convergence"
        expected = f"{shown(samples)}, the samples at the last evaluation (line {last.line})"
        yield Violation("result", "train_samples", found, expected, remedy, "TR 24.6")
