"""The tree of a submission (SR "Directory structure"): the logs, the system description and the source of this repository.

    <org>/README.md, LICENSE.md
    <org>/systems/<system>.json
    <org>/benchmarks/bert/implementations/mlperf-bert/          the source: tracked files, without results
    <org>/benchmarks/bert/<system>/                             the resolved configuration as JSON
    <org>/results/<system>/bert/result_0.txt ... result_9.txt   and scaling.json if the score is scaled

The tree is written to a temporary folder and renamed when it is complete.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from compliance.artefact import MAX_FILE_BYTES
from compliance.convergence.outlook import Outlook
from compliance.convergence.selection import FAILED, Selection
from compliance.log import rules
from compliance.log.findings import Finding
from compliance.log.reader import Log
from compliance.log.rules import SUBMISSION_RUNS
from console.files import atomic_path, sync
from console.processes import run as run_program
from console.text import visible
from console.version import REPOSITORY

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
"""Pattern of folder names that the repository checker and all file systems accept."""

IMPLEMENTATION = "mlperf-bert"

TIMEOUT_S = 60
INDISPENSABLE = ("README.md", "Dockerfile", "LICENSE", "run_and_time.sh")


@dataclass(frozen=True)
class PackageRequest:
    """Request to package the logs in `runs` as <out>/<org>. The description's file name without .json names the system."""

    org: str
    system: Path
    runs: Path
    out: Path

    def __post_init__(self) -> None:
        for option, name in (("--org", self.org), ("--system", self.system.stem)):
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"{option}: {name!r} cannot name a folder of a submission, expected a letter or digit, "
                    "then letters, digits, . _ + -"
                )

    @property
    def tree(self) -> Path:
        return self.out / self.org


@dataclass(frozen=True)
class SubmittedRun:
    """A run of the submission: its name in the tree, its log, and its time to train, infinite if it is invalid."""

    name: str
    log: Log
    minutes: float


@dataclass(frozen=True)
class Package:
    """A submission tree.

    `runs` are the chosen runs in the order of their numbers in the tree. `findings` are faults of the runs
    and the source that do not prevent the submission.
    """

    request: PackageRequest
    division: rules.Division
    runs: tuple[SubmittedRun, ...]
    selection: Selection
    outlook: Outlook
    findings: tuple[Finding, ...]

    @property
    def results(self) -> Path:
        return self.request.tree / "results" / self.request.system.stem / "bert"

    @property
    def minutes(self) -> float:
        """The score: Olympic mean of the times to train, multiplied by the scaling factor (TR 13)."""
        return self.selection.score * self.outlook.applied_scaling

    @property
    def choice(self) -> str:
        """Text that says how the runs were chosen."""
        if len(self.selection.scores) == 1:
            return f"All {SUBMISSION_RUNS} runs are submitted."
        scores = ", ".join(f"{score:.4f}" if score < FAILED else "invalid" for score in self.selection.scores)
        all_runs = len(self.selection.scores) + SUBMISSION_RUNS - 1
        return (
            f"{all_runs} runs were made. Sorted by their start, the windows of {SUBMISSION_RUNS} consecutive runs have "
            f"the Olympic scores {scores} (minutes); submitted is window {self.selection.window + 1}, the median (TR 12.1). "
            "Keep the logs of the other runs: a reviewer may ask for them."
        )


@dataclass(frozen=True)
class SourceTree:
    """Source files of a submission, as sorted paths below `root`, where `commit` is checked out.

    The files in `modified` differ from the commit. Links, hidden files, files of more than 50 MiB, and names with spaces or
    unprintable characters are left out, because a submission must not contain them.
    """

    root: Path
    files: tuple[str, ...]
    commit: str
    modified: tuple[str, ...]


def tracked_source(root: Path = REPOSITORY) -> SourceTree:
    """Return the source below `root`.

    Raises ``ValueError`` if `root` is not a git checkout, or lacks README.md, Dockerfile, LICENSE or run_and_time.sh.
    """
    # Require .git in `root`. If `root` is only a folder inside another checkout, git would list the files of that one.
    commit = run_program(["git", "rev-parse", "HEAD"], folder=root, timeout_s=TIMEOUT_S)
    if not (root / ".git").exists() or commit.trouble:
        raise ValueError(
            f"{root} is not a checkout that git can read, so its source files are unknown. Package from a git checkout"
        )
    names = [name for name in _git(root, "ls-files") if not name.startswith("results/")]
    files = [name for name in names if _may_be_submitted(root / name, name)]
    for name in INDISPENSABLE:
        if name not in files:
            raise ValueError(f"{root} holds no {name}: package from a checkout of this repository")
    modified = [name for name in _git(root, "diff", "--name-only", "HEAD") if name in files]
    return SourceTree(root, tuple(files), commit.answer.strip(), tuple(modified))


