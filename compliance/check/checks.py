"""This repository's checks of a log, each a function that yields findings.

The checks are stricter than the official checker, which accepts a second run_start, an aborted run, and evaluations off
schedule. A finding is an error if it makes the log an invalid result, and a warning if published submissions have it too.
"""

import sys
from collections.abc import Callable, Iterator

from compliance.artefact import MAX_FILE_BYTES
from compliance.check.grades import TIMELINE, CheckedLog, at, check_records, counts_no_sequences, epoch_nums, finding_of
from compliance.log import rules
from compliance.log.findings import Finding, Severity, shown
from compliance.log.order import KEEP_THE_CLOCK, own_settings, unearned_success
from compliance.log.record import Record

JITTER_MS = 250
"""Largest decrease of time_ms that clock differences between processes can explain."""

CHECKPOINT_MS = 1000
"""Longest time between the checkpoint that reached the target and the run's end, if evaluation follows training."""


def check_lines(context: CheckedLog) -> Iterator[Finding]:
    for problem in context.log.problems:
        remedy = "write every record from one process, whole, on a line of its own"
        found = f"{problem.found}; expected {problem.expected}"
        yield Finding(problem.line, "", "log format", found, remedy, severity=problem.severity)
    if context.log.given_up:
        found = f"{context.log.given_up}: the rest was not read"
        remedy = "log one run a file, and keep telemetry and other programs' output in other files"
        yield Finding(None, "", "SR Submission form", found, remedy)
        return
    if not context.log.token_lines:
        found = "no MLLOG record in the file; expected the log of a run"
        yield Finding(None, "", "log format", found, "check the file that the run logged to")
    if context.log.size > MAX_FILE_BYTES:
        found = f"a file of {context.log.size / 2**20:.1f} MiB; expected at most {MAX_FILE_BYTES >> 20} MiB"
        yield Finding(None, "", "SR Submission form", found, "keep telemetry and other programs' output in other files")


def _check_defect(context: CheckedLog) -> Iterator[Finding]:
    run, records = context.run, context.log.records
    match context.defect:
        case "joined":
            start = run.first["run_start"].line
            second = next(record.line for record in context.log.all("init_start") if record.line > start)
            found = f"two logs in one file: a run starts on line {start}, and another initialises on line {second}"
            yield Finding(None, "run_start", "log format", f"{found}; expected the log of one run", "split the file")
        case "cut off":
            found = f"no record: the log ends on line {records[-1].line}; expected the log of a whole run"
            remedy = "wait for the run_stop, or copy the whole log again; a killed run is not a result"
            yield Finding(None, "run_stop", "log format; TR 11", found, remedy)
        case "headless":
            found = f"the log begins on line {records[0].line} in the middle of a run; expected the log of a whole run"
            yield Finding(None, "run_start", "log format; TR 11", found, "copy the whole log again")


def _check_chain(context: CheckedLog) -> Iterator[Finding]:
    chain = context.log.chain
    # Logs of other software carry no digests.
    if not chain.opened and not chain.digests:
        return
    rule, remedy = "docs/compliance.md", "submit the log as the run wrote it"
    if chain.broken:
        first, last = chain.broken
        found = f"the digest on line {last} does not match the lines above; expected lines {first} to {last} as written"
        yield Finding(first, "", rule, found, remedy)
    elif not chain.digests and not context.defect:
        found = "no digest in a log whose first line announces digests; expected at least one at the end"
        yield Finding(1, "", rule, found, remedy)
    elif chain.after_end:
        found = "a line below the digest at the end; expected none"
        yield Finding(chain.after_end, "", rule, found, remedy)
    elif not chain.ended and not context.aborted and not context.defect:
        found = f"no digest at the end; expected one below line {chain.covered}: the log was cut off, or the run was"
        stop = context.run.last.get("run_stop")
        # If a digest follows run_stop, the whole run is covered, so that a missing final digest is only a warning.
        severity: Severity = "warning" if stop and stop.line < chain.covered else "error"
        yield Finding(chain.covered, "", rule, found, remedy, severity=severity)


def _check_whole_run(context: CheckedLog) -> Iterator[Finding]:
    if resumed := context.log.header.get("resumed from"):
        remedy = "submit a run that was timed from its start to its end"
        found = f"the run went on from a checkpoint, {shown(resumed)}; expected a run trained from run_start on"
        yield Finding(None, "", "TR 11", found, remedy)


def _check_presence(context: CheckedLog) -> Iterator[Finding]:
    if not context.log.token_lines:
        return
    # Unreadable records are already reported, so they count as present.
    present = {*context.log.by_key}.union(*(problem.keys for problem in context.log.problems))
    for rule in rules.KEYS.values():
        if rule.key in present or (context.aborted and rule.key not in TIMELINE):
            continue
        name, _, end = rule.key.partition("_")
        if name == "eval" and end in ("start", "stop"):
            # The rule files accept blocks in place of evaluations, but a log that has only epochs needs evaluation records.
            due = not {f"block_{end}", f"eval_{end}"} & present and f"epoch_{end}" in present
        else:
            due = rule.required_in(context.ruleset, context.run.division)
            due = due and rule.key.replace("block", "epoch") not in present  # epochs are an alternative to blocks
        if due:
            times = "one record" if rule.once else "at least one record"
            remedy = f"log {rule.key} {' or '.join(rules.PHASE_NAMES[phase] for phase in rule.phases)}"
            severity: Severity = "error"
            # TR 5.1 requires the seed since round 4.1.
            if rule.key == "seed" and rules.RULESETS.index(context.ruleset) < rules.RULESETS.index("4.1.0"):
                severity = "warning"
            found = f"no record; expected {times}"
            yield Finding(None, rule.key, rule.source, found, remedy, severity=severity)


