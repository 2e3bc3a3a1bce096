"""This repository's checks of a log, each a function that yields findings.

The checks are stricter than the official checker, which accepts a second run_start, an aborted run, and evaluations off
schedule. A finding is an error if it makes the log an invalid result, and a warning if published submissions have it too.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from compliance.artefact import MAX_FILE_BYTES
from compliance.check.grades import TIMELINE, CheckedLog, at, check_records, finding_of
from compliance.log import rules
from compliance.log.findings import Finding, Severity, shown
from compliance.log.order import KEEP_THE_CLOCK, own_settings, unearned_success
from compliance.log.record import Record

JITTER_MS = 250
"""Largest decrease of time_ms that clock differences between processes can explain."""

CHECKPOINT_MS = 1000
"""Longest time from the last evaluated checkpoint to the end of its block or of the run, if evaluation follows training."""


def check_lines(context: CheckedLog) -> Iterator[Finding]:
    for problem in context.log.problems:
        remedy = "write every record from one process, whole, on a line of its own"
        found = f"{problem.found}; expected {problem.expected}"
        yield Finding(problem.line, "", "log format", found, remedy, severity=problem.severity)
    if context.log.given_up:
        found = f"{context.log.given_up}: the rest of the file was not read"
        remedy = "log each run to its own file, and keep telemetry and other programs' output in other files"
        yield Finding(None, "", "SR Submission form", found, remedy)
        return
    if not context.log.token_lines:
        found, remedy = context.log.hint or ("", "check the file that the run logged to")
        found = f"no MLLOG record in the file{found and f': {found}'}; expected the log of a run"
        yield Finding(None, "", "log format", found, remedy)
    if context.log.size > MAX_FILE_BYTES:
        found = f"a file of {context.log.size / 2**20:.1f} MiB; expected at most {MAX_FILE_BYTES >> 20} MiB"
        yield Finding(None, "", "SR Submission form", found, "keep telemetry and other programs' output in other files")


def _check_defect(context: CheckedLog) -> Iterator[Finding]:
    records = context.log.records
    match context.defect:
        case "joined":
            assert context.second_start
            line = context.second_start.line
            found = f"two attempts in one file: the second begins on line {line}; expected the log of one run"
            yield Finding(line, "", "log format", found, "log every attempt to a file of its own")
        case "ranks":
            found = f"{context.writers} processes have logged the whole run, each with a run_start"
            found += "; expected the log of one process"
            remedy = "log from one process: a second run_start changes the measured time"
            yield Finding(context.log.all("run_start")[1].line, "", "log format; TR 11", found, remedy)
        case "cut off":
            found = f"no record: the log ends on line {records[-1].line}; expected the log of a whole run"
            remedy = "wait for the run_stop, or copy the whole log again; a killed run is not a result"
            yield Finding(None, "run_stop", "log format; TR 11", found, remedy)
        case "headless":
            found = f"the log begins on line {records[0].line} in the middle of a run; expected the log of a whole run"
            yield Finding(None, "run_start", "log format; TR 11", found, "copy the whole log again")


def _check_chain(context: CheckedLog) -> Iterator[Finding]:
    chain = context.log.chain
    # Skip logs of other software, which carry no digests.
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
        found = f"no digest at the end; expected one below line {chain.covered}: the log or the run was cut off"
        stop = context.run.last.get("run_stop")
        # If a digest follows run_stop, it covers the whole run, so only warn that the digest at the end is missing.
        severity: Severity = "warning" if stop and stop.line < chain.covered else "error"
        yield Finding(chain.covered, "", rule, found, remedy, severity=severity)


def _check_whole_run(context: CheckedLog) -> Iterator[Finding]:
    if resumed := context.log.header.get("resumed from"):
        remedy = "submit a run that was timed from its start to its end"
        found = f"the run resumed from the checkpoint {shown(resumed)}; expected all training after run_start"
        yield Finding(None, "", "TR 11", found, remedy)


def _check_presence(context: CheckedLog) -> Iterator[Finding]:
    for key in context.log.missing(context.ruleset):
        rule = rules.KEYS[key]
        if context.aborted and key not in TIMELINE:
            continue
        found = f"no record; expected {'one record' if rule.once else 'at least one record'}"
        remedy = f"log {key} {' or '.join(rules.PHASE_NAMES[phase] for phase in rule.phases)}"
        severity: Severity = "warning" if context.ruleset in rule.advised else "error"
        yield Finding(None, key, rule.source, found, remedy, severity=severity)


def _check_division(context: CheckedLog) -> Iterator[Finding]:
    # Since ruleset 2.0.0, the time limit of the initialisation depends on the division, so log it before init_stop.
    first = context.run.first
    division, stop = first.get("submission_division"), first.get("init_stop")
    if division and stop and division.line > stop.line and context.ruleset not in rules.ONE_INIT_LIMIT:
        found = f"logged before submission_division on line {division.line}, which sets the limit of the initialisation"
        yield at(stop, found, "submission_division before it", "log submission_division during initialisation")


def _check_time(context: CheckedLog) -> Iterator[Finding]:
    """Check that times never decrease. Before run_start, several processes may log, so only phases must begin in order."""
    if context.misdated:
        record, more = context.misdated[0], len(context.misdated) - 1
        found, expected = f"time_ms {record.time_ms}{_time_unit(record.time_ms)}", "milliseconds since 1970"
        remedy = "log with the logger of mlperf-logging, while the run goes on"
        yield replace(at(record, found, expected, remedy, "log format; TR 11"), more=more)
    misdated = {record.line for record in context.misdated}
    start = context.run.first.get("run_start")
    run_line = start.line if start else sys.maxsize
    offline = _is_evaluated_offline(context)
    latest: Record | None = None
    phase: Record | None = None  # the latest record that begins a phase
    for record in context.log.records:
        # Skip keys that every process logs with its own clock. Skip also the times that have been reported above.
        if record.key in rules.PER_RANK or record.line in misdated:
            continue
        if latest and record.time_ms < latest.time_ms:
            back = latest.time_ms - record.time_ms
            found = f"time_ms {record.time_ms} is {back} ms before line {latest.line}"
            if record.line <= run_line:
                is_error = phase is not None and record.key in TIMELINE and record.time_ms < phase.time_ms
            else:
                # If evaluation follows training, it is logged with the earlier times of its checkpoints. That is no error.
                is_error = back > JITTER_MS and not (offline and record.key in _OFFLINE)
            expected = "times that never decrease" + (", or evaluation during the run" if offline else "")
            yield at(record, found, expected, KEEP_THE_CLOCK, "TR 11", "error" if is_error else "warning")
        # Compare the records after run_start only with each other: earlier records may come from another process, whose
        # clock was ahead.
        if latest is None or record.time_ms >= latest.time_ms or record.line == run_line:
            latest = record
        if record.key in TIMELINE:
            phase = record


def _time_unit(time_ms: int) -> str:
    """Return a text that names the probable unit of a time that is not in milliseconds since 1970."""
    for unit, size in (("seconds", 1_000), ("microseconds", 1e-3), ("nanoseconds", 1e-6)):
        if rules.FIRST_MS <= time_ms * size < rules.LAST_MS:
            return f" counts {unit}"
    return ": no time" if time_ms <= 0 else ""


_OFFLINE = ("eval_start", "eval_accuracy", "eval_stop", "train_samples", "eval_samples", "run_stop")


def _is_evaluated_offline(context: CheckedLog) -> bool:
    """Tell whether checkpoints were evaluated after training and logged with the times of the checkpoints (TR 9.4).

    The times must not decrease. The last evaluation must be of a checkpoint at the end of a block, and the run must end
    soon after this checkpoint.
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
        record = run.first[violation.key]
        is_padded = violation.key == "eval_samples" and rules.EVAL_SAMPLES < record.value < 2 * rules.EVAL_SAMPLES
        if is_padded:
            remedy = "leave out padding, and count each of the 10,000 sequences once in every evaluation"
            violation = violation._replace(remedy=remedy)
        yield finding_of(record, violation, "warning" if is_padded else "error")
    cleared = context.log.all("cache_clear")
    # Every process may log cache_clear. Report a fault only if no process dropped the caches.
    if cleared and all(record.value is False for record in cleared):
        remedy = "drop the caches before each run (needs root), and log what was done"
        yield at(cleared[0], f"value {shown(cleared[0].value)}: caches kept", "caches dropped before the run", remedy)


