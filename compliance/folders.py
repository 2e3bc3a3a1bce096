"""Find what a path holds: the runs of one system, of several, or a whole submission. Looks at names, opens no log.

<org>/systems/<system>.json                  the system descriptions of a submission
<org>/results/<system>/bert/result_<n>.txt   its logs
<org>/benchmarks/                            its source

A round is a folder of such submissions.

A results folder on its own, results/<system>/bert beside results/systems, is laid out alike and called bare: its runs
may still be growing. Folders behind symbolic links are not entered in a submission, and no search goes on without end.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from compliance.artefact import MAX_FILE_BYTES
from compliance.log import rules
from compliance.log.findings import Finding, Severity
from console.text import counted, visible

BENCHMARK = "bert"
"""The only name of the benchmark's folder that the official package checker looks into."""

COUNTED = "result_*.txt"
"""Pattern of the names that the official package checker takes for logs."""

LIKE_A_LOG = re.compile(r"results?[-_. ]*\d*(\.(txt|log|out))?(\.(gz|xz|zst|zip|bak|old))?", re.IGNORECASE)
"""Names that were meant to be one."""

BESIDE_LOGS = ("scaling.json", "package_checker_params", "power")
"""Other names that the official tools know in the folder of the logs."""

MAX_ENTRIES = 10_000
"""Maximum entries of one folder that are looked at."""

MAX_WALKED = 200_000
"""Maximum files and folders of a submission that are looked at."""

MAX_DEPTH = 64
"""Folders inside each other that are looked into; a path may be too long to be opened before they end."""

MAX_NAME = 200
"""Maximum characters of a name in a message."""

LAYOUT = "SR Directory structure"
REPOSITORY = "repository checker"


@dataclass(frozen=True)
class BenchmarkFolder:
    """results/<system>/bert, or what stands in its place.

    Attributes:
        logs: what the official package checker counts, in the order of the numbers; of bare results also packed ones.
        misnamed: files that were meant to be logs, and entries of a log's name that are no files.
        others: entries that no official tool knows.
        description: where the system description belongs.
        submission: the folder that holds systems/ and results/; None for a bare results folder.
    """

    path: Path
    logs: tuple[Path, ...]
    misnamed: tuple[Path, ...]
    others: tuple[Path, ...]
    description: Path
    submission: Path | None

    @property
    def system(self) -> str:
        """Name of the system's folder."""
        return absolute(self.path).parent.name

    @property
    def severity(self) -> Severity:
        """Severity of lacking what a submission must have, and bare results get in time."""
        return "error" if self.submission else "warning"

    @property
    def named_right(self) -> bool:
        """Tell whether the official package checker looks into it."""
        return absolute(self.path).name == BENCHMARK


@dataclass(frozen=True)
class Tree:
    """The contents of a path.

    Attributes:
        path: as given.
        submission: the submission that it is or lies in; None for bare results.
        descriptions: the system descriptions that belong to it and are there.
    """

    path: Path
    submission: Path | None
    benchmarks: tuple[BenchmarkFolder, ...]
    descriptions: tuple[Path, ...]

    @property
    def is_submission(self) -> bool:
        """Tell whether `path` is a whole submission."""
        return self.submission is not None and self.submission == self.path


def absolute(path: Path) -> Path:
    """The path from the root on, without "..", and by way of the same links."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the links


def find(path: Path) -> Tree:
    """The benchmark folders under a folder: of a benchmark, a system, a results folder or a submission.

    Raises:
        ValueError: it is no folder, or holds nothing of the kind.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder, expected a log, results/<system>/bert, or a folder above it")
    if (path / "results").is_dir():  # a submission, or what holds results/
        # A folder that only holds results/ is no submission: its runs may still be growing.
        submission = path if _is_submission(path) else None
        found = _of_results(path / "results", submission)
    elif any(map(_is_benchmark, _folders(path, None))):  # results/<system>
        submission = _submission_above(path, 2)
        found = _of_system(path, submission)
    elif _is_benchmark(path):  # results/<system>/bert
        submission = _submission_above(path, 3)
        found = [_benchmark_folder(path, submission)]
    else:
        submission = _submission_above(path, 1)
        found = _of_results(path, submission)
    if not found:
        raise ValueError(f"{path}: no logs in it, expected results/<system>/bert/result_<n>.txt or a folder above them")
    if submission == path:
        # All of them: the package checker reads every description, with or without results of that name.
        descriptions = [entry for entry in _entries(path / "systems") if entry.suffix == ".json"]
    else:
        # Each once, as a system may have several folders of BERT.
        descriptions = list(dict.fromkeys(folder.description for folder in found if folder.description.is_file()))
    return Tree(path, submission, tuple(found), tuple(descriptions))


