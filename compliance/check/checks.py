"""The rules of this repository, each as a function from a parsed log to what it finds.

They are stricter than the official checker, which accepts a second run_start, an aborted run, evaluations off
schedule. A finding is an error where the log is no valid result, and a warning where it departs from the rules in a way
that accepted, published submissions do too.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from compliance.artefact import MAX_FILE_BYTES
from compliance.log import rules
from compliance.log.findings import Finding, Severity
from compliance.log.records import Log, Record

TIMELINE = tuple(rules.NEXT_PHASE)
"""The records that divide a log into phases, in their order."""

JITTER_MS = 250
"""How far back the time of a record may lie and still be the clock of another process."""

CHECKPOINT_MS = 1000
"""How far the end of a run that is evaluated after training may lie from the checkpoint that reached the target."""

MAX_SHOWN = 80
"""Most characters of a logged value in a message."""


@dataclass(frozen=True)
class Context:
    """A log, and what it is checked as."""

    log: Log
    ruleset: str
    division: rules.Division
    aborted: bool

    def integer(self, key: str) -> int | None:
        """The value of the first record of `key`, when it is an integer > 0."""
        record = self.log.first(key)
        return record.value if record and rules.POSITIVE_INTEGER.accepts(record.value) else None

    @property
    def is_at_least_4_1(self) -> bool:
        """Whether the ruleset is one of those since 4.1.0."""
        return rules.RULESETS.index(self.ruleset) >= rules.RULESETS.index("4.1.0")


def _at(
    record: Record, found: str, expected: str, remedy: str, rule: str | None = None, severity: Severity = "error"
) -> Finding:
    known = rules.KEYS.get(record.key)
    where = rule or (known.source if known else "")
    key = record.key if known else _show(record.key)[1:-1]
    return Finding(record.line, key, where, f"{found}; expected {expected}", remedy, record.logged_at, severity)


def _show(value: Any) -> str:
    """A value from the log for a message: what steers a terminal is escaped, and it is short."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    text = ascii(value[:MAX_SHOWN]) if isinstance(value, str) else ascii(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


PACKED = Finding(
    None,
    "",
    "SR Submission form",
    "the log is packed in gzip, which the official tools do not read; expected plain text",
    "unpack it with `gunzip` before it is submitted",
    severity="warning",
)
"""About a log that only its packing keeps from being a result."""


def _check_lines(context: Context) -> Iterator[Finding]:
    for problem in context.log.problems:
        remedy = "write every record from one process, whole, on a line of its own"
        found = f"{problem.found}; expected {problem.expected}"
        yield Finding(problem.line, "", "log format", found, remedy, severity=problem.severity)
    if context.log.given_up:
        found = f"{context.log.given_up}: the rest was not read"
        yield Finding(None, "", "SR Submission form", found, context.log.remedy)
        return
    if context.log.packed:
        yield PACKED
    if not context.log.token_lines:
        found = "no MLLOG record in the file; expected the log of a run"
        yield Finding(None, "", "log format", found, "check the file that the run logged to")
    if context.log.size > MAX_FILE_BYTES:
        found = f"a file of {context.log.size / 2**20:.1f} MiB; expected at most {MAX_FILE_BYTES >> 20} MiB"
        yield Finding(None, "", "SR Submission form", found, "keep telemetry and other programs' output in other files")


def _check_chain(context: Context) -> Iterator[Finding]:
    chain = context.log.chain
    if not chain.opened and not chain.digests:
        return
    rule, remedy = "docs/compliance.md", "submit the log as the run wrote it"
    if chain.broken:
        first, last = chain.broken
        found = f"the digest on line {last} is not that of the lines above; expected lines {first} to {last} as written"
        yield Finding(first, "", rule, found, remedy)
    elif not chain.digests:
        found = "no digest in a log that opens with saying that it carries them; expected one at the end at least"
        yield Finding(1, "", rule, found, remedy)
    elif chain.after_end:
        found = "a line below the digest at the end; expected none"
        yield Finding(chain.after_end, "", rule, found, remedy)
    elif not chain.ended and not context.aborted:
        found = f"no digest at the end; expected one below line {chain.covered}: the log was cut off, or the run was"
        stop = context.log.last("run_stop")
        severity: Severity = "warning" if stop and stop.line < chain.covered else "error"
        yield Finding(chain.covered, "", rule, found, remedy, severity=severity)


