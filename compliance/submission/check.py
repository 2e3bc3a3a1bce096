"""Check folders of logs: each log by itself, the logs against each other, and the description against the logs.

Faults that do not belong to a single log go into the folder's own verdict. A fault of one log, such as a seed that another
log also has, is added to the verdict of that log. One log of ten may fail: it counts as the slowest run, and the score drops
the slowest run.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from compliance.check.checker import check_file, check_logs, missed_text
from compliance.convergence.outlook import Outlook, outlook_of
from compliance.convergence.selection import submitted
from compliance.folders import (
    BenchmarkFolder,
    Tree,
    absolute,
    find_all,
    layout_findings,
    log_number,
    repository_findings,
)
from compliance.log import rules
from compliance.log.findings import Finding, Part, Severity, Verdict
from compliance.log.logged_run import LoggedRun
from compliance.log.reader import STDIN, STDIN_NAME, Log, read_log
from compliance.log.rules import SUBMISSION_RUNS
from compliance.official import process
from compliance.official.package import Answer, ask, ask_about_folder
from compliance.submission.comparison import FolderRun, compare_seeds, compare_settings, without_copies
from compliance.submission.derived import (
    metrics_findings,
    readme_findings,
    report_findings,
    scaling_findings,
    settings_findings,
)
from compliance.submission.description import Description, against_logs, description_findings, read_description
from console.text import counted, visible

MAX_NAMED = 3
"""Maximum number of logs that one message names."""


def check_paths(paths: Iterable[Path], ruleset: str = rules.NEWEST_RULESET) -> list[Verdict]:
    """Check logs and folders: a benchmark folder, a system, a results folder, a submission, a round of submissions.

    With `rules.AUTO`, each log, each submission, and each benchmark folder outside of a submission is checked under the
    newest ruleset that accepts it. Raises ``ValueError`` if a path or the ruleset does not exist, a folder contains no
    logs, or the official checker is not installed.
    """
    if ruleset != rules.AUTO:
        rules.check_ruleset(ruleset)
    paths = tuple(paths)
    if paths.count(STDIN) > 1:
        raise ValueError(
            f"{STDIN}: given {paths.count(STDIN)} times, but standard input can be read only once. Give it once"
        )
    verdicts: list[Verdict] = []
    for path in paths:
        if path != STDIN and path.is_dir():
            verdicts += (verdict for tree in find_all(path) for verdict in _check_tree(tree, ruleset))
        else:
            verdicts.append(check_file(path, ruleset))
    if not any(verdict.part == "log" for verdict in verdicts):
        empty = next((verdict for verdict in verdicts if verdict.part == "folder"), None)
        why = f"{empty.path}: {empty.errors[0].sentence}; {empty.errors[0].remedy}" if empty else "no path given"
        raise ValueError(f"no log was read: {why}")
    return verdicts


def accepted(verdicts: Sequence[Verdict]) -> bool:
    """Tell whether all verdicts pass. Ignore the verdict on a log if there is a verdict on its folder."""
    folders = {absolute(verdict.path) for verdict in verdicts if verdict.part == "folder"}
    logs = [each for each in verdicts if each.part == "log" and each.path != STDIN_NAME]
    excused = {log.path for log in logs if absolute(log.path).parent in folders}
    return bool(verdicts) and all(each.passed or each.path in excused for each in verdicts)


def is_for_submission(run: LoggedRun) -> bool:
    """Tell whether a run is meant for a submission. Only open runs of this repository's recipes are not."""
    # Logs of other software contain no configuration, so they count as meant for a submission.
    return run.header.get("config.log.division") != "open"


