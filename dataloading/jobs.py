"""Work that can be stopped and taken up again, in several processes."""

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from console.files import is_temporary, read_json, write_atomically

Task = TypeVar("Task")
Result = TypeVar("Result")

_MAX_DESCRIPTION_BYTES = 64 << 20
_REMEDY = "delete the folder and begin again"


@dataclass(frozen=True)
class WorkPart:
    """A share among several of the work of making a data set, counted from 1."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise ValueError(f"part {self.index}/{self.count}; expected i/n with i from 1 to n")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def share_of(self, tasks: int) -> range:
        """Return the tasks of this part: consecutive ones, in shares that differ by one at most.

        Raises:
            ValueError: there are fewer tasks than parts.
        """
        if self.count > tasks:
            raise ValueError(
                f"part {self} of {tasks} text(s); expected at most as many parts as texts: use {tasks} parts"
            )
        return range(tasks * (self.index - 1) // self.count, tasks * self.index // self.count)


@dataclass(frozen=True)
class JobProgress:
    """Work done so far, for whoever waits."""

    name: str
    """The file that was just finished."""
    count: int
    """Samples or training articles in it."""
    done: int
    total: int
    kept: bool
    """Found finished, not made now."""
    seconds: float
    """Since the start."""


@contextmanager
def begun(
    folder: Path, name: str, description: Mapping[str, object], *, finished: str, alone: bool = True
) -> Iterator[None]:
    """``folder`` with the file ``name`` that describes what is made there, for as long as the work takes and after.

    Leftovers of a process that was killed are removed. When the work fails before there is a file that matches ``finished``,
    all is as it was before. ``alone`` is False when others may work in the same folder on the same job.

    Raises:
        ValueError: the folder holds something else, or the same job was begun with other settings.
    """
    path = folder / name
    there, new = folder.exists(), not path.exists()
    # Another process may be writing the same description at this moment, under a hidden name.
    if new and there and (not folder.is_dir() or any(not is_temporary(entry) for entry in folder.iterdir())):
        raise ValueError(f"{folder} is there already; name a folder that does not exist or is empty")
    try:
        if new:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(description, indent=1).encode())
        _check_same(path, description)  # also of what another process has just written
        # Only alone: a temporary file may be what another process is writing.
        for leftover in filter(is_temporary, folder.rglob(".*.partial")) if alone else ():
            leftover.unlink()
        yield
    # Also what tells this process to end, which arrives as SystemExit or KeyboardInterrupt.
    except BaseException:
        if alone and new and not any(folder.glob(finished)):
            path.unlink(missing_ok=True)
            if not there:
                shutil.rmtree(folder, ignore_errors=True)
        raise


def run_tasks(make: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    """Yield what ``make`` returns for each task, as they finish, in at most ``jobs`` processes; in this one if that is one.

    Processes are forked, so that what is loaded or compiled here is there already. An error ends all.

    Raises:
        ValueError: ``jobs`` is below 1, or a process was killed.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; expected at least 1")
    if min(jobs, len(tasks)) <= 1:
        yield from map(make, tasks)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), context, initializer=_end_with_parent)
    try:  # from the first task on: a process that is told to end while it hands them out must not wait for them
        for future in as_completed([pool.submit(_made, make, task) for task in tasks]):
            yield future.result()
    except BrokenProcessPool:
        raise ValueError(
            "a process was killed, for want of memory perhaps; run the same command again to go on, with fewer --jobs"
        ) from None
    except BaseException as error:
        if not isinstance(error, Exception):  # this process was told to end, and a task may take minutes
            for child in multiprocessing.active_children():
                child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _made(make: Callable[[Task], Result], task: Task) -> Result:
    """Return what ``make`` returns; end this process where it was told to, which its pool would take for a result."""
    try:
        return make(task)
    except SystemExit as told:
        os._exit(told.code if isinstance(told.code, int) else 1)


def _end_with_parent() -> None:
    """Let this process end when its parent was killed; it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)  # sys.exit() would end this thread alone

    threading.Thread(target=wait, daemon=True).start()


def _check_same(path: Path, description: Mapping[str, object]) -> None:
    """Raise ``ValueError`` unless the job begun in a folder is this one."""
    there = read_json(path, _MAX_DESCRIPTION_BYTES, _REMEDY)
    # By way of JSON, which makes lists of tuples: only so can the two be equal.
    wanted = json.loads(json.dumps(description))
    if there == wanted:
        return
    found, expected = _settings(there), _settings(wanted)
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    raise ValueError(
        f"{path.parent}: begun with other settings ({', '.join(names)}); give the same ones, or name another --out"
    )


def _settings(description: object) -> dict[str, object]:
    """The settings in a description by their own names, however deep they stand."""
    settings: dict[str, object] = {}
    for name, value in description.items() if isinstance(description, dict) else ():
        settings |= _settings(value) if isinstance(value, dict) else {name: value}
    return settings
