"""Check folders of logs: each log by itself, the logs against each other, and all of them against what describes them.

A folder gets a verdict of its own for what belongs to no single log; what does, such as the second log with the same
seed, is added to the verdict of that log. Of ten logs one may fail: it counts as the slowest run, which the score drops.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compliance.check.checker import check_file, check_log
from compliance.check.checks import PACKED
from compliance.convergence.outlook import outlook
from compliance.folders import (
    BenchmarkFolder,
    Tree,
    description_missing,
    find_all,
    layout_findings,
    repository_findings,
)
from compliance.log import rules
from compliance.log.file import STDIN
from compliance.log.findings import Finding, Severity, Verdict, shown
from compliance.log.reader import read_log
from compliance.log.record import Record
from compliance.log.rules import SUBMISSION_RUNS
from compliance.log.run import LoggedRun
from compliance.official import package as official_package
from compliance.official.package import Answer
from compliance.submission.agreement import against_logs
from compliance.submission.description import description_findings, read_description
from console.text import visible

HYPERPARAMETERS = tuple(
    key
    for key in rules.KEYS
    if key.startswith("opt_") or key in ("gradient_accumulation_steps", "num_warmup_steps", "start_warmup_step")
)
"""Settings that all runs of one result share, besides the batch size."""

SUBMISSION_KEYS: tuple[tuple[str, Severity], ...] = (
    ("submission_division", "error"),
    ("submission_org", "warning"),
    ("submission_platform", "warning"),
    ("submission_status", "warning"),
)
"""Keys that all logs of one folder have alike, and the severity if one does not."""

MAX_NAMED = 3
"""Maximum number of logs named in one sentence."""


@dataclass(frozen=True)
class FolderRun:
    """A run of a folder, as the others are compared with it.

    Attributes:
        verdict: of the log by itself.
        logged: the run as its log tells it.
        seeds: its seed records.
        digest: of the lines with its records; empty without records.
        findings: what the other logs have against this one.
    """

    verdict: Verdict
    logged: LoggedRun
    seeds: tuple[Record, ...] = ()
    digest: bytes = b""
    findings: list[Finding] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the file, for messages."""
        return visible(self.verdict.path.name)

    def object(self, finding: Finding) -> None:
        """Add what the other logs have against this one, unless its record is wrong in itself."""
        if not any((own.line, own.key) == (finding.line, finding.key) for own in self.verdict.errors):
            self.findings.append(finding)

    @property
    def complete_verdict(self) -> Verdict:
        """The verdict with what the other logs have against it, which stands in for a warning about the same record."""
        places = {(finding.line, finding.key) for finding in self.findings if finding.severity == "error"}
        kept = [own for own in self.verdict.findings if own.severity == "error" or (own.line, own.key) not in places]
        found = sorted((*kept, *self.findings), key=lambda finding: finding.line or 0)
        return replace(self.verdict, findings=tuple(found))


def check_paths(paths: Iterable[Path], ruleset: str = rules.NEWEST_RULESET) -> list[Verdict]:
    """Check logs and folders: a benchmark folder, a system, a results folder, a submission, a round of submissions.

    Args:
        paths: "-" is a log on standard input.
        ruleset: under `rules.AUTO` each log or benchmark folder gets the newest ruleset that accepts it.

    Raises:
        ValueError: no such path or ruleset, a folder without logs, or the official checker is not installed.
    """
    if ruleset != rules.AUTO:
        rules.check_ruleset(ruleset)
    verdicts: list[Verdict] = []
    for path in paths:
        if path == STDIN or not path.is_dir():
            verdicts.append(check_file(path, ruleset))
            continue
        for tree in find_all(path):
            verdicts += _check_tree(tree, ruleset)
    return verdicts


def accepted(verdicts: Sequence[Verdict]) -> bool:
    """Tell whether all pass, but for logs that are the one of ten which their folder, by its verdict, can do without."""
    folders = {verdict.path for verdict in verdicts}  # one that cannot do without the log fails itself
    return all(verdict.passed or verdict.path.parent in folders for verdict in verdicts)