def find_all(path: Path) -> list[Tree]:
    """The submissions of a round, <round>/<org>, that hold results of BERT; for any other folder what `find` finds.

    Raises:
        ValueError: see `find`.
    """
    # Folders behind links may lead out of the round, and back into it.
    submissions = [folder for folder in _folders(path, path) if _is_submission(folder)]
    if not submissions or (path / "results").is_dir() or any(map(_is_counted, _entries(path))):
        return [find(path)]
    trees = []
    for submission in submissions:
        with suppress(ValueError):  # its results are of other benchmarks
            trees.append(find(submission))
    if not trees:
        raise ValueError(f"{path}: no logs of {BENCHMARK} in the {counted(len(submissions), 'submission')} below it")
    return trees


def layout_findings(folder: BenchmarkFolder, runs: int | None) -> Iterator[Finding]:
    """Yield what is wrong with the names and the number of a folder's entries, without opening one.

    Args:
        runs: how many logs a submission has; None if these are not meant for one.
    """
    if not folder.named_right:
        found = f"the folder is named {_name(folder.path)}: the official package checker skips it and reports success"
        yield Finding(
            None, "", LAYOUT, f"{found}, expected {BENCHMARK}", f"rename it to {BENCHMARK}", severity=folder.severity
        )
    if folder.misnamed:
        names = ", ".join(map(_name, folder.misnamed[:3]))
        verb = "is" if len(folder.misnamed) == 1 else "are"
        found = f"{names} {verb} not counted as a log, expected the name result_<n>.txt"
        more = max(0, len(folder.misnamed) - 3)
        yield Finding(None, "", LAYOUT, found, "rename the file, or put the log itself in its place", more=more)
    unnumbered = [path for path in folder.logs if not rules.LOG_FILE.fullmatch(path.name)]
    yield from _layout_warning(unnumbered, "has no number, expected result_<n>.txt", "number the runs from 0")
    elsewhere = [] if folder.submission else [path for path in folder.logs if _leads_out(path)]
    fault = "is a symbolic link to a file outside of the folder, expected the log itself"
    yield from _layout_warning(elsewhere, fault, "put the file itself in its place")
    count = len(folder.logs)
    # Not where the number is right as soon as the misnamed ones are renamed.
    if runs is not None and count != runs and count + len(folder.misnamed) != runs:
        remedy = "add the missing runs" if count < runs else "choose the runs to submit: `python -m compliance package`"
        found = f"{counted(count, 'log')} result_<n>.txt, expected exactly {runs} in a submission"
        yield Finding(None, "", "TR 12; package checker", found, remedy, severity=folder.severity)
    if folder.submission:
        # Beside bare results there are metrics and reports, which belong there.
        fault = "is no file of a submission, expected only logs in this folder"
        yield from _layout_warning(folder.others, fault, "move it away: the package checker warns of it")


def _layout_warning(paths: Sequence[Path], fault: str, remedy: str) -> Iterator[Finding]:
    """The finding for the first of the paths, if there is one."""
    if paths:
        found, more = f"{_name(paths[0])} {fault}", len(paths) - 1
        yield Finding(None, "", LAYOUT, found, remedy, severity="warning", more=more)


