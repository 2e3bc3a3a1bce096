"""Make the tree of a submission from a folder of logs, a system description and the source of this repository.

    <org>/README.md, LICENSE.md
    <org>/systems/<system>.json
    <org>/benchmarks/bert/implementations/<implementation>/     the source: what git tracks, without results
    <org>/benchmarks/bert/<system>/                             how these runs were made: README.md, the resolved
                                                                configuration as JSON, run_and_time.sh
    <org>/results/<system>/bert/result_0.txt ... result_9.txt   and scaling.json, where the score is scaled

SR "Directory structure", and what the published submissions do where the text and they differ. The tree is written
aside and renamed when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compliance.artefact import MAX_FILE_BYTES, PARTIAL, sync
from compliance.check.checker import check_log
from compliance.convergence.outlook import Outlook, outlook
from compliance.convergence.reference_points import SUBMISSION_RUNS
from compliance.convergence.standing import batch_size_of, division_of, minutes_of, result_logs
from compliance.log import rules
from compliance.log.findings import Finding, Verdict
from compliance.log.records import Log
from compliance.package.selection import FAILED, Selection, select
from compliance.package.source import Source, tracked_source
from compliance.submission.description import description_findings, read_description

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
"""Names of folders that the repository checker and every file system take."""

REPEATED_SECTIONS = ("optimizer", "training", "evaluation")
"""Sections of the configuration that make a run what it is; the others name places on one machine."""

INDISPENSABLE_FIELDS = ("submitter", "division", "status", "system_name", "framework")


@dataclass(frozen=True)
class Request:
    """Request to package a submission.

    Attributes:
        system: the system description; its name without .json names the system.
        runs: the folder with the logs.
        out: the folder in which <org>/ is made.
        replace: whether a tree that is there already may go.
    """

    org: str
    system: Path
    runs: Path
    out: Path
    ruleset: str = rules.NEWEST_RULESET
    implementation: str = "mlperf-bert"
    replace: bool = False

    def __post_init__(self) -> None:
        rules.check_ruleset(self.ruleset)
        for option, name in (("org", self.org), ("system", self.system.stem), ("implementation", self.implementation)):
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"{option}: {name!r} cannot name a folder of a submission, expected letters, digits, . _ + -"
                )

    @property
    def tree(self) -> Path:
        """The folder of the submission."""
        return self.out / self.org


@dataclass(frozen=True)
class SubmittedRun:
    """A run of the submission: result_<n>.txt in the tree, and the log that it is a copy of.

    Attributes:
        minutes: time to train; infinite when the run is no valid result.
    """

    name: str
    log: Log
    minutes: float


@dataclass(frozen=True)
class Package:
    """A submission tree.

    Attributes:
        results: the folder of the logs in it.
        runs: in the order of their numbers in the tree.
        selection: how they were chosen from all runs.
        all_runs: how many there were.
        scaling: factor of the score: 1, unless the outlook's verdict is "scaled".
        minutes: the score: Olympic mean of the times to train, times `scaling`.
        left_out: files of the source that a submission may not hold.
        findings: what is worth knowing and did not stop it.
    """

    request: Request
    tree: Path
    results: Path
    division: rules.Division
    runs: tuple[SubmittedRun, ...]
    selection: Selection
    all_runs: int
    outlook: Outlook
    scaling: float
    minutes: float
    left_out: tuple[str, ...]
    findings: tuple[Finding, ...]


def make_package(request: Request) -> Package:
    """Write the submission tree request.out/request.org.

    Raises:
        ValueError: why these logs, this description or this place make no submission; then nothing was written.
    """
    if request.tree.exists() and not request.replace:
        raise ValueError(f"{request.tree} is there already: choose another --out, or give --replace to write it anew")
    logs = result_logs(request.runs)
    division = division_of(logs)
    description = _description(request, division)
    _refuse_unsuitable(logs)
    chosen, selection = _choose(logs, request.ruleset)
    ahead = outlook(
        [run.log.run.converged_samples() for run in chosen], batch_size_of(logs), request.ruleset, division=division
    )
    scaling = ahead.scaling if ahead.verdict == "scaled" else 1.0
    source = tracked_source()
    package = Package(
        request=request,
        tree=request.tree,
        results=request.tree / "results" / request.system.stem / "bert",
        division=division,
        runs=chosen,
        selection=selection,
        all_runs=len(logs),
        outlook=ahead,
        scaling=scaling,
        minutes=selection.score * scaling,
        left_out=source.left_out,
        findings=tuple(_findings(description, logs, source)),
    )
    _write(package, description, source)
    return package


# What makes no submission


def _description(request: Request, division: rules.Division) -> dict[str, Any]:
    path = request.system
    description = read_description(path)
    faults = [fault for fault in description_findings(description, request.ruleset) if fault.severity == "error"]
    if faults:
        more = f" ({len(faults) - 1} more faults)" if len(faults) > 1 else ""
        field = f"{faults[0].key}: " if faults[0].key else ""
        raise ValueError(f"{path}: {field}{faults[0].found}; {faults[0].remedy}{more}")
    for name in INDISPENSABLE_FIELDS:
        if description.text(name) is None:
            raise ValueError(f"{path}: {name} is empty: `python -m compliance system --out {path} --set {name}=...`")
    if description.fields["division"] != division:
        raise ValueError(
            f"{path}: division is {description.fields['division']!r}, but the logs say {division!r}; no official "
            "tool compares the two, and seeds and convergence are checked only where the file says 'closed': "
            "put the wrong one right"
        )
    return description.fields


def _refuse_unsuitable(logs: list[Log]) -> None:
    folder = logs[0].path.parent
    ended = [log for log in logs if log.run.is_ended]
    if len(ended) < SUBMISSION_RUNS:
        running = f", and {len(logs) - len(ended)} without an end" if len(ended) < len(logs) else ""
        raise ValueError(
            f"{folder}: {len(ended)} complete logs{running}, expected {SUBMISSION_RUNS} (TR 12): make the missing runs; "
            f"`python -m compliance convergence {folder}` says what they must do"
        )
    digests: dict[bytes, Path] = {}
    for log in logs:
        if log.packed:
            raise ValueError(f"{log.path}: packed in gzip, which no official tool reads: unpack it with `gunzip`")
        if log.path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{log.path}: larger than {MAX_FILE_BYTES >> 20} MiB, the most that a submission may hold")
        same = digests.setdefault(hashlib.sha256(log.path.read_bytes()).digest(), log.path)
        if same != log.path:
            raise ValueError(
                f"{log.path} is a copy of {same.name}, expected a run of its own: remove the copy and run again"
            )
        if log.run.resumed_from is not None:
            raise ValueError(
                f"{log.path}: the run was resumed from {log.run.resumed_from!a}, so its clock did not run all the "
                "time (TR 11): no run of a submission; move the log away and run again"
            )


def _choose(logs: list[Log], ruleset: str) -> tuple[tuple[SubmittedRun, ...], Selection]:
    verdicts = [check_log(log, ruleset) for log in logs]
    times = [minutes_of(log) if verdict.passed else FAILED for log, verdict in zip(logs, verdicts, strict=True)]
    selection = select([log.run.start_ms or 0 for log in logs], times, SUBMISSION_RUNS)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if selection.score == FAILED:
        named = "; ".join(f"{verdict.path.name}: {_why(verdict)}" for verdict in failed)
        raise ValueError(
            f"{logs[0].path.parent}: {len(failed)} runs are no valid results, and a set of {SUBMISSION_RUNS} may hold one "
            f"(TR 12): {named}. Run again"
        )
    for run in selection.chosen:
        if verdicts[run].official == "pass" and not verdicts[run].passed:
            raise ValueError(
                f"{logs[run].path}: {_why(verdicts[run])}. The official tools do not see it and would count the run: move "
                "the log away and run again"
            )
    chosen = [
        SubmittedRun(f"result_{number}.txt", logs[run], times[run]) for number, run in enumerate(selection.chosen)
    ]
    return tuple(chosen), selection


def _why(verdict: Verdict) -> str:
    return f"{verdict.errors[0]}" if verdict.errors else verdict.summary


# What does not stop it


def _findings(description: Mapping[str, Any], logs: list[Log], source: Source) -> Iterator[Finding]:
    for log in logs:
        if not log.run.is_ended:
            found = f"{log.path.name} has no run_stop and was counted as a failed run"
            remedy = "if it is still running, wait for it and package again"
            yield Finding(None, "run_stop", "TR 12", found, remedy, severity="warning")
    empty = [name for name in rules.MEANINGFUL_SYSTEM_FIELDS if not description[name]]
    if not description["host_processor_core_count"] and not description["host_processor_vcpu_count"]:
        empty.append("host_processor_core_count")
    if empty:
        found = f"the system description leaves {', '.join(empty)} empty, expected a meaningful answer"
        remedy = "fill them in; N/A where the system has no such thing"
        yield Finding(None, empty[0], "SR <system_desc_id>.json metadata", found, remedy, severity="warning")
    commits = {log.header["commit"] for log in logs if "commit" in log.header} - {source.commit}
    if source.commit and commits:
        found = f"a log was made at commit {min(commits)!a}, but the source is packaged at {source.commit!r}"
        remedy = "check out the commit of the runs and package from there"
        yield Finding(None, "", "SR Source code requirements for replication", found, remedy, severity="warning")
    if source.modified:
        found = f"{source.modified[0]} differs from its commit"
        remedy = "commit it, or package from a clean checkout: what is packaged must be what ran"
        yield Finding(
            None, "", "SR Source code requirements for replication", found, remedy, severity="warning",
            more=len(source.modified) - 1,
        )  # fmt: skip


# The tree


def _write(package: Package, description: Mapping[str, Any], source: Source) -> None:
    request = package.request
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=request.out))
    except OSError as error:
        raise ValueError(f"{request.out} cannot be written: {error.strerror}; choose another --out") from error
    try:
        aside.chmod(0o755)
        _fill(aside, package, description, source)
        _sync_all(aside)
        _put_in_place(aside, request.tree)
        sync(request.out)
    except OSError as error:
        raise ValueError(f"{error.filename or request.tree} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put_in_place(new: Path, tree: Path) -> None:
    if not tree.exists():
        new.replace(tree)
        return
    old = Path(tempfile.mkdtemp(prefix=f"{tree.name}.replaced-", dir=tree.parent))
    tree.replace(old / tree.name)
    try:
        new.replace(tree)
    except BaseException:
        (old / tree.name).replace(tree)
        old.rmdir()
        raise
    shutil.rmtree(old)


def _sync_all(root: Path) -> None:
    """Wait until a tree is on the disk, so that no loss of power leaves its name with less in it."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in (*files, "."):
            sync(Path(folder, name))