def _check_tree(tree: Tree, ruleset: str) -> list[Verdict]:
    # All logs of a submission belong to one round, so judge them under one ruleset. Folders without a submission may
    # belong to several rounds, so choose a ruleset for each of them.
    if tree.submission:
        paths = [path for folder in tree.benchmarks for path in folder.logs]
        all_runs, chosen = _check_logs(paths, tree.descriptions, ruleset)
        runs = iter(all_runs)
        checked = [(folder, [next(runs) for _ in folder.logs], chosen) for folder in tree.benchmarks]
    else:
        checked = [(folder, *_check_logs(folder.logs, [folder.description], ruleset)) for folder in tree.benchmarks]
    newest = max((chosen for *_, chosen in checked), key=rules.RULESETS.index)
    verdicts = []
    if tree.submission == tree.path:
        answer = ask("repository", tree.path, newest)
        verdicts.append(_verdict(tree.path, "submission", newest, answer, [*repository_findings(tree)]))
    for path in tree.descriptions:
        of_description = [(runs, chosen) for folder, runs, chosen in checked if folder.description == path]
        chosen = of_description[-1][1] if of_description else newest
        description = read_description(path)
        findings = [*description_findings(description, chosen)]
        if not description.fault:
            findings += against_logs(description, [run.logged for runs, _ in of_description for run in runs])
        is_old = ruleset == rules.AUTO and chosen != rules.NEWEST_RULESET
        missed = missed_text(_errors(description, rules.NEWEST_RULESET)) if is_old else ""
        verdicts.append(_verdict(path, "description", chosen, ask("system", path, chosen), findings, missed))
    owners: dict[bytes, BenchmarkFolder] = {}
    for folder, runs, chosen in checked:
        verdicts += _check_folder(folder, runs, chosen, _shared(folder, runs, owners))
    return verdicts


def _shared(folder: BenchmarkFolder, runs: Sequence[FolderRun], owners: dict[bytes, BenchmarkFolder]) -> list[Finding]:
    """Return a warning if logs of the folder are also in another system's folder. Add the folder's logs to `owners`."""
    others = [owners[run.digest] for run in runs if run.digest in owners]
    owners |= {run.digest: folder for run in runs if run.digest}
    if not others:
        return []
    found = f"{visible(others[0].path)} also has {counted(len(others), 'log')} of these, expected different runs"
    return [Finding(None, "", "TR 12", found, "submit the runs of each system", severity="warning")]


TOOLS: dict[Part, str] = {"folder": "package", "description": "system", "submission": "repository"}
"""Kind of question in `process.NAMES` that an official tool answers about each part of a submission."""


def _verdict(
    path: Path, part: Part, ruleset: str, answer: Answer, findings: list[Finding], missed: str = ""
) -> Verdict:
    """Return a verdict. If the official tool rejects the part, at least one finding is an error.

    If `findings` contains no error, the message of the tool is added to it as an error.
    """
    if answer.outcome == "fail" and not any(finding.severity == "error" for finding in findings):
        tool = process.NAMES[TOOLS[part]]
        found = f"the official {tool} rejects it: {answer.message or 'it does not say why'}"
        remedy = (
            "correct the fault that its message names"
            if answer.message
            else f"run the {tool} by hand (docs/submission.md)"
        )
        findings.append(Finding(None, "", f"mlperf-logging, ruleset {ruleset}", found, remedy))
    return Verdict(path, ruleset, answer.outcome, tuple(findings), None, None, missed, part)


def _read(path: Path) -> Log | Verdict:
    """Read a log. If it is unreadable, return a verdict and raise no exception, so that the other logs are compared."""
    try:
        return read_log(path)
    except ValueError as error:
        found = str(error).removeprefix(f"{path}: ")
        finding = Finding(None, "", "log format", found, "put the log itself in its place")
        return Verdict(path, rules.AUTO, "fail", (finding,), None, None)