def _check_time(context: CheckedLog) -> Iterator[Finding]:
    """Check that times never decrease. Before run_start, several processes log, so only phase starts must be in order."""
    start = context.run.first.get("run_start")
    run_line = start.line if start else sys.maxsize
    offline = _is_evaluated_offline(context)
    latest: Record | None = None
    phase: Record | None = None  # the latest record that begins a phase
    for record in context.log.records:
        # Every process may log these keys, with its own clock.
        if record.key in rules.PER_RANK:
            continue
        if latest and record.time_ms < latest.time_ms:
            back = latest.time_ms - record.time_ms
            found = f"time_ms {record.time_ms} is {back} ms before line {latest.line}"
            if record.line <= run_line:
                is_error = phase is not None and record.key in TIMELINE and record.time_ms < phase.time_ms
            else:
                # Evaluations made after training are logged with the times of their checkpoints.
                is_error = back > JITTER_MS and not (offline and record.key in _OFFLINE)
            expected = "times that never decrease" + (", or evaluation during the run" if offline else "")
            yield at(record, found, expected, KEEP_THE_CLOCK, "TR 11", "error" if is_error else "warning")
        # Compare the records after run_start only with each other: earlier records may come from another process, whose
        # clock was ahead.
        if latest is None or record.time_ms >= latest.time_ms or record.line == run_line:
            latest = record
        if record.key in TIMELINE:
            phase = record


_OFFLINE = ("eval_start", "eval_accuracy", "eval_stop", "train_samples", "eval_samples", "run_stop")


def _is_evaluated_offline(context: CheckedLog) -> bool:
    """Tell whether all evaluations come after training, in order, with the times of their checkpoints (TR 9.4).

    The run must then end with the checkpoint that reached the target, at the end of a block.
    """
    log, first = context.log, context.run.first
    evaluations, trained = log.all("eval_accuracy"), log.all("block_stop") or log.all("epoch_stop")
    start, stop = first.get("run_start"), first.get("run_stop")
    if not (start and stop and trained and evaluations) or evaluations[0].line < trained[-1].line:
        return False
    times = [record.time_ms for record in (start, *evaluations, stop)]
    last = times[-2]  # time of the last evaluation
    at_checkpoint = any(abs(record.time_ms - last) <= CHECKPOINT_MS for record in trained)
    return times == sorted(times) and at_checkpoint and stop.time_ms - last <= CHECKPOINT_MS


def _check_fixed_settings(context: CheckedLog) -> Iterator[Finding]:
    run = context.run
    if run.division != "closed" or context.aborted:
        return
    for violation in own_settings(run):
        yield finding_of(run.first[violation.key], violation)
    cleared = context.log.all("cache_clear")
    # Every process may log cache_clear. It is enough if one process dropped the caches.
    if cleared and all(record.value is False for record in cleared):
        remedy = "drop the caches before each run (needs root), and log what was done"
        yield at(cleared[0], f"value {shown(cleared[0].value)}: caches kept", "caches dropped before the run", remedy)


def _check_result(context: CheckedLog) -> Iterator[Finding]:
    run = context.run
    stop = run.last.get("run_stop")
    if stop and context.aborted:
        remedy = "run again; a run that misses its target is not a result"
        yield at(stop, "status aborted: not a valid result (aborted)", "status success", remedy, "TR 11, 12")
        return
    # If the last accuracy is not a fraction, another finding reports it.
    if not run.accuracies or not rules.FRACTION.accepts(run.accuracies[-1].value):
        return
    trained, samples, batch = run.first.get("train_samples"), epoch_nums(run), run.global_batch_size
    is_counted = trained and samples and rules.is_number(trained.value)
    for violation in unearned_success(run, run.value("train_samples")):
        if violation.key == "eval_accuracy":
            yield finding_of(run.accuracies[-1], violation)
        # Placeholders in epoch_num cannot be compared with train_samples.
        elif trained and is_counted and trained.value >= (batch or 0) and not counts_no_sequences(samples, batch):
            # Other software logs the planned number of samples or the size of the data set as train_samples.
            yield finding_of(trained, violation, "error" if trained.value < samples[-1] else "warning")
    if trained and is_counted and trained.value < (batch or 0):
        remedy = "log the samples at convergence"
        yield at(trained, f"value {shown(trained.value)}", f"at least one batch of {batch}", remedy, "TR 24.6")


def checks_of(context: CheckedLog) -> tuple[Callable[[CheckedLog], Iterator[Finding]], ...]:
    # The other checks would complain about records that were not read or that belong to another run.
    if context.log.given_up:
        return (check_lines,)
    if context.defect in ("joined", "headless"):
        return (_check_defect, check_lines)
    of_records = (check_lines, _check_chain, _check_whole_run, check_records, _check_time, _check_fixed_settings)
    if context.defect:
        return (_check_defect, *of_records)
    return (*of_records, _check_presence, _check_result)
