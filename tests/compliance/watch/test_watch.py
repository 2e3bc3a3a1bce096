"""``watch`` follows a run's log from the first line to the end."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from compliance.convergence.outlook import outlook
from compliance.log.follower import MAX_LINE_BYTES, Follower
from compliance.log.schedule import EvaluationSchedule
from compliance.watch import screen as watching
from compliance.watch import watched as following
from compliance.watch.screen import watch
from compliance.watch.watched import Watch, choose
from tests.compliance import run_logs
from tests.compliance.result_folders import write_experiment
from tests.compliance.watch.test_running import begun, evaluate, line
from tests.conftest import REPOSITORY
from tests.programs import PATIENCE_S

CURVE = "7000 7048 7088 7117 7130 7145 7158 7164 7172 7182 7183 7190 7193 7196 7197 7198 7199"
INTERVAL = int(run_logs.CLOSED["eval_interval_samples"])


def closed_run(
    path: Path, evaluations: int = 16, *, seed: int = 1, ends: Any = "success", last: float | None = None, **log: Any
) -> Path:
    """Write a closed log. The last accuracy is `last`, by default above the target if the run ends with success."""
    last = last or (0.7202 if ends == "success" else 0.71)
    accuracies = (*(int(digits) / 10_000 for digits in CURVE.split()[: evaluations - 1]), last)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(run_logs.log_of(accuracies, **{"seed": seed, "status": ends, "step_ms": 100, **log}))
    return path


def looked_at(path: Path) -> Watch:
    watched = Watch(path, "5.0.0")
    watched.look()
    watched.read_siblings()
    return watched


class Clock:
    """Fake clock. It advances only while the watch sleeps, and then runs the events that are due."""

    def __init__(self) -> None:
        self._begin_s, self._wall_s = time.monotonic(), run_logs.START_MS / 1000 + 100
        self._slept_s = 0.0
        self._events: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self._begin_s + self._slept_s

    def time(self) -> float:
        return self._wall_s + self._slept_s

    def sleep(self, seconds: float) -> None:
        self._slept_s += seconds
        while self._events and self._events[0][0] <= self._slept_s:
            self._events.pop(0)[1]()

    def then(self, *events: Callable[[], object], pause_s: float = 0.15) -> None:
        """Schedule events in order, with a pause before each."""
        self._events = [(self._slept_s + number * pause_s, event) for number, event in enumerate(events, 1)]


@pytest.fixture(autouse=True)
def clock_of_watch(monkeypatch: pytest.MonkeyPatch) -> Clock:
    watch_clock = Clock()
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    for module in (watching, following):
        monkeypatch.setattr(module, "time", watch_clock)
    return watch_clock


def expected(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def followed(path: Path, timeout_s: float = 5.0, stale_s: float = 5.0) -> tuple[int, str]:
    """Watch a run. Return the exit status and the output as it is written to a file."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = watch(path, "5.0.0", timeout_s, stale_s)
    return status, text.getvalue()


def test_the_watch_of_a_run_in_a_set_prints_the_recorded_output(tmp_path: Path) -> None:
    for number in (1, 2):
        closed_run(tmp_path / f"result_{number}.txt", 17, seed=100 + number)
    status, said = followed(closed_run(tmp_path / "result_0.txt", 4, seed=101))
    assert status == 0
    assert said == expected("beside_others.txt")


