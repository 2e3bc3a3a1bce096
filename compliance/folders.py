"""Find what a path contains: the runs of one system, of several systems, or a whole submission. Logs are not opened.

<org>/systems/<system>.json                  the system descriptions of a submission
<org>/results/<system>/bert/result_<n>.txt   its logs
<org>/benchmarks/                            its source

A round is a folder of such submissions. A bare results folder lies outside of a submission. It contains the logs in
results/<system>/bert and the descriptions in results/systems, and its runs may still be in progress. Symbolic links to
folders are followed in bare results but not in a submission.
"""

import fnmatch
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from compliance.artefact import MAX_FILE_BYTES, open_regular
from compliance.log import rules
from compliance.log.findings import Finding, Severity
from compliance.log.record import TOKEN_BYTES
from console.text import counted, visible

BENCHMARK = "bert"
"""The only name of a benchmark folder that the official package checker accepts for BERT."""

OTHER_BENCHMARKS = frozenset((
    "dlrm", "dlrm_dcnv2", "flux1", "gnmt", "gnn", "gpt3", "llama2_70b_lora", "llama31_405b", "llama31_8b",
    "maskrcnn", "minigo", "ncf", "resnet", "retinanet", "rgat", "rnnt", "ssd", "stable_diffusion", "transformer",
    "unet3d",
))  # fmt: skip
"""Folder names of other benchmarks, which are not checked."""

COUNTED = "result_*.txt"
"""File name pattern that the official package checker accepts as a log."""

_GZIP = ".gz"
"""Suffix of compressed logs. They are accepted only outside of a submission."""

LIKE_A_LOG = re.compile(r"results?[-_. ]*\d*(\.(txt|log|out))?(\.(gz|xz|zst|zip|bak|old))?", re.IGNORECASE)
"""Pattern of names of files that were probably meant as logs."""

MAX_ENTRIES = 10_000  # maximum number of entries in one folder
SEARCHED_BYTES = 2**20  # maximum number of bytes searched for records in a file that is not named like a log
MAX_DEPTH = 64  # maximum depth of nested folders
MAX_NAME = 200  # maximum number of characters of a name in a message

LAYOUT = "SR Directory structure"
"""Rule named in findings about the names and locations of files."""
REPOSITORY = "repository checker"
"""Rule named in findings about the names, sizes and links of all files in a submission."""


@dataclass(frozen=True)
class BenchmarkFolder:
    """A benchmark folder: results/<system>/bert, or any other folder that contains logs.

    Attributes:
        logs: files that the official package checker counts as logs, in the order of their numbers. In bare results, logs
            compressed by gzip are included.
        misnamed: files that were probably meant as logs, and entries with a log's name that are not files. If there are
            fewer logs than a submission needs, files that hold records of a run are included.
        description: expected path of the system description.
        submission: the folder that holds systems/ and results/; None for a bare results folder.
    """

    path: Path
    logs: tuple[Path, ...]
    misnamed: tuple[Path, ...]
    description: Path
    submission: Path | None

    @property
    def system(self) -> str:
        return absolute(self.path).parent.name

    @property
    def severity(self) -> Severity:
        """Severity of a missing part: "error" in a submission, "warning" in bare results, whose runs may be in progress."""
        return "error" if self.submission else "warning"


@dataclass(frozen=True)
class Tree:
    """What `path` contains. `submission` is `path` itself or the submission around it. It is None for bare results."""

    path: Path
    submission: Path | None
    benchmarks: tuple[BenchmarkFolder, ...]
    descriptions: tuple[Path, ...]


