"""Ask the official tools about parts of a submission.

One tool answers for each part. The package checker judges a benchmark folder: number of logs, compliance, seeds, power and
reference convergence points. The description checker judges a system description. The repository checker judges the names
and sizes of files. The tools crash easily, and a crash counts as "fail".
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compliance.folders import BenchmarkFolder, absolute
from compliance.log.findings import Outcome
from compliance.official.process import the_worker
from console.text import visible

MAX_TEXT_CHARACTERS = 200

PARAMETERS = "package_checker_params"
"""File in which a submission asks the package checker to skip checks."""


@dataclass(frozen=True)
class Answer:
    """An official tool's verdict on a part, and the tool's last message, shortened."""

    outcome: Outcome
    message: str = ""


def ask(part: str, path: Path, ruleset: str) -> Answer:
    """Ask the tool for `part`, a key of `process.NAMES`: a description, benchmark folders or a submission.

    Raises ``ValueError`` if mlperf-logging is not installed.
    """
    answer = the_worker().answer(part, absolute(path), ruleset)
    if "crash" in answer:
        return Answer("fail", answer["crash"])
    return Answer("pass" if answer["passed"] else "fail", visible(answer["message"], MAX_TEXT_CHARACTERS))


def ask_about_folder(
    folder: BenchmarkFolder, description: Mapping[str, Any], ruleset: str, by_train_samples: bool = False
) -> Answer:
    """Ask the package checker about one benchmark folder and the fields of its description. Raises as `ask` does.

    `by_train_samples` sets the package checker's option --rcp-bert-train-samples.
    """
    # Use a copy, because the package checker writes files into the results folder.
    with tempfile.TemporaryDirectory(prefix="compliance-") as copy:
        _link(folder, description, Path(copy))
        return ask("package by train_samples" if by_train_samples else "package", Path(copy), ruleset)


def _link(folder: BenchmarkFolder, description: Mapping[str, Any], copy: Path) -> None:
    """Create a submission in `copy` that contains only this folder, with links to its files."""
    name = absolute(folder.path).name
    here = copy / "results" / folder.system / name
    here.mkdir(parents=True)
    for entry in (*folder.logs, *folder.misnamed):
        if entry.is_file() or entry.is_dir() or not entry.exists():  # skip pipes: the checker would block
            (here / entry.name).symlink_to(absolute(entry))
    for entry in (folder.path / "power").glob("*/*"):
        target = here / entry.relative_to(folder.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()  # an empty file is enough, because the tool checks only the names of measurements
    # Link the parameters in this folder and in the one above, too, because they affect the package checker's verdict.
    for given, copied in ((folder.path, here), (absolute(folder.path).parent, here.parent)):
        if (given / PARAMETERS).is_file():
            (copied / PARAMETERS).symlink_to(absolute(given / PARAMETERS))
    (copy / "systems").mkdir()
    if folder.description.is_file():
        (copy / "systems" / folder.description.name).write_text(json.dumps(description))
