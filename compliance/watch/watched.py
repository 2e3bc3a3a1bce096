"""A log that is followed, with the metrics beside it and the other runs of its folder: what it will come to.

Reads the files as they grow, and changes nothing.
"""

from __future__ import annotations

import heapq
import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from compliance.artefact import MAX_FILE_BYTES, open_regular
from compliance.convergence.forecast import Forecast, forecast
from compliance.convergence.outlook import outlook
from compliance.convergence.reference_points import Reference, reference
from compliance.log import rules
from compliance.log.record import TOKEN_BYTES, parse_line
from compliance.log.rules import SUBMISSION_RUNS
from compliance.watch.follow import Follower
from compliance.watch.running import RunningLog

TAIL_BYTES = 64 * 2**10
IDLE_POLLS = 2
"""After so many looks without news, what stands after the last line end is taken for the last line."""

MAX_LOGS = 100
"""Maximum number of logs of a folder that are read, the newest."""


@dataclass(frozen=True)
class Sibling:
    """Another run of the folder, with the sequences to the target where it reached that."""

    name: str
    seed: int | None
    global_batch_size: int | None
    is_done: bool
    samples: int | None


@dataclass
class Watch:
    """A log that is followed, by the reference points and rules of a ruleset."""

    path: Path
    ruleset: str
    run: RunningLog = field(default_factory=RunningLog)
    siblings: list[Sibling] = field(default_factory=list)
    news_s: float = field(default_factory=time.monotonic)
    _idle: int = 0
    _taken_early: bytes | None = None
    """A last line without an end that was taken as it stood; its end may still come."""

    def __post_init__(self) -> None:
        self.log = Follower(self.path)
        number = rules.RESULT_FILE.fullmatch(self.path.name)
        self.metrics = Follower(self.path.with_name(f"metrics_{number[1]}.jsonl")) if number else None
        self._restarts = 0

    def look(self) -> bool:
        """Take in what has come; returns whether anything has."""
        before = self.log.bytes_read
        for line in self.log.lines():
            # A restart shows between two lines: those that follow are another run's.
            self._begin_again_if_needed()
            if line != self._taken_early:
                self.run.take(line)
            self._taken_early = None
        self._begin_again_if_needed()  # a restart may come without a line
        is_news = self.log.bytes_read != before
        self._idle = 0 if is_news else self._idle + 1
        # Exactly then, and not at each later look: the line is taken once.
        if self._idle == IDLE_POLLS and is_record(self.log.unfinished):
            self._taken_early = self.log.unfinished
            self.run.take(self.log.unfinished)
        if self.metrics is not None:
            before = self.metrics.bytes_read
            for line in self.metrics.lines():
                self.run.take_metrics(line)
            is_news = is_news or self.metrics.bytes_read != before
        if is_news:
            self.news_s = time.monotonic()
        return is_news

    def close(self) -> None:
        """Close the files."""
        for follower in (self.log, self.metrics):
            if follower is not None:
                follower.close()

    def _begin_again_if_needed(self) -> None:
        if self.log.restarts != self._restarts:
            self._restarts = self.log.restarts
            self.run, self._taken_early = RunningLog(), None

    def look_around(self) -> None:
        """Read the other logs of the folder, and compare seeds."""
        if rules.RESULT_FILE.fullmatch(self.path.name) is None:
            return
        others = {path: time_s for path, time_s in results_in(self.path.parent).items() if path.name != self.path.name}
        self.siblings = [_sibling(path, time_s) for path, time_s in others.items()]
        seed = self.run.seed
        for sibling in self.siblings:
            if seed is not None and seed == sibling.seed:
                text = f"seed {seed} is that of {sibling.name} too: seeds may not be chosen twice (TR 5.1)"
                self.run.complaints.setdefault(text)
        size = self.log.bytes_read
        if size > MAX_FILE_BYTES:
            text = f"the log is larger than {MAX_FILE_BYTES >> 20} MiB, the most a file of a submission may have"
            self.run.complaints.setdefault(text)

    @property
    def reference(self) -> Reference | None:
        """The reference's runs at this batch size, for a closed run."""
        batch = self.run.global_batch_size
        return _reference(self.ruleset, batch) if batch and self.run.division == "closed" else None

    @property
    def forecast(self) -> Forecast | None:
        """Forecast when the target will be reached; None before it is known what the target is, and after the end."""
        run, schedule = self.run, self.run.schedule
        if run.target is None or schedule is None or run.phase == "done" or self.has_reached:
            return None
        points = [(evaluation.samples, evaluation.accuracy) for evaluation in run.evaluations]
        return forecast(points, run.target, schedule, self.reference)

    @property
    def has_reached(self) -> bool:
        """Tell whether the last accuracy is the target's."""
        target, evaluations = self.run.target, self.run.evaluations
        return target is not None and bool(evaluations) and evaluations[-1].accuracy >= target

    def outlooks(self) -> Iterator[str]:
        """Yield what the set of runs would come to if this one ended at the early and at the late end of its forecast."""
        run, schedule, batch = self.run, self.run.schedule, self.run.global_batch_size
        others = [other for other in self.siblings if other.is_done and other.global_batch_size == batch]
        # A set that is full already has its outcome.
        if run.division != "closed" or not batch or not schedule or len(others) >= SUBMISSION_RUNS:
            return
        ends: list[tuple[str, int | None]] = []
        if run.phase == "done" or self.has_reached:
            converged = run.status != "aborted"
            ends = [("with this run", run.evaluations[-1].samples if converged and run.evaluations else None)]
        elif (found := self.forecast) and found.earliest is not None:
            # Once, where both ends are one evaluation.
            indices = dict.fromkeys(index for index in (found.earliest, found.latest) if index is not None)
            ends = [(f"ending at evaluation {index}", schedule.samples(index)) for index in indices]
        for name, samples in ends:
            result = _outlook((*(other.samples for other in others), samples), batch, self.ruleset)
            # Without a run that converged, or with two that did not, there is no mean.
            if result.mean is not None and math.isfinite(result.mean):
                mean = f"mean {result.mean:,.0f} over {len(others) + 1} run(s)"
                yield f"{name}: {mean}, {self._standing(result.verdict, result.mean, result.scaling)}"
        lost = sum(other.samples is None for other in others) + sum(samples is None for _, samples in ends)
        if lost:
            yield f"{lost} run(s) of the set have not converged; more than one make it no result (TR 12)"

    def _standing(self, verdict: str, mean: float, scaling: float) -> str:
        found = self.reference
        if found is None:
            return "above the largest reference point, so none to pass"
        if verdict == "fail":
            return f"fails (the least that passes: {found.minimum:,.0f})"
        if verdict == "unfinished" and mean < found.minimum:
            return f"below the least that passes, {found.minimum:,.0f}: the runs to come must be slower"
        return f"passes, score times {scaling:.4f}" if scaling > 1 else "passes, unscaled"


