"""The files that a run writes, and their number.

The run that creates a log owns its number: each run takes the lowest number that is free when it creates its log, and
nothing is overwritten. The environment variable MLPERF_BERT_CLAIM names a file to which the run writes the path of its
log, for the program that started it.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bert.log.mllog import MLLog, ResultExists
from console.files import write_atomically

CLAIM = "MLPERF_BERT_CLAIM"


class ResultFiles(NamedTuple):
    """The log of a run, and its metrics."""

    result: Path
    metrics: Path

    @classmethod
    def numbered(cls, folder: Path, number: int) -> "ResultFiles":
        """Return the files of run ``number``."""
        return cls(folder / f"result_{number}.txt", folder / f"metrics_{number}.jsonl")


def choose_files(folder: Path, wanted: int | None) -> ResultFiles:
    """Return the files of number ``wanted``, or of the lowest free number.

    Raises ``ValueError`` if a wanted file exists.
    """
    if wanted is None:
        return next(_free(folder))
    files = ResultFiles.numbered(folder, wanted)
    for path in files:
        if path.exists():
            raise ValueError(f"{path} exists already: move it away, or set log.run to another number")
    return files


def create_log(folder: Path, wanted: int | None) -> tuple[MLLog, ResultFiles]:
    """Create the log of number ``wanted``, or of the lowest free number. Raises ``ValueError``."""
    free = _free(folder) if wanted is None else iter([choose_files(folder, wanted)])
    for files in free:
        try:
            return MLLog(files.result), files
        except ResultExists:
            # Another run was faster: the next number.
            if wanted is not None:
                raise
    raise AssertionError("numbers do not end")


def claim(result: Path) -> None:
    """Write the path of the log to the file that the starting program has named, if any."""
    if asked := os.environ.get(CLAIM):
        write_atomically(Path(asked), os.fsencode(f"{result}\n"))


def _free(folder: Path) -> Iterator[ResultFiles]:
    # Listed once: a question for each number would be as many file system calls as there are runs.
    names = {path.name for path in folder.glob("*")}
    numbered = (ResultFiles.numbered(folder, number) for number in itertools.count())
    return (files for files in numbered if names.isdisjoint(path.name for path in files))