def _check_whole_run(context: Context) -> Iterator[Finding]:
    if resumed := context.log.header.get("resumed from"):
        remedy = "submit a run that was timed from its start to its end"
        found = f"the run went on from a checkpoint, {_show(resumed)}; expected a run trained from run_start on"
        yield Finding(None, "", "TR 11", found, remedy)


def _check_presence(context: Context) -> Iterator[Finding]:
    if not context.log.token_lines:
        return
    present = {*context.log.by_key}.union(*(problem.keys for problem in context.log.problems))
    for rule in rules.KEYS.values():
        if rule.key in present or (context.aborted and rule.key not in TIMELINE):
            continue  # an early end explains what an aborted log lacks, and the run is no result anyway
        name, _, end = rule.key.partition("_")
        if name == "eval" and end in ("start", "stop"):
            due = not {f"block_{end}", f"eval_{end}"} & present and f"epoch_{end}" in present
        else:
            due = rule.required_in(context.ruleset, context.division)
            due = due and rule.key.replace("block", "epoch") not in present  # blocks and epochs are alternatives
        if due:
            times = "one record" if rule.once else "at least one record"
            remedy = f"log {rule.key} {' or '.join(rules.PHASE_NAMES[phase] for phase in rule.phases)}"
            severity: Severity = "error"
            if rule.key == "seed" and not context.is_at_least_4_1:
                severity = "warning"
            found = f"no record; expected {times}"
            yield Finding(None, rule.key, rule.source, found, remedy, severity=severity)


def _check_repeats(context: Context) -> Iterator[Finding]:
    for key, records in context.log.by_key.items():
        rule = rules.KEYS.get(key)
        if rule is None or not rule.once:
            continue
        first = records[0]
        for record in records[1:]:
            changes_time = key in ("run_start", "run_stop")
            same = record.value == first.value
            why = "it would change the measured time" if changes_time else "values may not compete"
            found = f"logged again, first on line {first.line}" + ("" if same else " with another value")
            needed = rule.required_in(context.ruleset, context.division) and key != "seed"
            severity: Severity = "error" if changes_time or (needed and not same) else "warning"
            yield _at(record, found, f"exactly one record: {why}", "log it once, from one process", severity=severity)


def _check_values(context: Context) -> Iterator[Finding]:
    for key, records in context.log.by_key.items():
        rule = rules.KEYS.get(key)
        if rule is None:
            continue
        alternative = rules.alternative_metadata(key, context.ruleset) or ""
        for record in records:
            if rule.value is not None and not rule.value.accepts(record.value):
                remedy, severity = "correct the value that is logged", _severity_of_value(record)
                yield _at(record, f"value {_show(record.value)}", rule.value.wording, remedy, severity=severity)
            if rule.event_type != "POINT_IN_TIME" and record.event_type not in (rule.event_type, ""):
                remedy = "use the logger's start and end"
                yield _at(record, f"event_type {record.event_type}", rule.event_type, remedy, severity="warning")
            if rules.COUNT.accepts(record.metadata.get(alternative)):
                continue
            for name, expected in rule.metadata:
                if name not in record.metadata:
                    yield _at(record, f"no metadata {name}", f"{name}: {expected.wording}", f"log {name} with it")
                elif not expected.accepts(record.metadata[name]):
                    found = f"metadata {name} is {_show(record.metadata[name])}"
                    yield _at(record, found, f"{name}: {expected.wording}", f"correct {name}")


def _severity_of_value(record: Record) -> Severity:
    """Accepted logs have cache_clear null, seeds as text, and 0 for settings that they do not use."""
    value = record.value
    if record.key == "cache_clear":
        return "warning"
    if record.key == "seed":
        return "warning" if isinstance(value, str) and value.strip().removeprefix("-").isdecimal() else "error"
    if record.key.startswith("opt_") or record.key in ("num_warmup_steps", "start_warmup_step"):
        return "warning" if rules.is_number(value) else "error"
    return "error"


