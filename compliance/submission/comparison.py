"""Compare the logs of a folder with each other: copies, settings that differ, and seeds that occur twice.

A fault of one log is added to the findings of that log.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compliance.convergence.selection import counted_seconds
from compliance.log import rules
from compliance.log.findings import Finding, Severity, Verdict, shown
from compliance.log.logged_run import LoggedRun
from compliance.log.record import Record
from console.text import visible

HYPERPARAMETERS = tuple(
    key
    for key in rules.KEYS
    if key.startswith("opt_") or key in ("gradient_accumulation_steps", "num_warmup_steps", "start_warmup_step")
)
"""Settings, besides the batch size, that all runs of one result must share."""

SUBMISSION_KEYS: dict[str, Severity] = {
    "submission_division": "error",
    "submission_org": "warning",
    "submission_platform": "warning",
    "submission_status": "warning",
}
"""Keys that must have the same value in all logs of a folder, each with the severity of a difference."""

NOT_COMPARED = ("training.seed", "log.", "checkpoint.", "plan", "resume", "save_checkpoint", "dry_run")
"""Prefixes of the settings that are not compared, such as seeds, output folders, and how the run was started."""

MAX_SETTINGS = 100


@dataclass(frozen=True)
class FolderRun:
    """A run of a folder, with the verdict on its log alone.

    `digest` covers the record lines of the log and is empty if there are none. `findings` are faults found by
    comparison with the other logs.
    """

    verdict: Verdict
    logged: LoggedRun
    seeds: tuple[Record, ...] = ()
    digest: bytes = b""
    findings: list[Finding] = field(default_factory=list)

    @property
    def name(self) -> str:
        """File name of the log, escaped for messages."""
        return visible(self.verdict.path.name)

    @property
    def counted_seconds(self) -> float:
        """Time to train that enters the score; infinite if the run is not a valid result."""
        return counted_seconds(self.logged, passed=self.complete_verdict.passed)

    def add_finding(
        self, record: Record | None, key: str, rule: str, found: str, remedy: str, severity: Severity, more: int = 0
    ) -> None:
        """Add a finding from the comparison with other logs, unless the record already has an error of its own."""
        line, source = (record.line, record.logged_at) if record else (None, None)
        if not any((own.line, own.key) == (line, key) for own in self.verdict.errors):
            self.findings.append(Finding(line, key, rule, found, remedy, source, severity, more))

    @property
    def complete_verdict(self) -> Verdict:
        """The verdict including `findings`. An error in `findings` replaces warnings about the same record."""
        places = {(finding.line, finding.key) for finding in self.findings if finding.severity == "error"}
        kept = [own for own in self.verdict.findings if own.severity == "error" or (own.line, own.key) not in places]
        found = sorted((*kept, *self.findings), key=lambda finding: finding.line or 0)
        return replace(self.verdict, findings=tuple(found))


def without_copies(runs: Sequence[FolderRun]) -> list[FolderRun]:
    """Return the runs that are not copies of an earlier run. Add a finding to each copy."""
    originals: dict[bytes, FolderRun] = {}
    for run in runs:
        original = originals.setdefault(run.digest, run) if run.digest else run
        if original is not run:
            found = f"{run.name} is a copy of {original.name}: all records are the same, expected a run of its own"
            run.add_finding(None, "", "TR 12", found, "remove the copy, and run again", "error")
    return [run for run in runs if originals.get(run.digest, run) is run]


def compare_settings(runs: Sequence[FolderRun], division: rules.Division) -> None:
    """Add a finding to each log in which a setting differs from most logs."""
    for key, severity in SUBMISSION_KEYS.items():
        for run, record, found in _deviations(runs, key):
            run.add_finding(record, key, "TR 12", found, "keep the logs of one system and entry in a folder", severity)
    severity = "error" if division == "closed" else "warning"
    remedy = "submit runs of one configuration: run this one again"
    key, apart = "global_batch_size", set()
    for run, record, found in _deviations(runs, key):
        apart.add(run.name)
        run.add_finding(record, key, "TR 12; RCP checker", found, remedy, severity)
    # Compare only runs of the same batch size, because many settings depend on it.
    alike = [run for run in runs if run.name not in apart]
    odd: dict[str, list[tuple[FolderRun, Record, str]]] = {}
    for run, record, found in (each for key in HYPERPARAMETERS for each in _deviations(alike, key)):
        odd.setdefault(run.name, []).append((run, record, found))
    for (run, record, found), *others in odd.values():
        likewise = f"; {', '.join(other.key for _, other, _ in others)} likewise" if others else ""
        run.add_finding(record, record.key, "TR 9.1; TR 12", found + likewise, remedy, severity)


def differing_settings(runs: Sequence[LoggedRun]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, each with one value per run. The value is "-" if a log has none.

    The settings are the configuration and the number of processes in the headers. If a log has no such header, the logged
    hyperparameters of all runs are compared instead. Data sets are compared by their paths, because logs do not have
    digests of them.
    """
    tables = [
        {key.removeprefix("config."): value for key, value in run.header.items() if _is_setting(key)} for run in runs
    ]
    if any(run.first and not table for run, table in zip(runs, tables, strict=True)):
        keys = ("global_batch_size", "quality_target", "eval_interval_samples", *HYPERPARAMETERS)
        tables = [{key: run.value(key) for key in keys if key in run.first} for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    values = {name: [table[name] for table in tables if name in table] for name in names}
    differing = [name for name in names if len({*map(_comparable, values[name])}) > 1]
    return {name: [str(table.get(name, "-")) for table in tables] for name in differing[:MAX_SETTINGS]}


def _is_setting(line: str) -> bool:
    return line == "processes" or (
        line.startswith("config.") and not line.removeprefix("config.").startswith(NOT_COMPARED)
    )


def _deviations(runs: Sequence[FolderRun], key: str) -> Iterator[tuple[FolderRun, Record, str]]:
    """Yield (run, record, text of the finding) for each run whose value of `key` differs from most runs."""
    holders = [(run, run.logged.first[key]) for run in runs if key in run.logged.first]
    counts = Counter(_comparable(record.value) for _, record in holders)
    if not counts:
        return
    # If several values are the most frequent ones, use the first of them.
    most = max(counts, key=lambda value: counts[value])
    first, usual = next((run, record) for run, record in holders if _comparable(record.value) == most)
    named = "most logs of the folder" if 2 * counts[most] > len(holders) else f"{first.name}: all logs must agree"
    for run, record in holders:
        if _comparable(record.value) != most:
            yield run, record, f"value {shown(record.value)}, expected {shown(usual.value)} as in {named}"


def _comparable(value: Any) -> object:
    # 1 and 1.0 are the same value. Lists and objects are not hashable, so use their JSON.
    return float(value) if rules.is_number(value) else json.dumps(value, sort_keys=True)


def compare_seeds(runs: Sequence[FolderRun], division: rules.Division, submission: Severity) -> None:
    """Add a finding to each log whose seed equals the seed of an earlier log.

    The official seed checker compares pairs of source position and seed. Here the first seeds of any two logs must differ,
    even if their source positions differ, because otherwise the runs would be identical.
    """
    severity, rule = "error" if division == "closed" else "warning", "TR 5.1; seed checker"
    # Maps (source position, seed) to the first record with both. The first seed of each log is also a key by itself.
    logged: dict[object, tuple[FolderRun, Record]] = {}
    for run in runs:
        shared = []
        for index, record in enumerate(run.seeds):
            seed, position = _seed(record), record.logged_at
            if seed is None:
                continue  # another check reports an invalid value
            if position is None and division == "closed":
                found = "the metadata lacks file or lineno, expected both, as the seed checker does"
                remedy = "log it with the logger of mlperf-logging"
                run.add_finding(record, "seed", "seed checker", found, remedy, submission)
                continue
            earlier = logged.setdefault((position, seed), (run, record))
            if earlier[1] is record and index == 0:
                earlier = logged.setdefault(seed, (run, record))
            if earlier[1] is not record:
                shared.append((record, seed, *earlier))
        # A missing seed is an error. Before 4.1.0 the check of a log only warns, but the seed checker fails the folder.
        if not run.seeds and run.verdict.official == "pass" and division == "closed" and submission == "error":
            found = "no record, expected one with the seed of the run: the seed checker asks for it"
            run.add_finding(None, "seed", rule, found, "log the seed, once, from one process", "error")
        for record, seed, other, first in shared[:1]:
            where = "" if other is run else f"{other.name} "
            found = (
                f"value {seed} was logged before, in {where}line {first.line}, expected a different seed in every run"
            )
            remedy = "run again with a seed from the clock or /dev/urandom, logged once by one process"
            run.add_finding(record, "seed", rule, found, remedy, severity, len(shared) - 1)


def _seed(record: Record) -> int | None:
    try:
        # Accept a number in quotes, as the seed checker does.
        return int(record.value)
    except (TypeError, ValueError, OverflowError):
        return None