def _check_tree(tree: Tree, ruleset: str) -> list[Verdict]:
    read = [_read_runs(folder, ruleset) for folder in tree.benchmarks]
    checked = [(folder, runs, chosen) for folder, (runs, chosen) in zip(tree.benchmarks, read, strict=True)]
    newest = max((chosen for _, _, chosen in checked), key=rules.RULESETS.index)
    of_description = dict.fromkeys(tree.descriptions, newest)
    of_description |= {
        folder.description: chosen for folder, _, chosen in checked if folder.description in of_description
    }
    answers = _ask_package_tools(tree, checked, of_description, newest)
    verdicts = []
    if tree.is_submission:
        findings = tuple(repository_findings(tree))
        verdicts.append(Verdict(tree.path, newest, answers[tree.path].outcome, findings, None, None))
    for path, chosen in of_description.items():
        described = [run for folder, runs, _ in checked if folder.description == path for run in runs]
        verdicts.append(_check_description(path, described, answers[path], chosen))
    for folder, runs, chosen in checked:
        verdicts += _check_folder(folder, runs, answers.get(folder.path) or _bare_answer(runs), chosen)
    return verdicts


def _ask_package_tools(
    tree: Tree,
    checked: Sequence[tuple[BenchmarkFolder, list[FolderRun], str]],
    of_description: Mapping[Path, str],
    newest: str,
) -> dict[Path, Answer]:
    """The answers of the official package tools about each folder of a submission, each description, and the root."""
    answers: dict[Path, Answer] = {}
    for ruleset in dict.fromkeys([newest, *(chosen for *_, chosen in checked)]):
        # Bare results may still be growing, which the package checker does not allow for.
        of_folders = [(folder, runs) for folder, runs, chosen in checked if tree.submission and chosen == ruleset]
        descriptions = [path for path, chosen in of_description.items() if chosen == ruleset]
        root = tree.path if tree.is_submission and ruleset == newest else None
        asked = [(folder, _division(runs)) for folder, runs in of_folders]
        folders, systems, whole = official_package.ask(asked, descriptions, root, ruleset)
        answers |= dict(zip((folder.path for folder, _ in of_folders), folders, strict=True))
        answers |= dict(zip(descriptions, systems, strict=True))
        answers |= {tree.path: whole} if whole else {}
    return answers


def _read_runs(folder: BenchmarkFolder, ruleset: str) -> tuple[list[FolderRun], str]:
    """Read and check the logs of a folder under one ruleset; returns it too."""
    runs = [_read_run(log, ruleset) for log in folder.logs]
    if ruleset != rules.AUTO:
        return runs, ruleset
    # Each log has been checked under the newest ruleset that accepts it. The oldest of these is meant for all logs.
    accepting = [run.verdict.ruleset for run in runs if run.verdict.passed]
    if accepting:
        common = min(accepting, key=rules.RULESETS.index)
    else:
        usual = Counter(run.verdict.ruleset for run in runs if run.verdict.ruleset != rules.AUTO).most_common(1)
        common = usual[0][0] if usual else rules.NEWEST_RULESET
    return [run if run.verdict.ruleset == common else _read_run(run.verdict.path, common) for run in runs], common


def is_for_submission(run: LoggedRun) -> bool:
    """Tell whether a run may become part of a submission: an open run of this repository's recipes is not meant to."""
    # Only logs of this repository name their configuration.
    return run.header.get("config.log.division") != "open"