def test_the_watch_exits_with_1_if_a_successful_run_missed_the_target(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    for accuracy, status in (("0.7202", 0), ("0.72", 0), ("0.7199", 1)):
        path.write_text(closed_run(path, 4).read_text().replace("0.7202", accuracy))
        assert followed(path)[0] == status


def test_the_watch_follows_a_log_inside_other_program_output(tmp_path: Path, clock_of_watch: Clock) -> None:
    closed_run(tmp_path / "result_1.txt", 3)  # a log with the same seed
    closed_run(tmp_path / "result_2.txt", 3, seed=8)
    log = closed_run(tmp_path / "elsewhere" / "result_0.txt", 6).read_text()
    whole = "srun: job 4711 queued\n" + "".join(f" 0: {text}\n" for text in log.splitlines()) + "bye\n"
    path = tmp_path / "result_0.txt"
    cuts = [0, 900, whole.index('"block_start"'), len(whole) // 2, len(whole) - 700, len(whole) - 5, len(whole)]
    clock_of_watch.then(*(lambda end=end: path.write_text(whole[:end]) for end in cuts))
    status, said = followed(path)
    assert (status, said.replace(str(tmp_path), "FOLDER")) == (0, expected("meanwhile.txt"))


def test_the_watch_gives_up_on_a_log_that_never_appears_or_stops_growing(tmp_path: Path, clock_of_watch: Clock) -> None:
    path, begin = tmp_path / "result_0.txt", clock_of_watch.monotonic()
    waiting = f"waiting for a running log at {path}\nnothing to watch: no running log at {path} after 0.1 s\n"
    assert followed(path, timeout_s=0.1) == (1, waiting)
    assert clock_of_watch.monotonic() - begin == pytest.approx(0.1, abs=0.011)
    closed_run(path, 3, ends="running")
    begin = clock_of_watch.monotonic()
    status, text = followed(path, stale_s=1.6)
    assert (status, text.splitlines()[-1]) == (1, f"gave up: {path} has not grown for 2 s")
    assert clock_of_watch.monotonic() - begin == pytest.approx(1.6, abs=0.011)


def test_the_watch_waits_longer_for_new_lines_during_initialisation(
    tmp_path: Path, clock_of_watch: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result_0.txt"
    begin_ms = int(clock_of_watch.time() * 1000) - 26 * 60_000 - 5_000
    path.write_bytes(line("init_start", None, begin_ms, "INTERVAL_START") + b"\n")
    whole = run_logs.write_run(tmp_path / "elsewhere" / "result_0.txt", "open").read_bytes()
    clock_of_watch.then(lambda: path.write_bytes(path.read_bytes() + whole), pause_s=0.6)
    status, text = followed(path, stale_s=0.2)
    assert status == 0
    assert text.splitlines()[:2] == [
        f"{path}: initialising, 26:05 of 30:00 at most",
        "warning: initialisation has taken 26 min of 30 (TR 11)",
    ]
    monkeypatch.setattr(watching, "INIT_STALE_S", 0.3)
    path.write_bytes(line("init_start", None, int(clock_of_watch.time() * 1000), "INTERVAL_START") + b"\n")
    assert followed(path, stale_s=0.1)[0] == 1


def test_the_watch_rejects_invalid_options(tmp_path: Path) -> None:
    for ruleset, timeout_s, stale_s, words in (
        ("5.0.0", 0, 1, "--timeout is 0, expected"),
        ("5.0.0", 1, -1, "--stale is -1"),
        ("6.0.0", 1, 1, "ruleset is"),
    ):
        with pytest.raises(ValueError, match=words):
            watch(tmp_path, ruleset, timeout_s, stale_s)


def test_control_c_ends_the_watch_with_status_130(tmp_path: Path) -> None:
    path = closed_run(tmp_path / "result_0.txt", 3, ends="running")
    command = [sys.executable, "-m", "compliance", "watch", str(path)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (130, b"")


def test_the_watch_chooses_the_newest_unfinished_log(tmp_path: Path) -> None:
    folder = tmp_path / "system" / "bert"
    done = closed_run(folder / "result_0.txt", 2)
    assert choose(folder) is None
    old = closed_run(folder / "result_1.txt", 2, ends="running")
    new = closed_run(folder / "result_2.txt", 2, ends="running")
    os.utime(old, (1e9, 1e9))
    assert choose(folder) == choose(tmp_path / "system") == new
    os.utime(old, (3e9, 3e9))
    assert choose(folder) == old
    assert choose(done) == done
    assert choose(tmp_path / "none") is None


SCHEDULE = EvaluationSchedule(INTERVAL, 448)
UNCOUNTED = '"epoch_num": -5, "was": '
SAMPLES = {evaluations: SCHEDULE.samples(evaluations) for evaluations in (4, 6, 16, 17)}


@pytest.mark.parametrize(
    ("others", "mine", "ends", "samples"),
    [
        ([17, 16], 16, "success", SAMPLES[16]),
        ([17] * 9, 6, "aborted", None),
        ([None, 17], 4, "success", SAMPLES[4]),
        ([], 4, "aborted", None),
        ([17] * 10, 4, "success", ...),
    ],
)
def test_the_outlook_of_an_ended_run_includes_the_other_runs_of_the_folder(
    tmp_path: Path, others: list[int | None], mine: int, ends: str, samples: Any
) -> None:
    # The comparison ignores a run that counts no samples, a run with another batch size, and a run in progress.
    unknown = closed_run(tmp_path / "result_96.txt", 17, seed=4)
    unknown.write_text(
        unknown.read_text().replace('"epoch_num": ', UNCOUNTED).replace('"value": 2550016', '"value": 9')
    )
    run_logs.write_run(tmp_path / "result_97.txt", "open")
    closed_run(tmp_path / "result_98.txt", 17, seed=3, ends="running")
    for number, count in enumerate(others):
        status = "success" if count else "aborted"
        log = closed_run(tmp_path / f"result_{number}.txt", count or 3, seed=100 + number, ends=status)
        log.write_text(log.read_text().replace('"epoch_num": ', UNCOUNTED))  # so that train_samples is used
    watched = looked_at(closed_run(tmp_path / "result_50.txt", mine, ends=ends))
    of_set = [*(SAMPLES[count] if count else None for count in others), samples]
    expected = [] if samples is ... else [f"with this run: {outlook(of_set, 448, '5.0.0').sentence}"]
    assert list(watched.outlooks()) == expected


def test_the_watch_of_a_run_without_a_target_shows_the_best_accuracy_and_the_end(tmp_path: Path) -> None:
    write_experiment(tmp_path, 0, (0.1,))
    path = write_experiment(tmp_path, 1, (0.1, 0.25, 0.2), {"training.max_steps": 200}, status="running")
    watched = looked_at(path)
    end_ms = watched.run.last_ms
    # Evaluations are 992 samples and 0.5 s apart. The last one is 0.1 s before the end of the log.
    assert watched.run.rate == pytest.approx(1984)
    assert watched.forecast_words(end_ms + 400) == "trains to its end at 6,400 samples, in 0:01"
    assert watched.forecast_words(end_ms - 10_000) == "trains to its end at 6,400 samples, in 0:02"
    panel = shown(watched, end_ms)
    assert "0.2000 (best 0.2500) at 3,008 samples" in panel
    assert "trains to its end" in panel
    assert "target" not in panel
    # Runs without a target may have equal seeds.
    assert [*watched.run.complaints] == ["warning at step 40: the loss is not finite"]
    write_experiment(tmp_path, 1, (0.1, 0.25, 0.2), {"training.max_samples": "1e9"})
    status, said = followed(path)
    assert status == 0
    assert "evaluation 2: accuracy 0.2500 (best 0.2500)" in said
    assert watching.view(looked_at(path), end_ms)
    assert looked_at(path).forecast_words(end_ms) == "trains to its end"


def test_an_open_division_run_without_a_target_has_no_forecast(tmp_path: Path) -> None:
    watched = Watch(tmp_path / "a", "5.0.0")
    watched.run = begun("open", without="quality_target")
    evaluate(watched.run, 1024, 0.25, watched.run.last_ms + 1000)
    panel = shown(watched, watched.run.last_ms)
    assert "unknown: the log lacks the target, the batch size or the interval" in panel
    assert "0.2500 (no target logged) at 1,024 samples" in panel


SITES = json.dumps({"event": "step", "step": 1, "samples": 448, "site_bytes": 2_500_000, "site_wait_ms": 1.25}).encode()


def shown(watched: Watch, now_ms: float, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(watching.view(watched, now_ms))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_panel_of_a_run_in_progress_equals_the_recorded_panel(tmp_path: Path, clock_of_watch: Clock) -> None:
    path = closed_run(tmp_path / "result_0.txt", 6, ends="running", last=0.7145, step_ms=4000)
    watched = looked_at(path)
    first = watched.news_s
    clock_of_watch.sleep(5)
    watched.look()
    assert watched.news_s == first
    step = {"event": "step", "step": 1, "samples": 940_000, "sequences_per_s": 123.4}
    (tmp_path / "metrics_0.jsonl").write_text(json.dumps(step) + "\n")
    watched.look()
    assert watched.news_s > first
    assert shown(watched, watched.run.last_ms + 4000, 160) == expected("panel.txt")
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True, color_system=None)
    assert watch(closed_run(path, 6), "5.0.0", 5, 5, console) == 0
    assert isinstance(console.file, io.StringIO)
    assert "success after" in console.file.getvalue()
    assert "▁▃▄▅▆█" in console.file.getvalue()


def test_the_panels_of_all_phases_equal_the_recorded_panels(tmp_path: Path) -> None:
    watched = Watch(tmp_path / "growing.txt", "5.0.0")
    panels = {("not begun", 0): shown(watched, 0, 80)}
    log = run_logs.log_of((0.1, 0.31), "open", header=(("recipe", "tiny_cpu"),), status="aborted", step_ms=20_000)
    for text in log.splitlines():
        watched.run.take(text)
        if re.search(rb'"key": "(init|run|eval)_', text):
            narrow, panel = (shown(watched, watched.run.last_ms + 1500, width) for width in (40, 80))
            assert max(map(len, narrow.splitlines())) == 40
            phase = re.findall(r"phase +([a-z]+ ?[a-z]*)", panel)[0]
            if panels.setdefault((phase, len(watched.run.curve)), panel) is panel and phase == "training":
                watched.run.take_metrics(SITES)
    for number in range(9):
        watched.run.complain(f"complaint {number}")
    panels["complaints", 2] = shown(watched, 0, 80)
    rows = [[" ".join(row.split()[1:-1]) for row in panel.splitlines()] for panel in panels.values()]
    assert "".join(f"{'; '.join(filter(None, each))}\n" for each in rows) == expected("panels.txt")


@pytest.mark.parametrize(("ends", "colour"), [("success", "\x1b[32m"), ("aborted", "\x1b[1;31m")])
def test_the_panel_shows_success_in_green_and_failure_in_red(tmp_path: Path, ends: str, colour: str) -> None:
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=True, color_system="standard", legacy_windows=False)
    console.print(watching.view(looked_at(closed_run(tmp_path / "result_0.txt", 3, ends=ends)), 0))
    assert "\x1b[1mend" in text.getvalue()
    assert f"{colour}{ends} after 0:02 (" in text.getvalue()


def test_the_watch_escapes_control_characters_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_bytes(
        b"# recipe: \x1b[2J[bold]x\n# ended by a fault: \x1b]0;title\x07 [red]no[/red] [/]\n"
        + b"warning at step 3: \x1b[31m [/x]\n"
        + line("run_start", None, 10, "INTERVAL_START")
        + b"\n"
        + line("run_stop", None, 20, "INTERVAL_END", status="\x1b[2J[/bold]")
        + b"\n"
    )
    status, text = followed(path)
    assert status == 1
    panel = shown(looked_at(path), 30)
    for output in (text, panel):
        assert "\x1b" not in output
        assert "\x07" not in output
        assert "[red]no[/red]" in output


def test_the_follower_skips_overlong_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n" + b"x" * (80 * MAX_LINE_BYTES) + b"\ntwo\n" + b"y" * (32 * MAX_LINE_BYTES))
    follower = Follower(path)
    assert list(follower.lines()) == [b"one", b"two"]
    with path.open("ab") as writer:
        writer.write(b"y\nthree\n")
    assert list(follower.lines()) == [b"three"]


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_the_follower_yields_the_same_lines_for_pieces_of_any_size(pieces: list[bytes]) -> None:
    path = Path(f"/dev/shm/follow-{os.getpid()}")
    path.write_bytes(b"")
    got: list[bytes] = []
    follower = Follower(path)
    try:
        with path.open("ab", buffering=0) as writer:
            for piece in pieces:
                writer.write(piece)
                got += follower.lines()
            whole = b"".join(pieces)
            assert got == [line.rstrip(b"\r") for line in whole.split(b"\n")[:-1]]
    finally:
        path.unlink()