def _check_logs(paths: Sequence[Path], descriptions: Sequence[Path], ruleset: str) -> tuple[list[FolderRun], str]:
    """Read logs, and check them and their descriptions under one ruleset. Return the runs and the ruleset."""
    logs, limit = [_read(path) for path in paths], rules.NEWEST_RULESET
    if ruleset == rules.AUTO:
        described = [read_description(path) for path in descriptions if path.is_file()]
        # min() returns the first, and so the newest, of equally good rulesets.
        limit = min(reversed(rules.RULESETS), key=lambda each: sum(len(_errors(one, each)) for one in described))
    verdicts = check_logs([log for log in logs if isinstance(log, Log)], ruleset, limit)
    chosen = verdicts[0].ruleset if verdicts else limit if ruleset == rules.AUTO else ruleset
    of_logs = iter(verdicts)
    runs = [_run_of(log, next(of_logs) if isinstance(log, Log) else replace(log, ruleset=chosen)) for log in logs]
    return runs, chosen


def _errors(description: Description, ruleset: str) -> list[Finding]:
    return [finding for finding in description_findings(description, ruleset) if finding.severity == "error"]


def _run_of(log: Log | Verdict, verdict: Verdict) -> FolderRun:
    # An unreadable log, or a log with the records of several runs, is not compared with the other logs.
    if isinstance(log, Verdict) or not verdict.is_one_run:
        return FolderRun(verdict, LoggedRun())
    # Digest only the records, so that a copy of a log with other comments is recognised.
    digest = hashlib.sha256(b"\n".join(line for _, line in log.evidence)).digest() if log.evidence else b""
    return FolderRun(verdict, log.run, tuple(log.all("seed")), digest)


def _check_folder(
    folder: BenchmarkFolder, runs: list[FolderRun], ruleset: str, findings: list[Finding]
) -> list[Verdict]:
    # Use the open division only if most logs name it. The closed division has stricter rules.
    named = Counter(str(run.verdict.division).lower() for run in runs)
    division: rules.Division = "open" if max(named, key=named.__getitem__, default="") == "open" else "closed"
    originals = without_copies(runs)
    compare_settings(originals, division)
    compare_seeds(originals, division, folder.severity)
    for run in runs:
        run.findings.extend(metrics_findings(run.verdict.path, run.logged))
    is_meant = folder.submission or not runs or any(is_for_submission(run.logged) for run in runs)
    findings += layout_findings(folder, SUBMISSION_RUNS if is_meant else None)
    convergence = _convergence(runs, ruleset) if division == "closed" else None
    answer = _official_answer(
        folder, runs, division, ruleset, by_train_samples=bool(convergence and convergence.by_train_samples)
    )
    if any(not run.complete_verdict.passed for run in runs):
        findings.append(_failed_runs(runs, answer))
    if convergence:
        findings += _convergence_findings(convergence, folder.severity)
    findings += _derived_findings(folder, runs, convergence)
    missed = [run.verdict.missed for run in runs if run.verdict.missed]
    verdict = _verdict(folder.path, "folder", ruleset, answer, findings, missed[0] if missed else "")
    return [verdict, *(run.complete_verdict for run in runs)]


def _official_answer(
    folder: BenchmarkFolder, runs: Sequence[FolderRun], division: str, ruleset: str, *, by_train_samples: bool
) -> Answer:
    if folder.submission:
        # Supply a missing division, without which the package checker crashes. The description is checked separately.
        fields = {"division": division} | read_description(folder.description).fields
        return ask_about_folder(folder, fields, ruleset, by_train_samples)
    # Results outside of a submission may be incomplete, which the package checker rejects. Judge them by the official
    # verdicts on their logs. One log of ten may fail.
    failed = sum(run.verdict.official == "fail" for run in runs)
    return Answer("pass" if runs and failed <= (len(runs) >= SUBMISSION_RUNS) else "fail")