def absolute(path: Path) -> Path:
    """Return the absolute path, in which ".." is resolved but links are not."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the links


def find_all(path: Path) -> list[Tree]:
    """Return the submissions of a round that contain BERT results. For any other folder, return the result of `find`.

    Raises ``ValueError`` if a round contains no BERT logs, or as `find` does.
    """
    # Do not follow links, which may lead out of the round or back into it.
    submissions = [folder for folder in _folders(path, path) if _is_submission(folder)]
    if not submissions or (path / "results").is_dir() or _has_logs(path):
        return [find(path)]
    # Skip submissions that have only results of other benchmarks.
    trees = [find(submission) for submission in submissions if _of_results(submission / "results", submission)]
    if not trees:
        count = counted(len(submissions), "submission")
        raise ValueError(f"{path}: no logs of {BENCHMARK} in its {count}, expected results/<system>/bert")
    return trees


def find(path: Path) -> Tree:
    """Return the benchmark folders in a benchmark folder, a system's folder, a results folder or a submission.

    Raises ``ValueError`` if `path` is not a folder or contains no benchmark folder.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder, expected a log, results/<system>/bert, or a folder above it")
    below = _folders(path, None)
    # A folder with logs is a benchmark folder in two cases: if it is named bert, or if none of its subfolders is. In all
    # other cases it is a system's folder, and logs directly in it are in the wrong place.
    holds_runs = _has_logs(path) and (_is_named_bert(path) or not any(map(_is_named_bert, below)))
    if (path / "results").is_dir():  # path is a submission or contains bare results
        submission = path if _is_submission(path) else None
        found = _of_results(path / "results", submission)
    elif not holds_runs and any(map(_is_benchmark, below)):  # path is results/<system>
        submission = _submission_above(path, 2)
        found = _of_system(path, submission)
    elif _is_benchmark(path):  # path is results/<system>/bert
        submission = _submission_above(path, 3)
        found = [_benchmark_folder(path, submission)]
    else:
        submission = _submission_above(path, 1)
        found = _of_results(path, submission)
    if not found:
        raise ValueError(f"{path}: no logs in it, expected results/<system>/bert/result_<n>.txt or a folder above them")
    if submission == path:
        # The package checker reads every description, even if the system of that name has no results.
        descriptions = [entry for entry in _entries(path / "systems") if entry.suffix == ".json"]
    else:
        # A system may have several BERT folders with the same description. List it once.
        descriptions = list(dict.fromkeys(folder.description for folder in found if folder.description.is_file()))
    return Tree(path, submission, tuple(found), tuple(descriptions))


