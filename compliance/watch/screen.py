"""Show a run in progress on a terminal: its accuracy and target, time left, outlook and broken rules.

The watch only reads the log and its metrics file as they grow. On a terminal it updates a panel. Elsewhere it prints a line
for each evaluation and each complaint.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from compliance.log import rules
from compliance.log.logged_run import samples_of
from compliance.watch.running import RunningLog
from compliance.watch.watched import Watch, choose
from console.program import say
from console.text import clock, visible

POLL_S = 1.0
INIT_STALE_S = 3600.0
"""Seconds that a run may print nothing during initialisation, because it compiles and tunes kernels."""
MAX_COMPLAINTS_SHOWN = 8
_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 60


def watch(path: Path, ruleset: str, timeout_s: float, stale_s: float, console: Console | None = None) -> int:
    """Follow a run to its end. Return 0 if it ended with success, 130 after Ctrl-C, and otherwise 1.

    `path` is a log, an output that contains a log's lines, or a folder with logs. The watch gives up after `timeout_s`
    seconds without a log, and after `stale_s` seconds without new lines.
    """
    rules.check_ruleset(ruleset)
    for name, seconds in (("--timeout", timeout_s), ("--stale", stale_s)):
        if not seconds > 0:
            raise ValueError(f"{name} is {seconds:g}, expected more than 0 seconds")
    try:
        deadline, chosen = time.monotonic() + timeout_s, choose(path)
        if chosen is None:
            say(f"waiting for a running log at {path}")
        while chosen is None and time.monotonic() < deadline:
            time.sleep(min(POLL_S, timeout_s))
            chosen = choose(path)
        if chosen is None:
            say(f"nothing to watch: no running log at {path} after {timeout_s:g} s")
            return 1
        return _follow(Watch(chosen, ruleset), stale_s, console or Console())
    except KeyboardInterrupt:
        return 130


def _follow(watched: Watch, stale_s: float, console: Console) -> int:
    run, known, lines = watched.run, None, EvaluationLines(watched)
    redrawn = Live(console=console, auto_refresh=False, vertical_overflow="crop") if console.is_terminal else None
    with redrawn or nullcontext() as live:
        while True:
            watched.look()
            now_ms = time.time() * 1000  # the log has wall-clock times too
            run.check_initialisation(now_ms)
            # The other logs matter only for comparisons, so read them when this run has a new evaluation or phase.
            if (run.phase, len(run.curve)) != known:
                known = (run.phase, len(run.curve))
                watched.read_siblings()
            if live:
                live.update(view(watched, now_ms), refresh=True)
            else:
                lines.show(now_ms)
            silent_s = time.monotonic() - watched.news_s
            if run.phase == "done" or silent_s > (max(stale_s, INIT_STALE_S) if run.phase == "init" else stale_s):
                break
            time.sleep(POLL_S)
    if run.phase != "done":
        say(f"gave up: {watched.path} has not grown for {silent_s:.0f} s")
    # A log may state success although its accuracy is below the target. Such a run has not succeeded.
    return 0 if run.status == "success" and (run.target is None or watched.has_reached) else 1


class EvaluationLines:
    """Output if there is no terminal. It has a line for each evaluation, each complaint and the end."""

    def __init__(self, watched: Watch) -> None:
        self._watched = watched
        self._evaluations = self._complaints = 0
        self._phase = ""

    def show(self, now_ms: float) -> None:
        watched, run = self._watched, self._watched.run
        if run.phase != self._phase and run.phase in ("init", "run"):
            say(f"{watched.path}: {_phase_words(run, now_ms)}")
        self._phase = run.phase
        evaluations = len(run.curve)
        for number, (samples, accuracy) in islice(enumerate(run.curve, 1), self._evaluations, None):
            words = f"evaluation {number}: accuracy {accuracy:.4f} {_aim(run, number)} at {samples:,} samples"
            if number == evaluations and run.phase != "done":
                words += (f", {run.rate:,.1f} sequences/s" if run.rate else "") + f", {watched.forecast_words(now_ms)}"
            say(words)
        if evaluations > self._evaluations or run.phase == "done":
            for line in watched.outlooks():
                say(f"outlook: {line}")
        self._evaluations = evaluations
        for text in islice(run.complaints, self._complaints, None):
            say(f"warning: {text.removeprefix('warning ')}")
        self._complaints = len(run.complaints)
        if run.phase == "done":
            say(_end_words(run))


def view(watched: Watch, now_ms: float) -> Panel:
    """Draw the state of the run as a panel. Rows without a known value are left out."""
    run = watched.run
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("phase", _styled(_phase_words(run, now_ms)))
    if curve := run.curve:
        samples, accuracy = curve[-1]
        words = f"{accuracy:.4f} {_aim(run, len(curve))} at {samples:,} samples, evaluation {len(curve)}"
        table.add_row("accuracy", _styled(words))
        table.add_row("", _styled(_sparkline([accuracy for _, accuracy in curve]), "cyan"))
    if run.phase == "run":
        table.add_row("samples", _styled(_samples_words(watched, now_ms)))
        if run.rate:
            now = f", now {run.step_rate:,.1f}" if run.step_rate else ""
            table.add_row("rate", _styled(f"{run.rate:,.1f} sequences/s with evaluations{now}"))
        if run.site_bytes:
            words = f"{decimal(run.site_bytes)} sent between them, {run.site_wait_ms:.1f} ms of a step waiting"
            table.add_row("sites", _styled(words))
        table.add_row("end" if run.trains_to_end else "target", _styled(watched.forecast_words(now_ms)))
    for number, line in enumerate(watched.outlooks()):
        table.add_row("" if number else "outlook", _styled(line))
    if run.phase == "done":
        table.add_row("end", _styled(_end_words(run), "green" if run.status == "success" else "bold red"))
    for text in list(run.complaints)[-MAX_COMPLAINTS_SHOWN:]:
        table.add_row("!", _styled(text, "yellow"))
    title = " · ".join(filter(None, (watched.path.name, run.header.get("recipe"), run.division)))
    return Panel(table, title=_styled(title), title_align="left")


def _styled(text: str, style: str = "") -> Text:
    # rich would interpret brackets in a string as markup, but not in a Text.
    return Text(visible(text), style=style)


def _sparkline(values: Sequence[float]) -> str:
    """Draw the last values as a row of bars. The smallest value gets the lowest bar, the largest the highest."""
    shown = values[-_MAX_BARS:]
    low, high = min(shown), max(shown)
    steps = len(_BARS) - 1
    return "".join(_BARS[round(steps * (value - low) / (high - low)) if high > low else 0] for value in shown)


def _aim(run: RunningLog, evaluations: int) -> str:
    """Name what the accuracy is compared with: the target or, without one, the best accuracy so far."""
    if run.trains_to_end:
        return f"(best {max(accuracy for _, accuracy in run.curve[:evaluations]):.4f})"
    return f"of {run.target:.4f}" if run.target is not None else "(no target logged)"


def _phase_words(run: RunningLog, now_ms: float) -> str:
    if run.phase == "init" and run.init_start_ms is not None:
        limit = "" if run.trains_to_end else f" of {rules.INIT_LIMIT_MINUTES[run.division]}:00 at most"
        return f"initialising, {clock((now_ms - run.init_start_ms) / 1000)}{limit}"
    if run.phase == "run" and run.run_start_ms is not None:
        start = run.open.get("eval_start")
        samples = samples_of(start.metadata) if start and not run.is_evaluated else None
        doing = f"evaluating at {samples:,} samples" if samples is not None else "training"
        return f"{doing}, {clock((now_ms - run.run_start_ms) / 1000)} since run_start"
    return {"before": "not begun", "ready": "initialised", "done": "ended"}.get(run.phase, run.phase)


def _samples_words(watched: Watch, now_ms: float) -> str:
    run, schedule, trained = watched.run, watched.run.schedule, watched.run.trained_by(now_ms)
    if schedule is None:
        return f"{run.samples:,}"
    index = len(run.curve) + 1
    due = schedule.samples(index)
    left = f" in {clock((due - trained) / run.rate)}" if trained is not None and run.rate and due > trained else ""
    return f"{run.samples:,}, evaluation {index} at {due:,}{left}"


def _end_words(run: RunningLog) -> str:
    spent = f" after {clock(run.seconds)} ({run.seconds:.1f} s)" if run.seconds is not None else ""
    fault = run.header.get("ended by a fault")
    return f"{run.status}{spent}" + (f": {fault}" if fault else "")