def _check_time(context: Context) -> Iterator[Finding]:
    """Times never decrease. Before run_start, only the phases themselves are held to that: several processes log there."""
    log, remedy = context.log, "log from one process with a clock that is not set back, and leave the file as written"
    start = log.first("run_start")
    run_line = start.line if start else 0
    offline = _is_evaluated_offline(log)
    latest: Record | None = None
    phase: Record | None = None  # the latest of the records that divide the log into phases
    for record in log.records:
        if record.key in rules.PER_RANK:
            continue
        if latest and record.time_ms < latest.time_ms:
            back = latest.time_ms - record.time_ms
            found = f"time_ms {record.time_ms} is {back} ms before line {latest.line}"
            if record.line <= run_line:
                is_error = phase is not None and record.key in TIMELINE and record.time_ms < phase.time_ms
            else:
                is_error = back > JITTER_MS and not (offline and record.key in _OFFLINE)
            expected = "times that never decrease" + (", or evaluation during the run" if offline else "")
            yield _at(record, found, expected, remedy, "TR 11", "error" if is_error else "warning")
        if latest is None or record.time_ms >= latest.time_ms or record.line == run_line:
            latest = record
        if record.key in TIMELINE:
            phase = record


_OFFLINE = ("eval_start", "eval_accuracy", "eval_stop", "train_samples", "eval_samples", "run_stop")


def _is_evaluated_offline(log: Log) -> bool:
    """Whether all evaluations stand after all training, in order, with the times of their checkpoints (TR 9.4).

    The run then ends with the checkpoint that reached the target, at the end of one of the blocks.
    """
    evaluations, trained = log.all("eval_accuracy"), log.all("block_stop") or log.all("epoch_stop")
    start, stop = log.first("run_start"), log.first("run_stop")
    if not (start and stop and trained and evaluations) or evaluations[0].line < trained[-1].line:
        return False
    times = [record.time_ms for record in (start, *evaluations, stop)]
    last = times[-2]
    at_checkpoint = any(abs(record.time_ms - last) <= CHECKPOINT_MS for record in trained)
    return times == sorted(times) and at_checkpoint and stop.time_ms - last <= CHECKPOINT_MS


def _check_order(context: Context) -> Iterator[Finding]:
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
    places: list[tuple[int, rules.Phase]] = sorted((line, rules.NEXT_PHASE[key]) for key, line in position.items())
    for key, records in log.by_key.items():
        rule = rules.KEYS.get(key)
        if rule is None or key in TIMELINE[1:] or not _has_place(key):
            continue
        if rule.phases == ("run",) and not {"run_start", "run_stop"} <= position.keys():
            continue
        for record in records[1:] if key == "init_start" else records:
            index = bisect(places, (record.line,))
            phase = places[index - 1][1] if index else "before"
            if phase not in rule.phases:
                expected = " or ".join(rules.PHASE_NAMES[allowed] for allowed in rule.phases)
                late = phase == "done" and key in ("block_stop", "epoch_stop")
                severity: Severity = "warning" if late or key == "cache_clear" else "error"
                found = f"logged {rules.PHASE_NAMES[phase]}"
                yield _at(record, found, expected, "log it when it happens", "common.yaml; TR 11", severity)


def _has_place(key: str) -> bool:
    """Whether the place of a record carries meaning; settings may stand anywhere in other people's logs."""
    rule = rules.KEYS[key]
    return key in rules.INTERVALS or key in rules.INTERVALS.values() or rule.phases == ("run",) or key == "cache_clear"


def _check_pairs(context: Context) -> Iterator[Finding]:
    remedy = "log the start and the stop of every interval"
    lost = _lost_keys(context.log)
    for start, stop in rules.INTERVALS.items():
        if start in TIMELINE or start not in context.log.by_key or {start, stop} & lost:
            continue  # what is wrong with the line of one has been reported
        if stop not in context.log.by_key and rules.KEYS[stop].required_in(context.ruleset, context.division):
            continue  # its absence has been reported
        # An epoch may end with the run (common.yaml); open submissions open one block for many evaluations.
        severity: Severity = "warning" if start == "epoch_start" or context.division == "open" else "error"
        opened: Record | None = None
        for record in sorted(context.log.all(start) + context.log.all(stop)):
            if record.key == start:
                if opened:
                    found = f"the one of line {opened.line} is still open"
                    yield _at(record, found, f"{stop} first", remedy, "TR 11", severity)
                opened = record
            else:
                if opened is None:
                    yield _at(record, "nothing is open", f"{start} first", remedy, "TR 11", severity)
                opened = None
        if opened:
            yield _at(opened, "never closed", f"{stop} after it", remedy, "TR 11", severity)


def _lost_keys(log: Log) -> frozenset[str]:
    """The keys of records that could not be read, as far as can be told: what follows from that is not reported again."""
    return frozenset().union(*(problem.keys for problem in log.problems if problem.severity == "error"))