def _read_run(path: Path, ruleset: str) -> FolderRun:
    try:
        log = read_log(path)
    except ValueError as error:
        found = str(error).removeprefix(f"{path}: ")
        finding = Finding(None, "", "log format", found, "put the log itself in its place")
        # So that the other logs are still held against each other.
        return FolderRun(Verdict(path, ruleset, "fail", (finding,), None, None), LoggedRun())
    # By the records and not by the file, so that a copy is one in gzip or with another comment, too.
    digest = hashlib.sha256(b"\n".join(line for _, line in log.evidence)).digest() if log.evidence else b""
    return FolderRun(check_log(log, ruleset), log.run, tuple(log.all("seed")), digest)


def _division(runs: Sequence[FolderRun]) -> rules.Division:
    """Return the division that most logs name; closed, the stricter one, when they do not."""
    counts = Counter(run.verdict.division for run in runs)
    return "open" if counts and str(counts.most_common(1)[0][0]).lower() == "open" else "closed"


def _bare_answer(runs: Sequence[FolderRun]) -> Answer:
    """The official verdict on logs without a submission around them: that on each, and one of ten may fail."""
    failed = sum(run.verdict.official == "fail" for run in runs)
    # The comparison counts as 0 or 1: one may fail once there are ten.
    return Answer("pass" if failed <= (len(runs) >= SUBMISSION_RUNS) else "fail")


def _check_folder(folder: BenchmarkFolder, runs: list[FolderRun], answer: Answer, ruleset: str) -> list[Verdict]:
    # One division for the folder, as the rules that compare logs differ between the two.
    division = _division(runs)
    if folder.submission:
        for run in runs:
            if PACKED in run.verdict.findings:
                # A copy with the severity that a submission gives it: the official tools would read no record in it.
                run.object(replace(PACKED, severity="error"))
    originals = _without_copies(runs)
    _compare_settings(originals, division)
    _compare_seeds(originals, division, folder.severity)
    is_meant = folder.submission or any(is_for_submission(run.logged) for run in runs)
    findings = [
        *layout_findings(folder, SUBMISSION_RUNS if is_meant else None),
        *description_missing(folder),
        *_overlaps(originals),
    ]
    if any(not run.complete_verdict.passed for run in runs):
        findings.append(_failed_runs(runs, answer))
    elif division == "closed" and len(runs) == SUBMISSION_RUNS:
        findings += _convergence(runs, folder.severity, ruleset)
    if answer.outcome == "fail" and not any(finding.severity == "error" for finding in findings):
        found = f"the official package checker does not accept the folder, expected no objection: {answer.message}"
        findings.append(Finding(None, "", f"mlperf-logging, ruleset {ruleset}", found, "see its message"))
    verdict = Verdict(folder.path, ruleset, answer.outcome, tuple(findings), None, None)
    return [verdict, *(run.complete_verdict for run in runs)]


def _without_copies(runs: Sequence[FolderRun]) -> list[FolderRun]:
    """Add to each copy of an earlier log that it is one, and return the other runs."""
    originals: dict[bytes, FolderRun] = {}
    for run in runs:
        original = originals.setdefault(run.digest, run) if run.digest else run
        if original is not run:
            found = f"{run.name} is a copy of {original.name}: all records are the same, expected a run of its own"
            run.findings.append(Finding(None, "", "TR 12", found, "remove the copy, and run again"))
    return [run for run in runs if originals.get(run.digest, run) is run]


def _compare_settings(runs: Sequence[FolderRun], division: rules.Division) -> None:
    """Add to each log what it says differently from most."""
    for key, severity in SUBMISSION_KEYS:
        for run, record, usual, named in _odd_ones(runs, key):
            remedy = "keep the logs of one system and entry in a folder"
            run.object(_at(record, "TR 12", _unlike(record, usual, named), remedy, severity))
    severity = "error" if division == "closed" else "warning"
    remedy = "submit runs of one configuration: run this one again"
    apart = set()
    for run, record, usual, named in _odd_ones(runs, "global_batch_size"):
        apart.add(run.name)
        run.object(_at(record, "TR 12; RCP checker", _unlike(record, usual, named), remedy, severity))
    departures: dict[str, list[tuple[FolderRun, Record, Record, str]]] = {}
    # With another batch size goes much else, which need not be said again.
    alike = [run for run in runs if run.name not in apart]
    for key in HYPERPARAMETERS:
        for odd in _odd_ones(alike, key):
            departures.setdefault(odd[0].name, []).append(odd)
    for (run, record, usual, named), *others in departures.values():
        keys = ", ".join(other.key for _, other, *_ in others)
        found = _unlike(record, usual, named) + (f"; {keys} likewise" if keys else "")
        run.object(_at(record, "TR 9.1; TR 12", found, remedy, severity))