def description_missing(folder: BenchmarkFolder) -> Iterator[Finding]:
    """The finding for a system without a description, which crashes the official tools."""
    if folder.description.is_file() or not (folder.submission or folder.description.parent.is_dir()):
        return
    name = f"systems/{folder.system}.json"
    remedy = f"write it: `python -m compliance system --out {quote(name)}`; its name is that of the results folder"
    found = f"there is no {name}, expected the system description: the official package checker crashes without it"
    yield Finding(None, "", LAYOUT, found, remedy, severity=folder.severity)


def repository_findings(tree: Tree) -> Iterator[Finding]:
    """Names, sizes and links that the official repository checker, or another machine, does not take."""
    logs = {log for folder in tree.benchmarks for log in folder.logs}
    misnamed = {entry for folder in tree.benchmarks for entry in folder.misnamed}  # reported there
    named, unprintable, large, links, deep = [], [], [], [], []
    for walked, entry in enumerate(_walk(tree.path)):
        if walked == MAX_WALKED:
            found = f"more than {MAX_WALKED} files and folders, the rest was not looked at"
            yield Finding(None, "", REPOSITORY, found, "submit only what the rules ask for", severity="warning")
            break
        path = Path(entry.path)
        if entry.name.startswith(".") or " " in entry.name:  # as the repository checker has it
            named.append(path)
        if visible(entry.name) != entry.name:
            unprintable.append(path)
        if entry.is_symlink() and path not in misnamed:
            links.append(path)
        if len(path.parts) - len(tree.path.parts) > MAX_DEPTH:
            deep.append(path)
        # A log's size is checked where the log is.
        if path not in logs and _is_large(entry):
            large.append(path)
    faults: tuple[tuple[list[Path], str, str, Severity], ...] = (
        (named, "has a space or a leading dot in its name, expected neither", "rename or remove it", "error"),
        (unprintable, "has unprintable characters in its name, expected none", "rename or remove it", "warning"),
        (large, f"is too large, expected at most {MAX_FILE_BYTES >> 20} MiB", "remove or shrink it", "error"),
        (links, "is a symbolic link, expected the file itself", "put the file itself in its place", "error"),
        (deep, f"lies more than {MAX_DEPTH} folders deep, what is below was not looked at", "put it higher", "warning"),
    )
    for paths, fault, remedy, severity in faults:
        if paths:
            # The first by name, as a folder lists its entries in any order.
            first = visible(min(paths).relative_to(tree.path), MAX_NAME)
            yield Finding(None, "", REPOSITORY, f"{first} {fault}", remedy, severity=severity, more=len(paths) - 1)


def _is_submission(path: Path) -> bool:
    return (path / "results").is_dir() and any((path / name).is_dir() for name in ("systems", "benchmarks"))


def _of_results(results: Path, submission: Path | None) -> list[BenchmarkFolder]:
    return [folder for system in _folders(results, submission) for folder in _of_system(system, submission)]


def _of_system(system: Path, submission: Path | None) -> list[BenchmarkFolder]:
    return [_benchmark_folder(folder, submission) for folder in _folders(system, submission) if _is_benchmark(folder)]


def _is_benchmark(folder: Path) -> bool:
    """Tell whether a folder was meant to hold logs of BERT: by its logs or its name, unless others hold them below it."""
    if folder.name in OTHER_BENCHMARKS:
        return False
    entries = _entries(folder)
    if any((_is_counted(entry) or _is_packed_log(entry)) and entry.is_file() for entry in entries):
        return True
    below = any(BENCHMARK in entry.name.lower() and entry.is_dir() for entry in entries)
    return not below and BENCHMARK in absolute(folder).name.lower()


OTHER_BENCHMARKS = frozenset((
    "dlrm", "dlrm_dcnv2", "flux1", "gnmt", "gnn", "gpt3", "llama2_70b_lora", "llama31_405b", "llama31_8b",
    "maskrcnn", "minigo", "ncf", "resnet", "retinanet", "rgat", "rnnt", "ssd", "stable_diffusion", "transformer",
    "unet3d",
))  # fmt: skip
"""Folders of a submission that belong to other benchmarks, and are none of this checker's business."""


