"""Ask the official package tools about the parts of a submission.

Each part gets its own answer, from the tool that judges it: a
benchmark folder from the package checker (number of logs, compliance, seeds, power, reference convergence points), a
system description and the names and sizes of the files from theirs. A crash, and they crash easily, is "fail".
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compliance.artefact import MAX_FILE_BYTES
from compliance.folders import BenchmarkFolder, absolute
from compliance.log.findings import Outcome
from compliance.official import process
from console.files import read_json
from console.text import visible

TIMEOUT_S = 600
"""Longest wait for the answer about one part."""

MAX_TEXT_CHARACTERS = 200

PARAMETERS = "package_checker_params"
"""File in which a submission asks the package checker to leave out checks."""


@dataclass(frozen=True)
class Answer:
    """An official tool's answer about a part: its verdict, and the last of its messages in short."""

    outcome: Outcome
    message: str = ""


def ask(
    benchmarks: Sequence[tuple[BenchmarkFolder, str]], descriptions: Sequence[Path], root: Path | None, ruleset: str
) -> tuple[list[Answer], list[Answer], Answer | None]:
    """The answers about benchmark folders, system descriptions and, where it is given, a whole submission.

    Args:
        benchmarks: each folder with the division of its logs.

    Raises:
        ValueError: mlperf-logging is not installed.
    """
    # A copy for each folder, so that a crash over one says nothing about the others.
    with tempfile.TemporaryDirectory(prefix="compliance-") as temporary:
        of_folders = []
        for index, (folder, division) in enumerate(benchmarks):
            copy = Path(temporary) / str(index)
            _link(folder, division, copy)
            of_folders.append(_ask("package", copy, ruleset))
    # Absolute: the tools run in a folder of their own.
    of_descriptions = [_ask("system", absolute(description), ruleset) for description in descriptions]
    return of_folders, of_descriptions, _ask("repository", absolute(root), ruleset) if root is not None else None


def _ask(tool: str, path: Path, ruleset: str) -> Answer:
    answer = process.ask(tool, path, ruleset, TIMEOUT_S)
    if "crash" in answer:
        return Answer("fail", answer["crash"])
    text = answer["messages"][-1] if answer["messages"] else ""
    return Answer("pass" if answer["passed"] else "fail", visible(text, MAX_TEXT_CHARACTERS))


def _link(folder: BenchmarkFolder, division: str, copy: Path) -> None:
    """A submission with this one folder in it, made of links: the package checker writes among the results.

    A description that is there but says no division is put right in the copy: it is judged on its own.
    """
    name = absolute(folder.path).name
    here = copy / "results" / folder.system / name
    here.mkdir(parents=True)
    for entry in (*folder.logs, *folder.misnamed, *folder.others):
        if entry.is_file() or entry.is_dir() or not entry.exists():  # a pipe would keep the checker waiting
            (here / entry.name).symlink_to(absolute(entry))  # by its own name, which is what the tool judges
    if (folder.path / "power").is_dir():
        for entry in (folder.path / "power").glob("*/*"):
            target = here / entry.relative_to(folder.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()  # of measurements the tool looks at names only
    # The package checker reads them in both places, and they change its verdict.
    for given, copied in ((folder.path, here), (absolute(folder.path).parent, here.parent)):
        if (given / PARAMETERS).is_file():
            (copied / PARAMETERS).symlink_to(absolute(given / PARAMETERS))
    (copy / "systems").mkdir()
    if folder.description.is_file():
        content = _object(folder.description)
        # Without the field it ends with a KeyError, and the folder would get no answer.
        content.setdefault("division", division)
        (copy / "systems" / folder.description.name).write_text(json.dumps(content))


def _object(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, MAX_FILE_BYTES, "")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
