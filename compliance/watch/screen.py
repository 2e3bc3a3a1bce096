"""A run in progress, in the terminal: accuracy against the target, time left as a range, outlook, rules about to be broken.

Reads the log and the metrics file beside it as they grow, and changes nothing. On a terminal a panel is kept up to date;
elsewhere a line is printed for each evaluation and each complaint.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from rich.console import Console

from compliance.log import rules
from compliance.watch.running import RunningLog
from compliance.watch.watched import Watch, choose
from console.live import LivePanel, Row, accuracy_rows, clock, end_row, of_target, warning_rows
from console.text import visible

POLL_S = 1.0
INIT_STALE_S = 3600.0
"""A run that compiles and tunes may be silent for long; the rules end its initialisation sooner."""
MAX_COMPLAINTS_SHOWN = 8


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
    # Piped on, a line is not wrapped at the width of a terminal that is not there.
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
    # The monotonic clock: the time of day may be set meanwhile.
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
            # The time of day, in milliseconds, as in the log.
            run.watch_the_time(time.time() * 1000)
            # The other logs of the folder are read when there is something to compare, and not each second.
            if (run.phase, len(run.evaluations)) != known:
                known = (run.phase, len(run.evaluations))
                watched.look_around()
            show()
            silent_s = time.monotonic() - watched.news_s
            # A run that initialises is given more time.
            if run.phase == "done" or silent_s > (max(stale_s, INIT_STALE_S) if run.phase == "init" else stale_s):
                break
            # Behind by more than one look: go on at once.
            if not watched.log.has_more:
                time.sleep(POLL_S)
    if watched.run.phase != "done":
        _put(console, f"given up: {watched.path} has not grown for {silent_s:.0f} s")
    return 0 if watched.run.status == "success" else 1


def _put(console: Console, text: str) -> None:
    console.print(visible(text), markup=False)


def _display(watched: Watch, console: Console, stack: ExitStack) -> Callable[[], None]:
    """Choose what shows the news: a panel that `stack` leaves standing, or plain lines."""
    if not console.is_terminal:
        return EvaluationLines(watched, console).show
    live = LivePanel(console)
    stack.callback(live.close)
    return lambda: live.show(_title(watched), rows(watched, time.time() * 1000))


class EvaluationLines:
    """Print a line for each evaluation, each complaint and the end, where the output is no terminal."""

    def __init__(self, watched: Watch, console: Console) -> None:
        self._watched, self._console = watched, console
        self._run = watched.run
        self._evaluations = self._complaints = 0
        self._phase = ""

    def show(self) -> None:
        """Print what is new."""
        watched, run = self._watched, self._watched.run
        # A new object stands for a log that was begun again.
        if run is not self._run:
            _put(self._console, "the log was begun again")
            self._run, self._evaluations, self._complaints = run, 0, 0
        if run.phase != self._phase and run.phase in ("init", "run"):
            _put(self._console, f"{watched.path}: {_phase_words(watched, time.time() * 1000)}")
        self._phase = run.phase
        for index in range(self._evaluations, len(run.evaluations)):
            evaluation = run.evaluations[index]
            words = f"evaluation {index + 1}: accuracy {evaluation.accuracy:.4f} {of_target(run.target)}"
            latest = index + 1 == len(run.evaluations) and run.phase != "done"
            after = f", {forecast_words(watched, time.time() * 1000)}" if latest else ""
            rate = f", {run.rate:,.1f} sequences/s" if latest and run.rate else ""
            _put(self._console, f"{words} at {evaluation.samples:,} samples{rate}{after}")
        if len(run.evaluations) > self._evaluations or run.phase == "done":
            for line in watched.outlooks():
                _put(self._console, f"outlook: {line}")
        self._evaluations = len(run.evaluations)
        # A dictionary keeps the order in which complaints came.
        for text in islice(run.complaints, self._complaints, None):
            _put(self._console, f"warning: {text.removeprefix('warning ')}")
        self._complaints = len(run.complaints)
        if run.phase == "done":
            _put(self._console, end_words(run))


def rows(watched: Watch, now_ms: float) -> list[Row]:
    """Lay out what is known, for a terminal."""
    run = watched.run
    shown: list[Row] = [("phase", _phase_words(watched, now_ms))]
    if run.evaluations:
        accuracies = [evaluation.accuracy for evaluation in run.evaluations]
        shown += accuracy_rows(accuracies, run.target, run.evaluations[-1].samples)
    if run.phase == "run":
        shown.append(("samples", _progress_words(run, now_ms)))
        if run.rate:
            now = f", now {run.step_rate:,.1f}" if run.step_rate else ""
            shown.append(("rate", f"{run.rate:,.1f} sequences/s with evaluations{now}"))
        shown.append(("target", forecast_words(watched, now_ms)))
    # The name stands beside the first line only.
    shown += zip(["outlook", *[""] * 9], watched.outlooks(), strict=False)
    if run.phase == "done":
        shown.append(end_row(end_words(run), is_success=run.status == "success"))
    return shown + warning_rows(list(run.complaints)[-MAX_COMPLAINTS_SHOWN:])


def _title(watched: Watch) -> str:
    recipe = watched.run.header.get("recipe")
    return " · ".join(filter(None, (watched.path.name, recipe, watched.run.division)))


def forecast_words(watched: Watch, now_ms: float) -> str:
    """Say when the target will be reached, as a range."""
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


def end_words(run: RunningLog) -> str:
    """Say how the run ended."""
    spent = f" after {clock(run.seconds)} ({run.seconds:.1f} s)" if run.seconds is not None else ""
    fault = run.header.get("ended by a fault")
    return f"{run.status}{spent}" + (f": {fault}" if fault else "")