def _benchmark_folder(path: Path, submission: Path | None) -> BenchmarkFolder:
    logs, misnamed, others = [], [], []
    for entry in _entries(path):
        if _is_counted(entry) or (not submission and _is_packed_log(entry)):
            (logs if entry.is_file() else misnamed).append(entry)
        elif LIKE_A_LOG.fullmatch(entry.name) and entry.is_file():
            misnamed.append(entry)
        elif entry.name not in BESIDE_LOGS:
            others.append(entry)
    results = absolute(path).parent.parent
    description = (submission or results) / "systems" / f"{absolute(path).parent.name}.json"
    if not submission and description.is_relative_to(Path.cwd()):
        description = description.relative_to(Path.cwd())
    return BenchmarkFolder(
        path, tuple(sorted(logs, key=_number)), tuple(misnamed), tuple(others), description, submission
    )


def _is_counted(path: Path) -> bool:
    return fnmatch.fnmatchcase(path.name, COUNTED)


def _is_packed_log(path: Path) -> bool:
    """Tell whether it is named result_<n>.txt.gz, and no result_<n>.txt stands beside it."""
    match = rules.LOG_FILE.fullmatch(path.name)
    # lexists: beside a link that leads nowhere the packed log is not the run either.
    return match is not None and match[2] is not None and not os.path.lexists(path.with_suffix(""))


def numbered_logs(folder: Path) -> list[tuple[int, Path]]:
    """The logs of a folder, packed ones too, each after its number and in the order of the numbers.

    Raises:
        ValueError: the folder is missing or holds none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder, expected results/<system>/bert")
    named = [path for path in folder.iterdir() if rules.RESULT_FILE.fullmatch(path.name) or _is_packed_log(path)]
    if not named:
        raise ValueError(f"{folder}: no result_<n>.txt in it, expected results/<system>/bert after a run")
    return sorted((int(path.name.split(".")[0].removeprefix("result_")), path) for path in named)


def _submission_above(path: Path, levels: int) -> Path | None:
    """The submission that a results folder `levels - 1` folders above `path` lies in, if it does."""
    above = absolute(path)
    for _ in range(levels - 1):
        above = above.parent
    if above.name != "results" or not (above.parent / "systems").is_dir():
        return None
    submission = above.parent
    return submission.relative_to(Path.cwd()) if submission.is_relative_to(Path.cwd()) else submission


def _folders(path: Path, submission: Path | None) -> list[Path]:
    # Folders behind links may lead out of the submission, and back into it.
    folders = [entry for entry in _entries(path) if entry.is_dir() and not (submission and entry.is_symlink())]
    return [folder for folder in folders if not folder.name.startswith(".")]


def _entries(path: Path) -> list[Path]:
    """The entries of a folder by name, empty when there is none; never more than `MAX_ENTRIES`."""
    try:
        with os.scandir(path) as entries:
            # Bounded while it is listed, as a folder may hold millions.
            return sorted(path / entry.name for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False))
    except OSError:
        return []


def _leads_out(path: Path) -> bool:
    """Tell whether a file is a link that leaves its folder."""
    return path.is_symlink() and path.resolve().parent != path.parent.resolve()


def _number(path: Path) -> tuple[int, str]:
    match = rules.LOG_FILE.fullmatch(path.name)
    return (int(match[1]) if match and len(match[1]) < 10 else 2**31, path.name)


def _walk(root: Path) -> Iterator[os.DirEntry[str]]:
    """Files and folders below a folder, but for those in hidden and linked folders and more than `MAX_DEPTH` deep."""
    folders = [(root, 1)]
    while folders:
        folder, depth = folders.pop()
        # A folder that may not be read, or has gone meanwhile, holds nothing up.
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                yield entry
                is_open = entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
                if is_open and depth <= MAX_DEPTH:
                    folders.append((Path(entry.path), depth + 1))


def _is_large(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size > MAX_FILE_BYTES
    except OSError:
        return False


def _name(path: Path) -> str:
    """A file's name for a message."""
    return visible(absolute(path).name, MAX_NAME)