def _check_plausibility(context: CheckedLog) -> Iterator[Finding]:
    """Check that the numbers of a closed run are plausible. Other checks report numbers of a wrong type."""
    run = context.run
    if run.division != "closed" or context.aborted:
        return
    for key, (low, high) in rules.PLAUSIBLE.items():
        for record in context.log.all(key):
            if rules.is_number(record.value) and record.value > 0 and not low <= record.value <= high:
                found, expected = f"value {shown(record.value)}", f"{low:g} to {high:g}, as in any run of BERT-Large"
                # Skip an accuracy above 1, because `check_records` reports it.
                is_result = key == "eval_accuracy"
                if not is_result or rules.FRACTION.accepts(record.value):
                    severity: Severity = "error" if is_result else "warning"
                    yield at(record, found, expected, "check the number and its unit", severity=severity)
    accumulated, batch = run.count_of("gradient_accumulation_steps"), run.global_batch_size
    if accumulated and batch and accumulated > batch:
        found, expected = f"value {accumulated}", f"at most the global_batch_size {batch}"
        yield at(run.first["gradient_accumulation_steps"], found, expected, "log the micro-batches of a step")
    stop, rate = run.last.get("run_stop"), run.sequences_per_s
    is_plausible = rate is None or rules.MIN_RATE <= rate <= rules.MAX_RATE
    if stop and not context.misdated and (run.seconds == 0 or not is_plausible):
        found = f"{run.trained or 0} sequences in {run.seconds:g} s"
        expected = f"from {rules.MIN_RATE:g} to {rules.MAX_RATE:,.0f} a second, as in any published run"
        yield at(stop, found, expected, "check the unit of time_ms, and that run_start and run_stop are of one run")


