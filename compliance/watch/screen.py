"""A run in progress, in the terminal: accuracy against the target, time left as a range, outlook, rules about to be broken.

Reads the log and the metrics file beside it as they grow, and changes nothing. On a terminal a panel is kept up to date;
elsewhere a line is printed for each evaluation and each complaint.
"""

from __future__ import annotations

import heapq
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from compliance.artefact import MAX_FILE_BYTES, open_regular
from compliance.convergence.reference_points import SUBMISSION_RUNS, Reference, outlook, reference
from compliance.log import rules
from compliance.log.forecast import Forecast, forecast
from compliance.log.record import parse_line
from compliance.watch.follow import Follower
from compliance.watch.running import RunningLog
from console.text import visible

POLL_S = 1.0
INIT_STALE_S = 3600.0
"""A run that compiles and tunes may be silent for long; the rules end its initialisation sooner."""
TAIL_BYTES = 64 * 2**10
IDLE_POLLS = 2
"""After so many looks without news, what stands after the last line end is taken for the last line."""

MAX_COMPLAINTS_SHOWN = 8
MAX_LOGS = 100
"""Most logs of a folder that are looked at, the newest."""

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Sibling:
    """Another run of the folder.

    Attributes:
        samples: sequences trained when it reached the target; None when it did not.
    """

    name: str
    seed: int | None
    global_batch_size: int | None
    is_done: bool
    samples: int | None


@dataclass
class Watch:
    """One log that is followed.

    Attributes:
        path: of the log.
        ruleset: whose reference points and rules count.
    """

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
            self._begin_again_if_needed()
            if line != self._taken_early:
                self.run.take(line)
            self._taken_early = None
        self._begin_again_if_needed()
        is_news = self.log.bytes_read != before
        self._idle = 0 if is_news else self._idle + 1
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
        """When the target will be reached; None before it is known what the target is, and after the end."""
        run, schedule = self.run, self.run.schedule
        if run.target is None or schedule is None or run.phase == "done" or self.has_reached:
            return None
        points = [(evaluation.samples, evaluation.accuracy) for evaluation in run.evaluations]
        return forecast(points, run.target, schedule, self.reference)

    @property
    def has_reached(self) -> bool:
        """Whether the last accuracy is the target's."""
        target, evaluations = self.run.target, self.run.evaluations
        return target is not None and bool(evaluations) and evaluations[-1].accuracy >= target

    def outlooks(self) -> Iterator[str]:
        """What the set of runs would come to if this one ended at the early and at the late end of its forecast."""
        run, schedule, batch = self.run, self.run.schedule, self.run.global_batch_size
        others = [other for other in self.siblings if other.is_done and other.global_batch_size == batch]
        if run.division != "closed" or not batch or not schedule or len(others) >= SUBMISSION_RUNS:
            return
        ends: list[tuple[str, int | None]] = []
        if run.phase == "done" or self.has_reached:
            converged = run.status != "aborted"
            ends = [("with this run", run.evaluations[-1].samples if converged and run.evaluations else None)]
        elif (found := self.forecast) and found.earliest is not None:
            indices = dict.fromkeys(index for index in (found.earliest, found.latest) if index is not None)
            ends = [(f"ending at evaluation {index}", schedule.samples(index)) for index in indices]
        for name, samples in ends:
            result = _outlook((*(other.samples for other in others), samples), batch, self.ruleset)
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
    """Whether a line that may be half-written is a record without a fault."""
    if b":::MLLOG " not in line:
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
    newest = heapq.nlargest(MAX_LOGS, found.items(), key=lambda entry: (entry[1], entry[0]))
    return dict(reversed(newest))


@lru_cache(maxsize=256)
def _sibling(path: Path, _written: float) -> Sibling:
    """What another log says about its seed and its end, read once unless it changes; an unreadable one says nothing."""
    run = RunningLog()
    with Follower(path) as follower:
        for line in follower.lines():
            run.take(line)
    return Sibling(path.name, run.seed, run.global_batch_size, run.is_ended, run.converged_samples())


def is_finished(path: Path) -> bool:
    """Whether a log has its run_stop."""
    try:
        with open_regular(path) as file:
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
            open_regular(path).close()
            return path
        return None
    for folder in (path, path / "bert"):
        running = [log for log in results_in(folder) if not is_finished(log)]
        if running:
            return running[-1]
    return None