# Looked up each second, and too much work for that on a machine whose run is timed.
_reference = lru_cache(maxsize=8)(reference)
_outlook = lru_cache(maxsize=64)(outlook)


def is_record(line: bytes) -> bool:
    """Tell whether a line that may be half-written is a record without a fault."""
    if TOKEN_BYTES not in line:
        return False
    record, problems = parse_line(line, 1)
    return record is not None and not problems


def results_in(folder: Path) -> dict[Path, float]:
    """The logs of a folder and when each was written to, the newest last."""
    found: dict[Path, float] = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if rules.RESULT_FILE.fullmatch(entry.name):
                with suppress(OSError):
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):
                        found[folder / entry.name] = status.st_mtime
    # By name where two were written at one moment.
    newest = heapq.nlargest(MAX_LOGS, found.items(), key=lambda entry: (entry[1], entry[0]))
    return dict(reversed(newest))


# The time of the last change is only there to be part of the cache's key.
@lru_cache(maxsize=256)
def _sibling(path: Path, _written: float) -> Sibling:
    """Read what another log says about its seed and its end, once unless it changes; an unreadable one says nothing."""
    run = RunningLog()
    with Follower(path) as follower:
        for line in follower.lines():
            run.take(line)
    return Sibling(path.name, run.seed, run.global_batch_size, run.is_ended, run.converged_samples())


def is_finished(path: Path) -> bool:
    """Tell whether a log has its run_stop."""
    try:
        with open_regular(path) as file:
            # run_stop stands near the end of a log.
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return b'"run_stop"' in file.read(TAIL_BYTES)
    except (OSError, ValueError):
        return False


def choose(path: Path) -> Path | None:
    """The log to watch: `path` itself, or the newest of a folder that has not ended; None while there is none.

    Raises:
        ValueError: `path` is neither a folder nor a regular file, such as a pipe.
    """
    if not path.is_dir():
        if path.exists():
            open_regular(path).close()  # a pipe or a device is refused here and not waited for
            return path
        return None
    for folder in (path, path / "bert"):
        # A log that has ended is never taken, so that a watch may be started before its run.
        running = [log for log in results_in(folder) if not is_finished(log)]
        if running:
            return running[-1]
    return None