def numbered_logs(folder: Path) -> list[tuple[int, Path]]:
    """Return (number, log) for each log of a folder, ordered by number.

    Raises ``ValueError`` if the folder is missing or contains no logs.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder, expected results/<system>/bert")
    named = [(match, path) for path in folder.iterdir() if (match := rules.RESULT_FILE.fullmatch(path.name))]
    if not named:
        others = ", ".join(_name(path) for path in _other_logs(_entries(folder))[:3])
        rename = f"{others} hold a run's records; name the logs result_<n>.txt"
        why = rename if others else "expected results/<system>/bert after a run"
        raise ValueError(f"{folder}: no result_<n>.txt in it, {why}")
    return sorted((int(match[1]), path) for match, path in named)


# Findings about names


def layout_findings(folder: BenchmarkFolder, runs: int | None) -> Iterator[Finding]:
    """Yield findings about the names and the number of a folder's entries, without opening any entry.

    A submission needs `runs` logs. None means that the logs are not meant for a submission.
    """
    if absolute(folder.path).name != BENCHMARK:
        found = f"the folder is named {_name(folder.path)}: the official package checker skips it and reports success"
        found += f", expected {BENCHMARK}"
        yield Finding(None, "", LAYOUT, found, f"rename it to {BENCHMARK}", severity=folder.severity)
    count = len(folder.logs)
    if folder.misnamed:
        names = ", ".join(map(_name, folder.misnamed[:3]))
        found = f"{names} {'is' if len(folder.misnamed) == 1 else 'are'} not counted as a log, expected result_<n>.txt"
        more = max(0, len(folder.misnamed) - 3)
        remedy = (
            f"unpack or rename the logs to result_{count}.txt and so on, remove copies, and put files in place of links"
        )
        yield Finding(None, "", LAYOUT, found, remedy, more=more)
    elif not count:
        yield Finding(
            None, "", LAYOUT, "no log in the folder, expected result_<n>.txt", "put the logs of the runs there"
        )
    # Do not report the number of logs if renaming the misnamed logs corrects it.
    if runs is not None and count != runs and count + len(folder.misnamed) != runs:
        remedy = "add the missing runs" if count < runs else "choose the runs to submit: `python -m compliance package`"
        found = f"{counted(count, 'log')} result_<n>.txt, expected exactly {runs} in a submission"
        yield Finding(None, "", "TR 12; package checker", found, remedy, severity=folder.severity)
    if runs is not None and (compressed := [path for path in folder.logs if _is_compressed(path)]):
        found = f"{_name(compressed[0])} is compressed, expected plain text in a submission"
        yield Finding(None, "", LAYOUT, found, "unpack it: `gunzip`", severity="warning", more=len(compressed) - 1)
    # In a submission, `repository_findings` reports links, so do not report them here.
    links = [path for path in folder.logs if path.is_symlink() and path.resolve().parent != path.parent.resolve()]
    if links and not folder.submission:
        found = f"{_name(links[0])} is a symbolic link to a file outside of the folder, expected the log itself"
        remedy = "put the file itself in its place"
        yield Finding(None, "", LAYOUT, found, remedy, severity="warning", more=len(links) - 1)
    # The official tools crash without a description, so a submission needs it. Other runs may lack the folder systems/.
    is_due = folder.submission or runs is not None or folder.description.parent.is_dir()
    if not folder.description.is_file() and is_due:
        name = f"systems/{folder.system}.json"
        remedy = f"write it: `python -m compliance system --out {quote(name)}`; name it like the system's folder"
        found = f"there is no {name}, expected the system description: the official package checker crashes without it"
        yield Finding(None, "", LAYOUT, found, remedy, severity=folder.severity)


def repository_findings(tree: Tree) -> Iterator[Finding]:
    """Yield findings about names, sizes and links that the official repository checker rejects."""
    # The checks of logs report logs that are too large, so do not report them here.
    logs = {log for folder in tree.benchmarks for log in folder.logs}
    named, large, links = [], [], []
    for folder, folders, files in os.walk(tree.path):  # does not enter linked folders
        for name in (*folders, *files):
            path = Path(folder, name)
            if name.startswith(".") or " " in name:
                named.append(path)
            with suppress(OSError):  # raised if a path is too long
                if path.is_symlink():
                    links.append(path)
                elif path not in logs and path.lstat().st_size > MAX_FILE_BYTES:
                    large.append(path)
        if len(Path(folder).parts) - len(tree.path.parts) >= MAX_DEPTH:
            folders.clear()  # so that os.walk() does not go deeper
        folders[:] = [name for name in folders if not name.startswith(".")]
    for paths, fault, remedy in (
        (named, "has a space or a leading dot in its name, expected neither", "rename or remove it"),
        (large, f"is too large, expected at most {MAX_FILE_BYTES >> 20} MiB", "remove or shrink it"),
        (links, "is a symbolic link, expected the file itself", "put the file itself in its place"),
    ):
        if paths:
            first = visible(min(paths).relative_to(tree.path), MAX_NAME)
            yield Finding(None, "", REPOSITORY, f"{first} {fault}", remedy, more=len(paths) - 1)


def _is_submission(path: Path) -> bool:
    return (path / "results").is_dir() and any((path / name).is_dir() for name in ("systems", "benchmarks"))


def _of_results(results: Path, submission: Path | None) -> list[BenchmarkFolder]:
    return [folder for system in _folders(results, submission) for folder in _of_system(system, submission)]


def _of_system(system: Path, submission: Path | None) -> list[BenchmarkFolder]:
    return [_benchmark_folder(folder, submission) for folder in _folders(system, submission) if _is_benchmark(folder)]


def _is_benchmark(folder: Path) -> bool:
    """Tell whether a folder is meant for BERT logs: it has a log, or "bert" is in its name and in no subfolder's name."""
    if absolute(folder).name in OTHER_BENCHMARKS:
        return False
    if _has_logs(folder):
        return True
    below = any(BENCHMARK in entry.name.lower() and entry.is_dir() for entry in _entries(folder))
    return not below and _is_named_bert(folder)