def _derived_findings(
    folder: BenchmarkFolder, runs: Sequence[FolderRun], convergence: Outlook | None
) -> Iterator[Finding]:
    passed = [run.logged for run in runs if run.complete_verdict.passed]
    yield from scaling_findings(folder, convergence, passed, len(runs) - len(passed))
    numbered = {int(number): run.logged for run in runs if (number := log_number(run.verdict.path))}
    yield from report_findings(folder, numbered)
    if folder.submission:
        seconds = [run.counted_seconds for run in runs]
        yield from readme_findings(folder.submission, folder.system, seconds, convergence)
        yield from settings_findings(folder.submission, folder.system, [run.logged for run in runs])


def _failed_runs(runs: Sequence[FolderRun], answer: Answer) -> Finding:
    """Return a finding that says whether the folder can pass despite its failing logs."""
    failed = [run for run in runs if not run.complete_verdict.passed]
    names = ", ".join(run.name for run in failed[:MAX_NAMED]) + (", ..." if len(failed) > MAX_NAMED else "")
    verdict, found = failed[0].verdict, f"{names} is not a valid result"
    remedy = "correct what was found in it, or repeat the run"
    if len(failed) > 1:
        found = f"{len(failed)} of {len(runs)} logs are not valid results ({names})"
        found += f", expected at most one of {SUBMISSION_RUNS}"
    elif len(runs) < SUBMISSION_RUNS:
        found += f", expected only valid logs as long as there are fewer than {SUBMISSION_RUNS}"
    elif verdict.official == "pass":
        found += ", but the official tools count it, expected ten runs that the official tools and these checks accept"
    elif answer.outcome == "fail":
        found += f", and cannot be dropped as the slowest run either: {answer.message}"
    else:
        found += ": it counts as the slowest run, which is dropped, expected no other failing log"
        return Finding(None, "", "TR 12", found, "keep all other runs valid", severity="warning")
    return Finding(None, "", "TR 12", found, remedy)


def _convergence(runs: Sequence[FolderRun], ruleset: str) -> Outlook | None:
    """Compare closed runs with the reference. Return None if batch sizes differ or more than one run failed.

    A single failed run counts as a run that did not converge.
    """
    chosen = submitted([run.logged.start_ms or 0 for run in runs], [run.counted_seconds for run in runs])
    runs = [runs[index] for index in chosen]
    passed = [run for run in runs if run.complete_verdict.passed]
    batches, failed = {run.logged.global_batch_size for run in passed}, len(runs) - len(passed)
    batch = batches.pop() if len(batches) == 1 and failed <= 1 else None
    if batch is None:
        return None
    logged = [run.logged for run in passed]
    found = outlook_of(logged, batch, ruleset, failed=failed)
    if found.verdict == "fail" and ruleset != rules.NEWEST_RULESET:
        newest = outlook_of(logged, batch, rules.NEWEST_RULESET, failed=failed).verdict
        outcome = "fail it too" if newest == "fail" else "not fail it"
        said = f"{found.sentence} The points of {rules.NEWEST_RULESET} would {outcome}."
        return replace(found, sentence=said)
    return found


def _convergence_findings(convergence: Outlook, submission: Severity) -> Iterator[Finding]:
    rule = "TR 13; RCP checker"
    if convergence.verdict in ("fail", "unknown"):
        remedy = (
            "check data, loss and evaluation against the reference: faster convergence than its runs needs a reason"
        )
        if convergence.verdict == "unknown":
            remedy = (
                "log the sequences trained so far as epoch_num of every evaluation, and at the end as train_samples"
            )
        yield Finding(None, "eval_accuracy", rule, convergence.sentence, remedy)
    elif convergence.verdict == "no reference":
        remedy = "submit reference runs at this batch size, or choose a smaller one"
        yield Finding(None, "global_batch_size", rule, convergence.sentence, remedy, severity=submission)
    elif convergence.note:
        remedy = "log the true epoch_num, and stop at the target"
        if convergence.by_train_samples:
            remedy += "; until then, the package checker needs --rcp-bert-train-samples"
        yield Finding(None, "eval_accuracy", rule, convergence.note, remedy, severity="warning")