def _may_be_submitted(path: Path, name: str) -> bool:
    parts = PurePosixPath(name).parts
    named = visible(name) == name and not any(part.startswith(".") or " " in part for part in parts)
    # Files may be missing, because git also lists files whose deletion is not committed.
    return named and path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE_BYTES


def _git(root: Path, *arguments: str) -> list[str]:
    """Return the file names that a git command prints, sorted. Raises ``ValueError`` if the command fails."""
    output = run_program(["git", *arguments, "-z"], folder=root, timeout_s=TIMEOUT_S)
    if output.trouble:
        raise ValueError(f"{root}: git {arguments[0]} failed: {output.complaint}")
    return sorted(filter(None, output.answer.split("\0")))


def write_tree(package: Package, description: Mapping[str, Any], source: SourceTree) -> None:
    """Write the tree atomically. Raises ``ValueError`` if that fails, and leaves nothing behind."""
    tree = package.request.tree
    try:
        tree.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(tree) as aside:
            aside.mkdir()
            _fill(aside, package, description, source)
            # Flush all contents to disk before the tree gets its final name.
            for folder, _, files in os.walk(aside, topdown=False):
                for name in (*files, "."):
                    sync(Path(folder, name))
    except OSError as error:
        raise ValueError(
            f"{error.filename or tree} cannot be written: {error.strerror}; choose another --out"
        ) from error


def _fill(root: Path, package: Package, description: Mapping[str, Any], source: SourceTree) -> None:
    system, benchmark = package.request.system.stem, root / "benchmarks" / "bert"
    for name in source.files:
        _copy(source.root / name, benchmark / "implementations" / IMPLEMENTATION / name)
    _copy(source.root / "LICENSE", root / "LICENSE.md")
    results = root / "results" / system / "bert"
    for run in package.runs:
        # Copy the exact bytes, because the digests in the log cover them.
        _copy(run.log.path, results / run.name)
    # The summarizer reads scaling.json before it writes this file itself, so write it here.
    if package.outlook.verdict == "scaled":
        _text(results / "scaling.json", json.dumps({"scaling_factor": package.outlook.scaling}))
    _text(root / "systems" / f"{system}.json", json.dumps(dict(description), indent=2, ensure_ascii=False) + "\n")
    configuration = json.dumps(_configuration(package.runs[0].log), indent=2)
    _text(benchmark / system / f"{system}_{IMPLEMENTATION}.json", configuration + "\n")
    _text(root / "README.md", _readme(package))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    # Set the modes that git would set, independent of the umask.
    target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _configuration(log: Log) -> dict[str, Any]:
    """Return the versions, hardware, settings and resolved configuration from a log's header."""
    configuration = {key.removeprefix("config."): text for key, text in log.header.items() if key.startswith("config.")}
    # Leave out the seed, because each run has its own seed in its log.
    head = {key: text for key, text in log.header.items() if not key.startswith(("config.", "seed"))}
    logged = {key: log.run.first[key].value for key in rules.SETTINGS if key in log.run.first and key != "seed"}
    return {"implementation": IMPLEMENTATION, **head, "configuration": configuration, "logged": logged}


def _readme(package: Package) -> str:
    request, system, scaling = package.request, package.request.system.stem, package.outlook.applied_scaling
    return f"""# {request.org}

{rules.NOT_A_RESULT}

| system | division | benchmark | runs | minutes | scaled by |
|---|---|---|---|---|---|
| {system} | {package.division} | bert | {len(package.runs)} | {package.minutes:.4f} | {scaling:.6f} |

`benchmarks/bert/implementations/{IMPLEMENTATION}/` is the source. `./run_and_time.sh RECIPE {SUBMISSION_RUNS}` there, with
the recipe and the settings of `benchmarks/bert/{system}/{system}_{IMPLEMENTATION}.json`, repeats the runs. The
pages under its `docs/` describe data, model and evaluation.

## The runs

| log | made as | seed | minutes | samples to the target |
|---|---|---|---|---|
{chr(10).join(map(_row, package.runs))}

{package.choice}

{package.outlook.sentence}
"""


def _row(run: SubmittedRun) -> str:
    logged = run.log.run
    seed = "" if logged.seed is None else str(logged.seed)
    minutes = f"{run.minutes:.4f}" if run.minutes < FAILED else "no valid result"
    reached = logged.converged_samples()
    return f"| {run.name} | {run.log.path.name} | {seed} | {minutes} | {f'{reached:,}' if reached else ''} |"