def _fill(root: Path, package: Package, description: Mapping[str, Any], source: Source) -> None:
    request, system = package.request, package.request.system.stem
    benchmark = root / "benchmarks" / "bert"
    implementation = benchmark / "implementations" / request.implementation
    for name in source.files:
        _copy(source.root / name, implementation / name)
    _text(root / "systems" / f"{system}.json", json.dumps(dict(description), indent=2, ensure_ascii=False) + "\n")
    results = root / "results" / system / "bert"
    for run in package.runs:
        _copy(run.log.path, results / run.name)
    if package.outlook.verdict == "scaled":
        _text(results / "scaling.json", json.dumps({"scaling_factor": package.scaling}))
    _text(root / "README.md", _organisation_readme(package))
    _copy(source.root / "LICENSE", root / "LICENSE.md")
    configuration = _configuration(package)
    _text(benchmark / system / f"{system}_{request.implementation}.json", json.dumps(configuration, indent=2) + "\n")
    _text(benchmark / system / "README.md", _system_readme(package))
    if NAME.fullmatch(configuration.get("recipe", "")):
        script = benchmark / system / "run_and_time.sh"
        _text(script, _script(request.implementation, configuration["recipe"], configuration["configuration"]))
        script.chmod(0o755)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _configuration(package: Package) -> dict[str, Any]:
    """Return what the head of the first log says: versions, hardware, and the resolved configuration."""
    header = package.runs[0].log.header
    configuration = {key.removeprefix("config."): value for key, value in header.items() if key.startswith("config.")}
    head = {key: value for key, value in header.items() if not key.startswith(("config.", "seed"))}
    settings = {
        key: package.runs[0].log.run.first.get(key)
        for key, rule in rules.KEYS.items()
        if rule.phases == ("init",) and rule.once and key not in ("seed", "init_stop")
    }
    logged = {key: record.value for key, record in settings.items() if record}
    return {"implementation": package.request.implementation, **head, "configuration": configuration, "logged": logged}