def watch(path: Path, ruleset: str, timeout_s: float, stale_s: float, console: Console | None = None) -> int:
    """Follow a run to its end. Returns 0 if it ended with success, 1 if otherwise, or if nothing came, 130 at Ctrl-C.

    Args:
        path: a log, an output that holds a log's lines, or a folder with logs.
        timeout_s: seconds to wait for a log that is not there yet.
        stale_s: seconds without news after which the run is given up.

    Raises:
        ValueError: an unknown ruleset, or times that are not positive.
    """
    rules.check_ruleset(ruleset)
    for name, seconds in (("--timeout", timeout_s), ("--stale", stale_s)):
        if not seconds > 0:
            raise ValueError(f"{name} is {seconds:g}, expected more than 0 seconds")
    console = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        chosen = _wait_for(path, timeout_s, console)
        if chosen is None:
            _put(console, f"nothing to watch: no running log at {path} after {timeout_s:g} s")
            return 1
        return _follow(Watch(chosen, ruleset), stale_s, console)
    except KeyboardInterrupt:
        return 130


def _wait_for(path: Path, timeout_s: float, console: Console) -> Path | None:
    deadline = time.monotonic() + timeout_s
    chosen = choose(path)
    if chosen is None:
        _put(console, f"waiting for a running log at {path}")
    while chosen is None and time.monotonic() < deadline:
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
        chosen = choose(path)
    return chosen


def _follow(watched: Watch, stale_s: float, console: Console) -> int:
    silent_s = 0.0
    with ExitStack() as stack:
        stack.callback(watched.close)
        show = _display(watched, console, stack)
        known: tuple[str, int] | None = None
        while True:
            watched.look()
            run = watched.run
            run.watch_the_time(time.time() * 1000)
            if (run.phase, len(run.evaluations)) != known:
                known = (run.phase, len(run.evaluations))
                watched.look_around()
            show()
            silent_s = time.monotonic() - watched.news_s
            if run.phase == "done" or silent_s > (max(stale_s, INIT_STALE_S) if run.phase == "init" else stale_s):
                break
            if not watched.log.has_more:
                time.sleep(POLL_S)
    if watched.run.phase != "done":
        _put(console, f"given up: {watched.path} has not grown for {silent_s:.0f} s")
    return 0 if watched.run.status == "success" else 1


def _put(console: Console, text: str) -> None:
    console.print(visible(text), markup=False)


def _display(watched: Watch, console: Console, stack: ExitStack) -> Callable[[], None]:
    """What shows the news: a panel that `stack` leaves standing, or plain lines."""
    if not console.is_terminal:
        return PlainLines(watched, console).show
    live = stack.enter_context(Live(console=console, auto_refresh=False, vertical_overflow="crop"))
    return lambda: live.update(panel(watched, time.time() * 1000), refresh=True)


class PlainLines:
    """A line for each evaluation, each complaint and the end, for a terminal that is none."""

    def __init__(self, watched: Watch, console: Console) -> None:
        self._watched, self._console = watched, console
        self._run = watched.run
        self._evaluations = self._complaints = 0
        self._phase = ""

    def show(self) -> None:
        """Print what is new."""
        watched, run = self._watched, self._watched.run
        if run is not self._run:
            self._put("the log was begun again")
            self._run, self._evaluations, self._complaints = run, 0, 0
        if run.phase != self._phase and run.phase in ("init", "run"):
            self._put(f"{watched.path}: {_phase_words(watched, time.time() * 1000)}")
        self._phase = run.phase
        for index in range(self._evaluations, len(run.evaluations)):
            evaluation = run.evaluations[index]
            words = f"evaluation {index + 1}: accuracy {evaluation.accuracy:.4f} {_of_target(run)}"
            latest = index + 1 == len(run.evaluations) and run.phase != "done"
            after = f", {forecast_words(watched, time.time() * 1000)}" if latest else ""
            rate = f", {run.rate:,.1f} sequences/s" if latest and run.rate else ""
            self._put(f"{words} at {evaluation.samples:,} samples{rate}{after}")
        if len(run.evaluations) > self._evaluations or run.phase == "done":
            for line in watched.outlooks():
                self._put(f"outlook: {line}")
        self._evaluations = len(run.evaluations)
        for text in islice(run.complaints, self._complaints, None):
            self._put(f"warning: {text.removeprefix('warning ')}")
        self._complaints = len(run.complaints)
        if run.phase == "done":
            self._put(end_words(run))

    def _put(self, text: str) -> None:
        _put(self._console, text)


