"""The tree of a submission: the logs, the system description and the source of this repository.

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

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compliance.convergence.outlook import Outlook
from compliance.convergence.selection import FAILED, Selection
from compliance.log import rules
from compliance.log.findings import Finding
from compliance.log.reader import Log
from compliance.log.rules import SUBMISSION_RUNS
from compliance.package.source import SourceTree
from console.files import sync

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
"""Names of folders that the repository checker and every file system take."""

REPEATED_SECTIONS = ("optimizer", "training", "evaluation")
"""Sections of the configuration that make a run what it is; the others name places on one machine."""


@dataclass(frozen=True)
class PackageRequest:
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
        runs: in the order of their numbers in the tree.
        selection: how they were chosen from all runs.
        all_runs: how many there were.
        left_out: files of the source that a submission may not hold.
        findings: what is worth knowing and did not stop it.
    """

    request: PackageRequest
    division: rules.Division
    runs: tuple[SubmittedRun, ...]
    selection: Selection
    all_runs: int
    outlook: Outlook
    left_out: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def tree(self) -> Path:
        """The folder of the submission."""
        return self.request.tree

    @property
    def results(self) -> Path:
        """The folder of the logs in it."""
        return self.tree / "results" / self.request.system.stem / "bert"

    @property
    def scaling(self) -> float:
        """Factor of the score: 1, unless the outlook's verdict is "scaled"."""
        return self.outlook.scaling if self.outlook.verdict == "scaled" else 1.0

    @property
    def minutes(self) -> float:
        """The score: Olympic mean of the times to train, times `scaling`."""
        return self.selection.score * self.scaling


def write_tree(package: Package, description: Mapping[str, Any], source: SourceTree) -> None:
    """Write the tree aside and put it in its place when it is whole. Raises ``ValueError``, and then nothing is left."""
    request = package.request
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        # Beside the tree, on its file system, so that a rename can put it in its place.
        aside = Path(tempfile.mkdtemp(prefix=".partial-", dir=request.out))
    except OSError as error:
        raise ValueError(f"{request.out} cannot be written: {error.strerror}; choose another --out") from error
    try:
        aside.chmod(0o755)  # mkdtemp lets nobody else in
        _fill(aside, package, description, source)
        # On the disk before the rename: a name must not outlive its content.
        _sync_all(aside)
        _put_in_place(aside, request.tree)
        sync(request.out)
    except OSError as error:
        raise ValueError(f"{error.filename or request.tree} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone by now, unless something failed


def _put_in_place(new: Path, tree: Path) -> None:
    if not tree.exists():
        new.replace(tree)
        return
    # A folder that is not empty cannot be renamed over: the old tree steps aside, and comes back if the new one fails.
    old = Path(tempfile.mkdtemp(prefix=f"{tree.name}.replaced-", dir=tree.parent))
    tree.replace(old / tree.name)
    try:
        new.replace(tree)  # Ctrl-C between the two renames would leave no tree
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


def _fill(root: Path, package: Package, description: Mapping[str, Any], source: SourceTree) -> None:
    request, system = package.request, package.request.system.stem
    benchmark = root / "benchmarks" / "bert"
    implementation = benchmark / "implementations" / request.implementation
    for name in source.files:
        _copy(source.root / name, implementation / name)
    _text(root / "systems" / f"{system}.json", json.dumps(dict(description), indent=2, ensure_ascii=False) + "\n")
    results = root / "results" / system / "bert"
    for run in package.runs:
        # Byte by byte, because the chain of digests and a reviewer both look at the bytes.
        _copy(run.log.path, results / run.name)
    # Also written by the package checker later; the summarizer looks for it before its own check would have written it.
    if package.outlook.verdict == "scaled":
        # As the package checker writes it.
        _text(results / "scaling.json", json.dumps({"scaling_factor": package.scaling}))
    _text(root / "README.md", _organisation_readme(package))
    _copy(source.root / "LICENSE", root / "LICENSE.md")
    configuration = _configuration(package)
    _text(benchmark / system / f"{system}_{request.implementation}.json", json.dumps(configuration, indent=2) + "\n")
    _text(benchmark / system / "README.md", _system_readme(package))
    # The recipe's name comes from a log and becomes a word of a shell script.
    if NAME.fullmatch(configuration.get("recipe", "")):
        script = benchmark / system / "run_and_time.sh"
        _text(script, _script(request.implementation, configuration["recipe"], configuration["configuration"]))
        script.chmod(0o755)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    # Modes as git keeps them, whatever the umask was.
    target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _configuration(package: Package) -> dict[str, Any]:
    """Return what the head of the first log says: versions, hardware, and the resolved configuration."""
    header = package.runs[0].log.header
    configuration = {key.removeprefix("config."): value for key, value in header.items() if key.startswith("config.")}
    # Each run has its own seed, which its log holds.
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
        # A seed is drawn for each run, and an empty setting is one that was not set.
        if not dot or section not in REPEATED_SECTIONS or key == "training.seed" or value in ("", "None", "{}"):
            continue
        if not re.fullmatch(r"\w+", name):  # a log is nobody's to trust
            continue
        name = name.replace("_", "-")
        if value in ("True", "False"):
            options.append(f"--{section}.{'' if value == 'True' else 'no-'}{name}")
        # Only what a shell takes as it stands; all else is named in a comment of the script.
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
