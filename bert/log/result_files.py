"""The files that a run writes, and how it comes by their number: it is the one that creates the log.

Nothing is reserved before. Of runs that start at once in one folder each takes the lowest number that is free as it creates
its log; none overwrites another, and a run that never starts uses up no number. The environment variable MLPERF_BERT_CLAIM
names a file in which whoever started the run finds the log that it created.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bert.log.mllog import MLLog, ResultExists
from console.files import write_atomically

CLAIM = "MLPERF_BERT_CLAIM"


class ResultFiles(NamedTuple):
    """The log of a run and its metrics beside it."""

    result: Path
    metrics: Path

    @classmethod
    def numbered(cls, folder: Path, number: int) -> "ResultFiles":
        """Return those of a run's number."""
        return cls(folder / f"result_{number}.txt", folder / f"metrics_{number}.jsonl")


def choose_files(folder: Path, wanted: int | None) -> ResultFiles:
    """Return the files of number ``wanted``, or of the lowest number of which neither is there.

    Raises ``ValueError`` when one of the wanted ones is there: nothing is overwritten.
    """
    if wanted is None:
        return next(_free(folder))
    files = ResultFiles.numbered(folder, wanted)
    for path in files:
        if path.exists():
            raise ValueError(f"{path} exists already: move it away, or set log.run to another number")
    return files


def create_log(folder: Path, wanted: int | None) -> tuple[MLLog, ResultFiles]:
    """Create the log with a number as ``choose_files`` has it, which another run may take at the same moment.

    Raises ``ValueError`` when the log cannot be created.
    """
    if wanted is not None:
        files = choose_files(folder, wanted)
        return MLLog(files.result), files
    free = _free(folder)
    while True:
        files = next(free)
        # Another run was faster: the next number.
        with suppress(ResultExists):
            return MLLog(files.result), files


def claim(result: Path) -> None:
    """Tell whoever asked for it which log this run has created."""
    asked = os.environ.get(CLAIM)
    if asked:
        write_atomically(Path(asked), os.fsencode(f"{result}\n"))


def _free(folder: Path) -> Iterator[ResultFiles]:
    """Iterate over the files of the numbers that are free, from the lowest on and without end."""
    # Listed once, where asking for each number would be as many calls of the file system as there are runs.
    names = {path.name for path in folder.glob("*")}
    numbered = (ResultFiles.numbered(folder, number) for number in itertools.count())
    return (files for files in numbered if names.isdisjoint(path.name for path in files))