def _is_named_bert(folder: Path) -> bool:
    return BENCHMARK in absolute(folder).name.lower()


def _benchmark_folder(path: Path, submission: Path | None) -> BenchmarkFolder:
    logs, misnamed, entries = [], [], _entries(path)
    for entry in entries:
        if _is_counted(entry) or (_is_compressed(entry) and not submission):
            (logs if entry.is_file() else misnamed).append(entry)
        elif LIKE_A_LOG.fullmatch(entry.name) and entry.is_file():
            misnamed.append(entry)
    if len(logs) < rules.SUBMISSION_RUNS:
        misnamed += [entry for entry in _other_logs(entries) if entry not in misnamed]
    results = absolute(path).parent.parent
    description = (submission or results) / "systems" / f"{absolute(path).parent.name}.json"
    if not submission and description.is_relative_to(Path.cwd()):
        description = description.relative_to(Path.cwd())
    in_order = tuple(sorted(logs, key=_number))
    return BenchmarkFolder(path, in_order, tuple(misnamed), description, submission)


def _other_logs(entries: Sequence[Path]) -> list[Path]:
    """Return the files that contain records of a run but are not named like a log."""
    found = []
    for entry in entries:
        if not _is_counted(entry) and entry.is_file():
            with suppress(OSError, ValueError), open_regular(entry) as file:
                if TOKEN_BYTES in file.read(SEARCHED_BYTES):
                    found.append(entry)
    return found


def _has_logs(folder: Path) -> bool:
    return any((_is_counted(entry) or _is_compressed(entry)) and entry.is_file() for entry in _entries(folder))


def _is_counted(path: Path) -> bool:
    return fnmatch.fnmatchcase(path.name, COUNTED)


def _is_compressed(path: Path) -> bool:
    return fnmatch.fnmatchcase(path.name, COUNTED + _GZIP)


def _submission_above(path: Path, levels: int) -> Path | None:
    """Return the submission whose results folder is `levels - 1` folders above `path`; None if that is no submission."""
    results = (absolute(path), *absolute(path).parents)[levels - 1]
    if results.name != "results" or not (results.parent / "systems").is_dir():
        return None
    submission = results.parent
    return submission.relative_to(Path.cwd()) if submission.is_relative_to(Path.cwd()) else submission


def _folders(path: Path, submission: Path | None) -> list[Path]:
    # Do not follow links, which may lead out of the submission or back into it.
    folders = [entry for entry in _entries(path) if entry.is_dir() and not (submission and entry.is_symlink())]
    return [folder for folder in folders if not folder.name.startswith(".")]


def _entries(path: Path) -> list[Path]:
    """Return the entries of a folder sorted by name; empty if the folder does not exist.

    Raises ``ValueError`` if there are more than `MAX_ENTRIES`.
    """
    try:
        with os.scandir(path) as entries:
            # A folder may have millions of entries, so stop the listing itself at the limit.
            found = [path / entry.name for entry, _ in zip(entries, range(MAX_ENTRIES + 1), strict=False)]
    except OSError:
        return []
    if len(found) > MAX_ENTRIES:
        raise ValueError(f"{path}: more than {MAX_ENTRIES:,} entries, expected the results of one organisation")
    return sorted(found)


def log_number(log: Path) -> str | None:
    """Return the digits in the name of a plain or compressed log; None if it is not the name of a log."""
    match = rules.RESULT_FILE.fullmatch(log.name.removesuffix(_GZIP))
    return match[1] if match else None


def _number(path: Path) -> tuple[float, str]:
    number = log_number(path)
    return (int(number) if number else math.inf, path.name)


def _name(path: Path) -> str:
    return visible(absolute(path).name, MAX_NAME)