def panel(watched: Watch, now_ms: float) -> Panel:
    """Everything that is known, for a terminal."""
    run = watched.run
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()

    def row(name: str, text: str, style: str = "") -> None:
        table.add_row(name, Text(visible(text), style=style))  # no markup: some of it comes from the log

    row("phase", _phase_words(watched, now_ms))
    if run.evaluations:
        last = run.evaluations[-1]
        at = f"at {last.samples:,} samples, evaluation {len(run.evaluations)}"
        row("accuracy", f"{last.accuracy:.4f} {_of_target(run)} {at}")
        row("", sparkline([evaluation.accuracy for evaluation in run.evaluations]), "cyan")
    if run.phase == "run":
        row("samples", _progress_words(run, now_ms))
        if run.rate:
            now = f", now {run.step_rate:,.1f}" if run.step_rate else ""
            row("rate", f"{run.rate:,.1f} sequences/s with evaluations{now}")
        row("target", forecast_words(watched, now_ms))
    for name, line in zip(["outlook", *[""] * 9], watched.outlooks(), strict=False):
        row(name, line)
    if run.phase == "done":
        row("end", end_words(run), "green" if run.status == "success" else "bold red")
    for text in list(run.complaints)[-MAX_COMPLAINTS_SHOWN:]:
        row("!", text, "yellow")
    recipe = run.header.get("recipe")
    title = f"{watched.path.name}{f' · {recipe}' if recipe else ''} · {run.division}"
    return Panel(table, title=Text(visible(title)), title_align="left")


def sparkline(values: list[float], width: int = 60) -> str:
    """The last values as a row of bars between their smallest and largest."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    steps = len(_BARS) - 1
    return "".join(_BARS[round(steps * (value - low) / (high - low)) if high > low else 0] for value in shown)


def forecast_words(watched: Watch, now_ms: float) -> str:
    """When the target will be reached, as a range."""
    run, schedule, found = watched.run, watched.run.schedule, watched.forecast
    if watched.has_reached:
        return "reached"
    if found is None or schedule is None:
        return "not known: the log names no target, batch size or interval"
    if found.earliest is None:
        return found.basis
    first = schedule.samples(found.earliest)
    begin = run.seconds_until(first, now_ms)
    at = f"evaluation {found.earliest}"
    span = clock(begin) if begin is not None else "?"
    if found.latest is None:
        words = f"{at} ({first:,} samples) or later, if at all, in {span} or more"
    else:
        last = schedule.samples(found.latest)
        end = run.seconds_until(last, now_ms)
        until = clock(end) if end is not None else "?"
        words = f"{at} to {found.latest} ({first:,} to {last:,} samples), in {span} to {until}"
    limit = run.max_samples
    ends = f"; it ends at {limit:,} samples at the latest" if limit and first > limit else ""
    return f"{words}, {found.basis}{ends}"


def _phase_words(watched: Watch, now_ms: float) -> str:
    run = watched.run
    if run.phase == "init" and run.init_start_ms is not None:
        limit = rules.INIT_LIMIT_MINUTES[run.division]
        return f"initialising, {clock((now_ms - run.init_start_ms) / 1000)} of {limit}:00 at most"
    if run.phase == "run" and run.run_start_ms is not None:
        doing = f"evaluating at {run.evaluating_at:,} samples" if run.evaluating_at is not None else "training"
        return f"{doing}, {clock((now_ms - run.run_start_ms) / 1000)} since run_start"
    return {"before": "not begun", "ready": "initialised", "done": "ended"}.get(run.phase, run.phase)


def _progress_words(run: RunningLog, now_ms: float) -> str:
    schedule = run.schedule
    if schedule is None:
        return f"{run.samples:,}"
    index = len(run.evaluations) + 1
    left = run.seconds_until(schedule.samples(index), now_ms)
    due = f" in {clock(left)}" if left else ""
    return f"{run.samples:,}, evaluation {index} at {schedule.samples(index):,}{due}"


def _of_target(run: RunningLog) -> str:
    return f"of {run.target:.4f}" if run.target is not None else "(no target logged)"


def end_words(run: RunningLog) -> str:
    """How the run ended."""
    seconds = (run.run_stop_ms - run.run_start_ms) / 1000 if run.run_stop_ms and run.run_start_ms else None
    spent = f" after {clock(seconds)} ({seconds:.1f} s)" if seconds is not None else ""
    fault = run.header.get("ended by a fault")
    return f"{run.status}{spent}" + (f": {fault}" if fault else "")


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