def _script(implementation: str, recipe: str, configuration: Mapping[str, str]) -> str:
    """A script that starts the same runs from the source in the tree."""
    options, unsaid = [], []
    for key, value in configuration.items():
        section, dot, name = key.partition(".")
        if not dot or section not in REPEATED_SECTIONS or key == "training.seed" or value in ("", "None", "{}"):
            continue
        if not re.fullmatch(r"\w+", name):  # a log is nobody's to trust
            continue
        name = name.replace("_", "-")
        if value in ("True", "False"):
            options.append(f"--{section}.{'' if value == 'True' else 'no-'}{name}")
        elif re.fullmatch(r"[\w.+/:-]+", value):
            options.append(f"--{section}.{name} {value}")
        else:
            unsaid.append(key)
    note = f"# To be added by hand, from the JSON file beside this: {', '.join(unsaid)}.\n" if unsaid else ""
    continued = " \\\n".join(["", *(f"  {option}" for option in options)])
    return (
        "#!/usr/bin/env bash\n"
        f"# Makes the {SUBMISSION_RUNS} runs again: recipe {recipe} with the settings that the logs name.\n"
        f"{note}set -euo pipefail\n"
        f'cd "$(dirname "${{BASH_SOURCE[0]}}")/../implementations/{implementation}"\n'
        f'./run_and_time.sh {recipe} "${{RUNS:-{SUBMISSION_RUNS}}}" --{continued} "$@"\n'
    )