def _unlike(record: Record, usual: Record, named: str) -> str:
    return f"value {shown(record.value)}, expected {shown(usual.value)} as in {named}"


def _odd_ones(runs: Sequence[FolderRun], key: str) -> Iterator[tuple[FolderRun, Record, Record, str]]:
    """Each run whose record of `key` has another value than most, with that record, a usual one, and whose that is."""
    holders = [(run, run.logged.first[key]) for run in runs if key in run.logged.first]
    counts = Counter(_comparable(record.value) for _, record in holders)
    if len(counts) < 2:
        return
    # The most frequent value is taken for what was meant, the first of several that are equally frequent.
    most, count = counts.most_common(1)[0]
    first, usual = next((run, record) for run, record in holders if _comparable(record.value) == most)
    named = "most logs of the folder" if 2 * count > len(holders) else f"{first.name}: all logs must agree"
    for run, record in holders:
        if _comparable(record.value) != most:
            yield run, record, usual, named


def _comparable(value: Any) -> object:
    # 1 and 1.0 are one value. Lists and objects cannot be counted, but their JSON can.
    return float(value) if rules.is_number(value) else json.dumps(value, sort_keys=True)


def _compare_seeds(runs: Sequence[FolderRun], division: rules.Division, submission: Severity) -> None:
    """Add to each log the seed that it shares with an earlier one.

    The official seed checker compares source position and seed. Here the first seed of two logs must differ wherever
    it was logged: the runs would be the same run.
    """
    severity = "error" if division == "closed" else "warning"
    positions: dict[tuple[object, ...], tuple[FolderRun, Record]] = {}
    first_seeds: dict[int, tuple[FolderRun, Record]] = {}
    for run in runs:
        shared = []
        for index, record in enumerate(run.seeds):
            seed, position = _seed(record), record.logged_at
            if seed is None:
                continue  # reported with the values
            if position is None and division == "closed":
                found = "no metadata file and lineno, expected them, as the seed checker does"
                run.object(_at(record, "seed checker", found, "log it with the logger of mlperf-logging", submission))
                continue
            earlier = positions.setdefault((position, seed), (run, record))
            if earlier[1] is record and index == 0:
                earlier = first_seeds.setdefault(seed, (run, record))
            if earlier[1] is not record:
                shared.append((record, seed, *earlier))
        # A missing seed is a warning of the log before ruleset 4.1.0, but the seed checker fails the folder under all
        # of them.
        if not run.seeds and run.verdict.official == "pass" and division == "closed" and submission == "error":
            found = "no record, expected one with the seed of the run: the seed checker asks for it"
            run.object(Finding(None, "seed", "TR 5.1; seed checker", found, "log the seed, once, from one process"))
        if not shared:
            continue
        record, seed, other, first = shared[0]
        where = "" if other is run else f"{other.name} "
        found = f"value {seed} was logged before, in {where}line {first.line}, expected another seed in every run"
        remedy = "run again with a seed from the clock or /dev/urandom, logged once by one process"
        run.object(_at(record, "TR 5.1; seed checker", found, remedy, severity, more=len(shared) - 1))


def _seed(record: Record) -> int | None:
    try:
        # As the seed checker reads it: a number in quotes is one.
        return int(record.value)
    except (TypeError, ValueError, OverflowError):
        return None