def _check_init_time(context: Context) -> Iterator[Finding]:
    starts, stop = context.log.all("init_start"), context.log.first("init_stop")
    if not starts or not stop:
        return
    limit = rules.init_limit_minutes(context.ruleset, context.division)
    minutes = (stop.time_ms - min(start.time_ms for start in starts)) / 60_000
    if minutes < 0:
        remedy = "log from one process with a clock that is not set back, and leave the file as written"
        yield _at(stop, f"{-minutes:.1f} min before every init_start", "a later time", remedy)
    if minutes >= limit:
        remedy = "shorten compilation and warm-up, or start the clock sooner"
        yield _at(stop, f"initialisation took {minutes:.1f} min", f"less than {limit} min", remedy)


def _check_evaluations(context: Context) -> Iterator[Finding]:
    batch = context.integer("global_batch_size")
    interval = context.integer("eval_interval_samples")
    if context.division == "closed":
        interval = rules.evaluation_interval(batch) if batch else None
    records = _evaluations(context.log)
    samples = _epoch_nums(records)
    if (
        len(samples) < len(context.log.all("eval_accuracy"))
        or not samples
        or "eval_accuracy" in _lost_keys(context.log)
    ):
        return  # reported with the lines, the values or the order
    if _counts_no_sequences(samples, batch):
        found = f"epoch_num {samples[0]}" + (f" to {samples[-1]}" if samples[-1] != samples[0] else "")
        found += f" at {len(samples)} evaluation{'s' if len(samples) > 1 else ''}"
        trained = context.integer("train_samples")
        if trained and interval and (due := round(trained / interval)) != len(samples):
            found += f", and train_samples {trained} would be after evaluation {due}"
        remedy = "log the true count; the RCP checker reads it, unless it is told to take train_samples"
        yield _at(records[0], found, "the sequences trained so far", remedy, "TR 24.6", "warning")
        return
    if samples[0] == 0:
        records, samples = records[1:], samples[1:]  # the untrained model: no evaluation of the schedule
    regular = _is_regular(samples, interval, batch)
    for index, record in enumerate(records, start=1):
        previous = samples[index - 2] if index > 1 else 0
        if samples[index - 1] <= previous:
            found = f"epoch_num {samples[index - 1]} after {previous}"
            yield _at(record, found, "epoch_num = sequences trained, increasing", "log the true count", "TR 24.6")
        elif batch and interval and not rules.is_on_schedule(index, samples[index - 1], previous, interval, batch):
            due = rules.evaluation_samples(index, interval, batch)
            expected = f"evaluation {index} at {due}: every {interval} samples, rounded up to a whole batch"
            remedy = "evaluate on the schedule, and skip no evaluation"
            severity: Severity = "warning" if regular else "error"
            yield _at(record, f"evaluation at {samples[index - 1]} samples", expected, remedy, "TR 24.4", severity)


def _evaluations(log: Log) -> list[Record]:
    """The evaluations of the run; one before its start or after its end is reported for its place."""
    start, stop = log.first("run_start"), log.last("run_stop")
    first, last = start.line if start else 0, stop.line if stop else math.inf
    return [record for record in log.all("eval_accuracy") if first < record.line < last]


def _epoch_nums(evaluations: list[Record]) -> list[int]:
    """epoch_num of every evaluation; empty when one has none."""
    counts = [record.metadata.get("epoch_num") for record in evaluations]
    samples = [count for count in counts if rules.is_integer(count)]
    return samples if len(samples) == len(counts) else []


def _counts_no_sequences(samples: list[int], batch: int | None) -> bool:
    """Whether the epoch_num of the evaluations are placeholders or count evaluations (or epochs) instead of sequences."""
    if max(samples) < (batch or 1):
        return True
    constant, counted = [samples[0]] * len(samples), list(range(samples[0], samples[0] + len(samples)))
    return len(samples) > 1 and samples in (constant, counted)