def _check_result(context: CheckedLog) -> Iterator[Finding]:
    run = context.run
    stop = run.last.get("run_stop")
    if stop and context.aborted:
        remedy = "run again; a run that misses its target is not a result"
        yield at(stop, "status aborted", "status success", remedy, "TR 11, 12")
        return
    # If the last accuracy is not a fraction, `check_records` reports it.
    if not run.accuracies or not rules.FRACTION.accepts(run.accuracies[-1].value):
        return
    trained, samples, batch = run.first.get("train_samples"), run.epoch_nums, run.global_batch_size
    is_counted = trained and samples and rules.is_number(trained.value)
    for violation in unearned_success(run, run.value("train_samples")):
        if violation.key == "eval_accuracy":
            yield finding_of(run.accuracies[-1], violation)
        # If epoch_num does not count sequences, it cannot be compared with train_samples.
        elif trained and is_counted and trained.value >= (batch or 0) and not run.other_unit:
            # Only warn if train_samples is larger: other software logs the planned samples or the size of the data set.
            yield finding_of(trained, violation, "error" if trained.value < samples[-1] else "warning")
    if trained and is_counted and trained.value < (batch or 0):
        remedy = "log the samples at convergence"
        yield at(trained, f"value {shown(trained.value)}", f"at least one batch of {batch}", remedy, "TR 24.6")
    reached, last = run.reached, run.accuracies[-1]
    # A last accuracy below the target has been reported above, as an error.
    if reached is not None and run.went_on and last.value >= rules.QUALITY_TARGET:
        found = f"evaluation {reached + 1} reached the target, and the run went on to evaluation {len(run.accuracies)}"
        remedy = "stop at the first evaluation that reaches the target: the RCP checker judges the last one"
        yield at(run.accuracies[reached], found, "run_stop after it", remedy, "TR 11; RCP checker", "warning")


def checks_of(context: CheckedLog) -> tuple[Callable[[CheckedLog], Iterator[Finding]], ...]:
    # After an incomplete read, check only the lines: the other checks would report unread records as missing.
    if context.log.given_up:
        return (check_lines,)
    # The line checks say why no record can be read. Do not report every required record as missing, too.
    if not context.log.records:
        return (check_lines, _check_chain)
    # The other checks would mistake several attempts, several processes or a part of a run for one whole run.
    if context.defect in ("joined", "ranks", "headless"):
        return (_check_defect, check_lines)
    of_records = (
        check_lines,
        _check_chain,
        _check_whole_run,
        check_records,
        _check_division,
        _check_time,
        _check_fixed_settings,
        _check_plausibility,
    )
    if context.defect:
        return (_check_defect, *of_records)
    return (*of_records, _check_presence, _check_result)