def _overlaps(runs: Sequence[FolderRun]) -> Iterator[Finding]:
    # By their start, so that a run overlaps where it begins before the latest end so far.
    timed = sorted(
        (run.logged.run_start_ms, run.logged.run_stop_ms, run.name)
        for run in runs
        if run.logged.run_start_ms is not None and run.logged.run_stop_ms is not None
    )
    overlaps, latest = [], None
    for start, stop, name in timed:
        if latest and start < latest[0]:
            overlaps.append((name, latest[1]))
        latest = max(latest, (stop, name)) if latest else (stop, name)  # the run that ends last so far
    if overlaps:
        name, other = overlaps[0]
        found = f"{name} ran while {other} was running, expected one run at a time on one system"
        remedy = "say in the README that the runs shared the system, or had several"
        yield Finding(None, "run_start", "TR 12", found, remedy, severity="warning", more=len(overlaps) - 1)


def _failed_runs(runs: Sequence[FolderRun], answer: Answer) -> Finding:
    """Build the finding for what the logs that fail mean for the folder."""
    failed = [run for run in runs if not run.complete_verdict.passed]
    names = ", ".join(run.name for run in failed[:MAX_NAMED]) + (", ..." if len(failed) > MAX_NAMED else "")
    if len(failed) > 1:
        found = f"{len(failed)} of {len(runs)} logs are no valid results ({names})"
        found += f", expected at most one of {SUBMISSION_RUNS}"
    elif len(runs) < SUBMISSION_RUNS:
        found = f"{names} is no valid result, expected only such ones before there are {SUBMISSION_RUNS}"
    elif failed[0].verdict.official == "pass" and failed[0].verdict.passed:
        found = f"{names} does not fit the other logs, expected ten runs of one entry, each with a seed of its own"
    elif answer.outcome == "fail":
        found = f"{names} is no valid result, and cannot be dropped as the slowest run either: {answer.message}"
    elif failed[0].verdict.official == "pass":
        found = f"{names} is no valid result, and the official tools count it as one, expected a log that both accept"
    else:
        found = f"{names} is no valid result: it counts as the slowest run, which is dropped, expected at most this one"
        return Finding(None, "", "TR 12", found, "keep all other runs valid", severity="warning")
    return Finding(None, "", "TR 12", found, "correct what was found in it, or repeat the run")


def _convergence(runs: Sequence[FolderRun], submission: Severity, ruleset: str) -> Iterator[Finding]:
    # All logs have passed, so that each has one, and the same.
    batch = runs[0].logged.first["global_batch_size"].value
    prospect = outlook([run.logged.converged_samples() for run in runs], batch, ruleset)
    remedy = "check data, loss and evaluation against the reference: faster convergence than its runs needs a reason"
    if prospect.verdict == "fail":
        yield Finding(None, "eval_accuracy", "TR 13; RCP checker", prospect.sentence, remedy)
    elif prospect.verdict == "no reference":
        remedy = "submit reference runs at this batch size, or choose a smaller one"
        yield Finding(None, "global_batch_size", "TR 13; RCP checker", prospect.sentence, remedy, severity=submission)


def _check_description(path: Path, runs: Sequence[FolderRun], answer: Answer, ruleset: str) -> Verdict:
    description = read_description(path)
    findings = [*description_findings(description, ruleset)]
    if runs and not description.fault:
        findings += against_logs(description, [run.logged for run in runs])
    if answer.outcome == "fail" and not any(finding.severity == "error" for finding in findings):
        found = (
            f"the official description checker does not accept the description, expected no objection: {answer.message}"
        )
        findings.append(Finding(None, "", f"mlperf-logging, ruleset {ruleset}", found, "see its message"))
    return Verdict(path, ruleset, answer.outcome, tuple(findings), None, None)


def _at(record: Record, rule: str, found: str, remedy: str, severity: Severity = "error", more: int = 0) -> Finding:
    return Finding(record.line, record.key, rule, found, remedy, record.logged_at, severity, more)
