"""Follow a log, its metrics and the other runs of its folder, and forecast when the run reaches its target."""

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from compliance.artefact import open_regular
from compliance.convergence.forecast import Forecast, forecast, time_left
from compliance.convergence.outlook import outlook, reference
from compliance.log import rules
from compliance.log.follower import Follower
from compliance.log.rules import SUBMISSION_RUNS
from compliance.watch.running import RunningLog
from console.text import clock

MAX_LOGS = 100
"""Maximum number of logs of a folder that are read. The newest logs are chosen."""


class Watch:
    """A log being followed, judged by the rules and reference points of a ruleset.

    `siblings` are the other runs of its folder. `news_s` is the time of the last new line, as time.monotonic() gives it.
    """

    def __init__(self, path: Path, ruleset: str) -> None:
        self.path, self.ruleset = path, ruleset
        self.run = RunningLog()
        self.siblings: dict[Path, RunningLog] = {}
        self.news_s = time.monotonic()
        self.log = Follower(path)
        number = rules.RESULT_FILE.fullmatch(path.name)
        self.metrics = Follower(path.with_name(f"metrics_{number[1]}.jsonl")) if number else None

    def look(self) -> None:
        """Read and process the new lines of the log and the metrics."""
        for follower, take in ((self.log, self.run.take), (self.metrics, self.run.take_metrics)):
            for line in follower.lines() if follower else ():
                take(line)
                self.news_s = time.monotonic()

    def read_siblings(self) -> None:
        """Read the other logs of the folder, and compare their seeds with this run's seed."""
        # Runs without a target form no set and may have equal seeds, so there is nothing to compare.
        if rules.RESULT_FILE.fullmatch(self.path.name) is None or self.run.trains_to_end:
            return
        logs = results_in(self.path.parent)
        self.siblings = {path: _read_log(path, written) for path, written in logs.items() if path != self.path}
        for path, sibling in self.siblings.items():
            if (seed := self.run.seed) is not None and seed == sibling.seed:
                self.run.complain(f"seed {seed} is the seed of {path.name} too: no seed may be chosen twice (TR 5.1)")

    @property
    def forecast(self) -> Forecast | None:
        """Forecast of when the run reaches the target.

        None if the target or the schedule is unknown, or if the run has reached the target or ended.
        """
        run, schedule = self.run, self.run.schedule
        if run.target is None or schedule is None or run.phase == "done" or self.has_reached:
            return None
        found = reference(self.ruleset, schedule.global_batch_size) if run.division == "closed" else None
        return forecast(run.curve, run.target, schedule, found)

    @property
    def has_reached(self) -> bool:
        target, accuracy = self.run.target, self.run.accuracy
        return target is not None and accuracy is not None and accuracy >= target

    def forecast_words(self, now_ms: float) -> str:
        run, schedule, found = self.run, self.run.schedule, self.forecast
        if run.trains_to_end:
            limit, trained = run.sample_limit, run.trained_by(now_ms)
            at = f" at {limit:,} samples" if limit else ""
            left = f", in {clock((limit - trained) / run.rate)}" if limit and run.rate and trained is not None else ""
            return f"trains to its end{at}{left}"
        if self.has_reached:
            return "reached"
        if found is None or schedule is None:
            return "unknown: the log lacks the target, the batch size or the interval"
        if found.earliest is None:
            return found.basis
        first = schedule.samples(found.earliest)
        if found.latest is None:
            words = f"evaluation {found.earliest} ({first:,} samples) or later, if at all"
        else:
            last = schedule.samples(found.latest)
            words = f"evaluation {found.earliest} to {found.latest} ({first:,} to {last:,} samples)"
        trained = run.trained_by(now_ms)
        if trained is not None and run.rate:
            words += f", in {time_left(found, schedule, trained, run.rate)}"
        return f"{words}, {found.basis}"

    def outlooks(self) -> Iterator[str]:
        """Yield what the set of runs would reach with this run, at both ends of its forecast range or at its known end."""
        run, schedule, batch = self.run, self.run.schedule, self.run.global_batch_size
        ended = [each for each in self.siblings.values() if each.is_ended and not each.is_unknown]
        others = [each for each in ended if each.global_batch_size == batch]
        reached = tuple(each.converged_samples() for each in others)
        # Only closed runs are compared with the reference. If the other runs are a complete set, its outcome is decided.
        if run.division != "closed" or not batch or not schedule or len(others) >= SUBMISSION_RUNS:
            return
        ends: list[tuple[str, int | None]] = []
        if run.phase == "done" or self.has_reached:
            converged = run.status != "aborted" and run.curve
            ends = [("with this run", run.curve[-1][0] if converged else None)]
        elif (found := self.forecast) and found.earliest is not None:
            # If both ends are the same evaluation, the dictionary keeps it only once.
            indices = dict.fromkeys(index for index in (found.earliest, found.latest) if index is not None)
            ends = [(f"ending at evaluation {index}", schedule.samples(index)) for index in indices]
        for name, samples in ends:
            yield f"{name}: {outlook((*reached, samples), batch, self.ruleset).sentence}"


def results_in(folder: Path) -> dict[Path, float]:
    """Return the newest `MAX_LOGS` logs of a folder with their modification times, the newest log last."""
    found: list[tuple[float, Path]] = []
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if rules.RESULT_FILE.fullmatch(path.name) and path.is_file():
                    found.append((path.stat().st_mtime, path))
    return {path: written for written, path in sorted(found)[-MAX_LOGS:]}


@lru_cache(maxsize=256)
def _read_log(path: Path, _written: float) -> RunningLog:
    """Read another run's log, or return the cached run if the log has not changed. An unreadable log gives an empty run."""
    run = RunningLog()
    for line in Follower(path).lines():
        run.take(line)
    return run


def choose(path: Path) -> Path | None:
    """Return the log to watch: `path`, or the newest unfinished log in a folder; None if there is no such log yet.

    Raises ``ValueError`` if `path` is neither a folder nor a regular file, such as a pipe.
    """
    if not path.is_dir():
        if path.exists():
            open_regular(path).close()
            return path
        return None
    for folder in (path, path / "bert"):
        # A watch may be started before its run has a log. It must wait for that log and not choose a finished one.
        for log, written in reversed(results_in(folder).items()):
            if not _read_log(log, written).is_ended:
                return log
    return None
