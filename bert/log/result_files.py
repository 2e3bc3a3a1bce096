"""The files that a run writes, and the choice of the run number.

By default, a run takes the lowest run number that is free when it creates its log. No file is ever overwritten. If the
environment variable MLPERF_BERT_CLAIM names a file, the run writes the path of its log to that file, so that the program
that started the run can find the log.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bert.log.mllog import MLLog
from console.files import write_atomically

CLAIM = "MLPERF_BERT_CLAIM"


class ResultFiles(NamedTuple):
    """Paths of a run's log and of its metrics."""

    result: Path
    metrics: Path

    @classmethod
    def numbered(cls, folder: Path, number: int) -> "ResultFiles":
        return cls(folder / f"result_{number}.txt", folder / f"metrics_{number}.jsonl")


def choose_files(folder: Path, wanted: int | None) -> ResultFiles:
    """Return the files of run number ``wanted``, or of the lowest free number if it is None.

    Raises ``ValueError`` if a file of run number ``wanted`` exists.
    """
    if wanted is None:
        return next(_free(folder))
    files = ResultFiles.numbered(folder, wanted)
    for path in files:
        if path.exists():
            raise ValueError(f"{path} exists already: move it away, or set log.run to another number")
    return files


def create_log(folder: Path, wanted: int | None) -> tuple[MLLog, ResultFiles]:
    """Create the log of run number ``wanted``, or of the lowest free number if it is None.

    Raises ``ValueError`` if a file of run number ``wanted`` exists, and ``OSError`` if the log cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if wanted is not None:
        files = choose_files(folder, wanted)
        return MLLog(files.result), files
    for files in _free(folder):
        with suppress(FileExistsError):  # another run has just taken this number, so try the next one
            return MLLog(files.result), files
    raise AssertionError("numbers do not end")


def claim(result: Path) -> None:
    """Write the path of the log to the file that MLPERF_BERT_CLAIM names, if it is set."""
    if asked := os.environ.get(CLAIM):
        write_atomically(Path(asked), os.fsencode(f"{result}\n"))


def _free(folder: Path) -> Iterator[ResultFiles]:
    # List the folder once: checking each number would cost as many file system calls as there are runs.
    names = {path.name for path in folder.glob("*")}
    numbered = (ResultFiles.numbered(folder, number) for number in itertools.count())
    return (files for files in numbered if names.isdisjoint(path.name for path in files))