def _organisation_readme(package: Package) -> str:
    request, system = package.request, package.request.system.stem
    return f"""# {request.org}

{rules.NOT_A_RESULT}

| system | division | benchmark | runs | minutes | scaled by |
|---|---|---|---|---|---|
| {system} | {package.division} | bert | {len(package.runs)} | {package.minutes:.4f} | {package.scaling:.6f} |

- `systems/{system}.json`: the system
- `results/{system}/bert/`: the logs
- `benchmarks/bert/{system}/`: how these runs were made
- `benchmarks/bert/implementations/{request.implementation}/`: the source; its README.md is the place to start
"""


def _system_readme(package: Package) -> str:
    rows = map(_row, package.runs)
    return f"""# BERT on {package.request.system.stem}

{rules.NOT_A_RESULT}

`run_and_time.sh` here, where there is one, makes these runs again; the JSON file has the resolved configuration, versions
and hardware that the first log names. Data, model, optimizer, order of the data and evaluation are described in the pages
under `docs/` of the implementation.

| log | made as | seed | minutes | samples to the target |
|---|---|---|---|---|
{chr(10).join(rows)}

{describe_selection(package)}

{package.outlook.sentence}
"""


def _row(run: SubmittedRun) -> str:
    said = run.log.run
    seed = "" if said.seed is None else str(said.seed)
    minutes = f"{run.minutes:.4f}" if run.minutes < FAILED else "no valid result"
    reached = said.converged_samples()
    samples = f"{reached:,}" if reached else ""
    return f"| {run.name} | {run.log.path.name} | {seed} | {minutes} | {samples} |"


def describe_selection(package: Package) -> str:
    """Say in words how the runs were chosen."""
    if len(package.selection.scores) == 1:
        return f"All {package.all_runs} runs are submitted."
    scores = ", ".join(f"{score:.4f}" if score < FAILED else "invalid" for score in package.selection.scores)
    return (
        f"{package.all_runs} runs were made. Sorted by their start, the windows of {SUBMISSION_RUNS} consecutive runs have "
        f"the Olympic scores {scores} (minutes); submitted is window {package.selection.window + 1}, the median (TR 12.1). "
        "The logs of the others are kept: a reviewer may ask for them."
    )
