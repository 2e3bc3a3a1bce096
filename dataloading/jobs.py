"""Jobs that run in several processes and can be continued after an interruption, and reports on their progress."""

import gc
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from console.files import is_temporary, read_json, write_atomically
from console.program import say
from console.text import clock, counted

Task = TypeVar("Task")
Result = TypeVar("Result")

_MAX_DESCRIPTION_BYTES = 64 << 20

_PRIOR = 0.1
"""The remaining time is estimated by comparing the elapsed time with the expected time of the completed work. This share of
the expected total time is added to both, so that early estimates fluctuate less."""


@dataclass(frozen=True)
class WorkPart:
    """One of several parts into which the work of making a data set is divided. ``index`` counts from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def share_of(self, tasks: int) -> range:
        """Return this part's consecutive range of tasks. Raises ``ValueError`` if there are fewer tasks than parts."""
        if self.count > tasks:
            raise ValueError(
                f"--part is {self} for {counted(tasks, 'text')}; expected at most {counted(tasks, 'part')}"
            )
        return range(tasks * (self.index - 1) // self.count, tasks * self.index // self.count)


@dataclass(frozen=True)
class JobProgress:
    """Report on a finished file. ``done`` counts the finished files of the job, and ``total`` all of its files."""

    name: str
    count: int
    """Number of samples or training articles in the file."""
    done: int
    total: int
    kept: bool
    """Whether an earlier attempt made the file."""


class StageProgress:
    """Progress of stages whose expected seconds are known. Prints a line for each percent of the expected total time."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds
        self._shares = dict.fromkeys(seconds, 0.0)
        self._kept = 0.0
        """Sum of the expected seconds for the work that earlier attempts completed."""
        self._started = time.perf_counter()
        self._percent = -1

    def set(self, stage: str, share: float = 1.0, *, kept: bool = False) -> None:
        """Set the completed share of a stage. ``kept`` means that an earlier attempt completed it."""
        if stage not in self._seconds:
            return
        self._kept += kept * (share - self._shares[stage]) * self._seconds[stage]
        self._shares[stage] = min(1.0, share)
        total = sum(self._seconds.values())
        done = sum(self._shares[name] * self._seconds[name] for name in self._seconds)
        if (percent := int(100 * done / total)) > self._percent:
            self._percent = percent
            slowness = (time.perf_counter() - self._started + _PRIOR * total) / (done - self._kept + _PRIOR * total)
            say(f"[{self._percent:3} %] {stage}, about {clock(slowness * (total - done))} left")

    def add(self, stage: str, share: float) -> None:
        self.set(stage, self._shares.get(stage, 0.0) + share)


Report = Callable[[JobProgress], None]
Made = tuple[str, int, bool]
"""Name of a file, its number of samples or articles, and whether an earlier attempt made it."""


@contextmanager
def begun(
    folder: Path, name: str, description: Mapping[str, object], *, finished: str, alone: bool = True
) -> Iterator[None]:
    """Begin or continue a job: make ``folder``, and in it the file ``name`` with the job's ``description``.

    The folder and the file remain after the ``with`` block. Temporary files of a killed process are removed. If the block
    fails before a file that matches ``finished`` exists, the folder is restored to its earlier state. ``alone`` is False if
    other processes may work on the same job in this folder. Raises ``ValueError`` if the folder holds other files, or a job
    that was begun with other settings.
    """
    path = folder / name
    existed = folder.exists()
    # Another process may be beginning the same job right now. So ignore temporary files. List the folder before looking
    # for the description, because the description is the first file that the other process makes.
    has_files = existed and (not folder.is_dir() or any(not is_temporary(entry) for entry in folder.iterdir()))
    if (new := not path.exists()) and has_files:
        raise ValueError(f"{folder} is not an empty folder; name one that does not exist or is empty")
    try:
        if new:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(description, indent=1).encode())
        _check_same(path, description)
        # Keep temporary files if other processes may be writing them.
        for leftover in filter(is_temporary, folder.rglob(".*.partial")) if alone else ():
            leftover.unlink()
        yield
    except BaseException:  # SystemExit and KeyboardInterrupt are included
        if alone and new and not any(folder.glob(finished)):
            path.unlink(missing_ok=True)
            if not existed:
                shutil.rmtree(folder, ignore_errors=True)
        raise


def make_files(make: Callable[[Task], Made], tasks: Sequence[Task], jobs: int, report: Report) -> None:
    """Run ``tasks`` in up to ``jobs`` processes, and report each finished file. Each task makes one file."""
    for done, (name, count, kept) in enumerate(run_tasks(make, tasks, jobs), 1):
        report(JobProgress(name, count, done, len(tasks), kept))


def run_tasks(make: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    """Yield the result of ``make(task)`` as each task finishes, in any order. Tasks run in up to ``jobs`` processes.

    If ``jobs`` is 1, the tasks run in this process. Otherwise, processes are forked, so they share everything that this
    process has loaded or compiled. The first error ends all processes.
    """
    if jobs < 1:
        raise ValueError(f"--jobs is {jobs}; expected at least 1")
    if min(jobs, len(tasks)) <= 1:
        yield from map(make, tasks)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), context, initializer=_begin_fork)
    try:
        for future in as_completed([pool.submit(_run_task, make, task) for task in tasks]):
            yield future.result()
    except BrokenProcessPool:
        raise ValueError(
            "a process was killed, perhaps for lack of memory; run the same command again to continue, with fewer --jobs"
        ) from None
    except BaseException as error:
        if not isinstance(error, Exception):  # do not wait for running tasks, which may take minutes
            for child in multiprocessing.active_children():
                child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _run_task(make: Callable[[Task], Result], task: Task) -> Result:
    """Return ``make(task)``. On SystemExit, end this process: the pool would send the exception to the parent instead."""
    try:
        return make(task)
    except SystemExit as told:
        os._exit(told.code if isinstance(told.code, int) else 1)


def _begin_fork() -> None:
    """Start a thread that ends this process when its parent is killed. Otherwise, this process would wait forever."""
    # Exempt the parent's objects from garbage collection. DALI's finalizer, for one, waits for threads that a fork lacks.
    gc.freeze()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)  # sys.exit() would end only this thread

    threading.Thread(target=wait, daemon=True).start()


def _check_same(path: Path, description: Mapping[str, object]) -> None:
    found = read_json(path, _MAX_DESCRIPTION_BYTES, "delete the folder and begin again")
    expected = json.loads(json.dumps(description))  # turns tuples into lists, as in the file
    if names := sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)):
        raise ValueError(
            f"{path.parent}: begun with other settings ({', '.join(names)}); give the same settings, or name another --out"
        )