def _is_regular(samples: list[int], interval: int | None, batch: int | None) -> bool:
    """Whether the evaluations follow one interval of their own that is near the one of the rules.

    Accepted submissions count a partial last batch, round the interval in their own way, or use that of a neighbouring
    batch size: their steps are equal within 3 % or a batch, and the next multiple of 25,000 away at most.
    """
    if not samples or not interval or not batch:
        return False
    steps = sorted(after - before for before, after in zip([0, *samples], samples, strict=False))
    median = steps[len(steps) // 2]
    slack = max(batch, 0.03 * interval)
    return steps[-1] - median <= slack and median - steps[0] <= slack and abs(median - interval) <= 25_000 + batch


def _check_fixed_settings(context: Context) -> Iterator[Finding]:
    if context.division != "closed" or context.aborted:
        return
    batch = context.integer("global_batch_size")
    fixed = {
        "quality_target": rules.QUALITY_TARGET,
        "eval_interval_samples": rules.evaluation_interval(batch) if batch else None,
        "eval_samples": rules.EVAL_SAMPLES,
    } | rules.FIXED_SETTINGS
    remedy = "keep to the benchmark's setting, or say division open"
    for key, expected in fixed.items():
        record = context.log.first(key)
        if not record or expected is None or record.value == expected or not rules.is_number(record.value):
            continue  # what is no number is reported with the values
        yield _at(record, f"value {_show(record.value)} in a closed log", f"{expected}", remedy)
    steps = context.integer("gradient_accumulation_steps")
    if batch and steps and batch % steps:
        record = context.log.by_key["gradient_accumulation_steps"][0]
        found, remedy = f"value {steps} with a global_batch_size of {batch}", "log the steps in which a batch is taken"
        yield _at(record, found, "a divisor of the batch size", remedy, "closed_common.yaml", "warning")
    cleared = context.log.all("cache_clear")
    if cleared and all(record.value is False for record in cleared):
        remedy = "drop the caches before each run (needs root), and log what was done"
        yield _at(cleared[0], f"value {_show(cleared[0].value)}: caches kept", "caches dropped before the run", remedy)


def _check_weights(context: Context) -> Iterator[Finding]:
    records = context.log.all("weights_initialization")
    required = rules.KEYS["weights_initialization"].required_in(context.ruleset, context.division)
    if not records or context.aborted or not required:
        return
    names = rules.weight_tensors(rules.BERT_LARGE_LAYERS)
    expected, wording, remedy = set(names), f"the {len(names)} tensors, once each", "log the reference's names"
    seen: set[str] = set()
    for record in records:
        tensor = record.metadata.get("tensor")
        if not isinstance(tensor, str):
            continue  # reported with the values
        if tensor not in expected or tensor in seen:
            fault = "logged again" if tensor in seen else "not a tensor of BERT-Large"
            yield _at(record, f"{_show(tensor)}: {fault}", wording, remedy)
        seen.add(tensor)
    missing = sorted(expected - seen)
    if missing:
        yield _at(records[-1], f"{len(missing)} tensors missing, among them {missing[0]}", wording, remedy)


def _check_result(context: Context) -> Iterator[Finding]:
    log = context.log
    stop, evaluations = log.last("run_stop"), _evaluations(log)
    if stop and context.aborted:
        remedy = "run again; a run that misses its target is no result"
        yield _at(stop, "status aborted: not a valid result (aborted)", "status success", remedy, "TR 11, 12")
        return
    if not evaluations or not rules.FRACTION.accepts(evaluations[-1].value):
        return
    last = evaluations[-1]
    logged = log.first("quality_target")
    target = rules.QUALITY_TARGET if context.division == "closed" else logged.value if logged else None
    if rules.is_number(target) and last.value < target:
        remedy = "train to the target, or log the run as aborted"
        yield _at(last, f"last accuracy {last.value:.5f}", f"at least the target {target:g}", remedy, "TR 24.2")
    trained, samples = log.first("train_samples"), _epoch_nums(evaluations)
    if not trained or not samples or not rules.is_number(trained.value):
        return
    remedy, batch = "log the samples at convergence", context.integer("global_batch_size")
    if trained.value < (batch or 0):
        yield _at(trained, f"value {_show(trained.value)}", f"at least one batch of {batch}", remedy, "TR 24.6")
    elif not _counts_no_sequences(samples, batch) and trained.value != samples[-1]:
        # Others log what they planned, or the size of the data set. Fewer than at the last evaluation cannot be.
        severity: Severity = "error" if trained.value < samples[-1] else "warning"
        expected = f"{samples[-1]}, the samples at the last evaluation (line {last.line})"
        yield _at(trained, f"value {_show(trained.value)}", expected, remedy, "TR 24.6", severity)


READABLE: tuple[Callable[[Context], Iterator[Finding]], ...] = (_check_lines,)
"""What can be said of a log that was not read to its end."""

CHECKS: tuple[Callable[[Context], Iterator[Finding]], ...] = (
    _check_lines,
    _check_chain,
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
