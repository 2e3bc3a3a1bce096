"""The search: the default is challenged by one choice after another, and what wins is confirmed against it once more."""

from __future__ import annotations

import math
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch

from bert.configuration.config import REPOSITORY, Config
from bert.model import parameter_shapes
from bert.train import parse
from cluster.tuning.choice import VARIABLES, TunedRun, given, keep
from cluster.tuning.group import Group, TrialError, complaint
from cluster.tuning.race import TURNS, Comparison, race, window_steps
from console.program import say

_BUCKETS_BYTES = (1 << 20, 6 << 20, 100 << 20)
_DEPTHS = (8, 16)
_WAIT = 0.02
"""Share of the time spent waiting for data from which on reading further ahead can gain something."""
_CONFIRMING = 0.25
"""Share of the seconds that is kept back for the second look at what has won."""


def tune(recipe: str, settings: tuple[str, ...], seconds: float) -> TunedRun:
    """Measure within about so many seconds, say what was found, and keep it.

    Raises ``ValueError`` where the default cannot run.
    """
    if not 10 <= seconds <= 86400:
        raise ValueError(f"--seconds is {seconds:g}, expected 10 to 86,400")
    begin = time.monotonic()
    config = parse([recipe, *settings])
    # Before the default is asked for: data that ship with a recipe may have to be made first.
    _prepare(recipe, settings)
    default = default_choice(recipe)
    search = _TuneSearch(config, settings, default, begin + seconds, _CONFIRMING * seconds)
    best = search.winner()
    # What won in one set of processes must win again in another, or the default stays.
    if best != default and not search.is_confirmed(best):
        best = default
    keep(config, best)
    say(f"kept for {recipe} on this machine: {best}{', the default' if best == default else ''}")
    return best


def default_choice(recipe: str) -> TunedRun:
    """Return what ``run_and_time.sh`` starts where nobody says anything."""
    # The script that run_and_time.sh itself uses, so that both agree on the default.
    script = 'source launch/processes.sh; default_processes "$1" .venv/bin/python; echo "$NPROC $OMP_NUM_THREADS"'
    # Variables of this shell would be taken for the user's wishes.
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    counts = _shell("-euo", "pipefail", "-c", script, "bash", recipe, environment=environment).split()
    return TunedRun(int(counts[0]), int(counts[1]))


def _prepare(recipe: str, settings: tuple[str, ...]) -> None:
    """Make the data of a recipe that ships with them, and look for whatever would stop a run."""
    # WORLD_SIZE: a launcher around this command is none of the run's.
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", *VARIABLES)}
    _shell("./run_and_time.sh", "--prepare", recipe, "--", *settings, environment=environment)


def _shell(*arguments: str, environment: dict[str, str]) -> str:
    """Run a script of this checkout and return what it prints. Raises ``ValueError`` with its complaint."""
    if not (REPOSITORY / "run_and_time.sh").exists():
        raise ValueError(f"there is no {REPOSITORY}/run_and_time.sh, whose runs are tuned: expected a checkout")
    done = subprocess.run(
        ["bash", *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(complaint(done.stderr.strip().splitlines() or ["run_and_time.sh --prepare failed"]))
    return done.stdout


class _TuneSearch:
    """A search until ``deadline``, by ``time.monotonic``, of which ``confirming`` seconds are for the second look."""

    def __init__(
        self, config: Config, settings: tuple[str, ...], default: TunedRun, deadline: float, confirming: float
    ) -> None:
        self._config, self._settings, self._default, self._deadline = config, settings, default, deadline
        self._confirming = deadline - confirming
        now = time.monotonic()
        # Nobody knows yet how long a start takes.
        self._holder = self._start(default, now + 600)
        self._start_seconds = time.monotonic() - now
        try:
            self._steps = window_steps(self._holder)
            self._pace = self._holder.pace(self._steps)
        # Whatever happens, no process outlives this one.
        except BaseException:
            self._holder.close(patience=0.0)
            raise
        window = self._pace.seconds * (1 + 1 / self._steps)
        # A start, and the fewest turns of four windows each and one more, a quarter longer for a slower challenger.
        self._least_seconds = self._start_seconds + 1.25 * (TURNS[0] + 1) * 4 * window
        """What it takes to start a choice and compare it, though it be a little slower."""

    def winner(self) -> TunedRun:
        """The fastest of the choices, each compared with the fastest so far.

        Of choices two are there at a time, as each takes the memory of a run.
        """
        say(f"{self._default}: {1000 * self._pace.seconds / self._steps:.1f} ms a step, the default")
        try:
            stages = (self._layouts, self._bucket_sizes, self._prefetch_depths)
            for number, stage in enumerate(stages, 1):
                # A stage asks the holder of that moment: buckets matter only with several processes.
                challengers = stage()
                for place, choice in enumerate(challengers):
                    left = len(challengers) - place + len(stages) - number
                    self._challenge(choice, left)
            return self._holder.choice
        finally:
            self._holder.close()

    def is_confirmed(self, best: TunedRun) -> bool:
        """Tell whether new processes of the winner are faster than new ones of the default, too: luck does not repeat."""
        try:
            with self._start(self._default) as default, self._start(best) as winner:
                found = race(default, winner, self._steps, self._untimed(best), self._deadline)
        except TrialError as error:
            say(f"not confirmed: {error}")
            return False
        say(f"once more: {_told(best, self._default, found)}")
        return found is not None and found.is_faster

    def _start(self, choice: TunedRun, deadline: float | None = None) -> Group:
        if deadline is None:
            # Three times the first start, as another group has the machine beside it.
            deadline = time.monotonic() + 30 + 3 * self._start_seconds
        return Group(choice, self._config.recipe, self._settings, deadline)

    def _challenge(self, choice: TunedRun, left: int) -> None:
        """Let a choice take its part of the time, one of ``left``, and keep the faster one."""
        if why_not := self._why_not(choice):
            say(f"{choice}: not measured, {why_not}")
            return
        now = time.monotonic()
        # An equal part of what is left, and never less than a comparison needs.
        deadline = now + max((self._confirming - now) / left, self._least_seconds)
        try:
            challenger = self._start(choice)
        except TrialError as error:
            say(f"not measured: {error}")
            return
        loser = challenger
        try:
            found = race(self._holder, challenger, self._steps, self._untimed(choice), deadline)
            say(_told(choice, self._holder.choice, found))
            # The loser is closed, whichever it is: only two groups are there at a time.
            if found is not None and found.is_faster:
                loser, self._holder = self._holder, challenger
        finally:
            loser.close()

    def _why_not(self, choice: TunedRun) -> str:
        if time.monotonic() + self._least_seconds > self._confirming:
            return "the time is up"
        most = max(choice.processes, self._holder.choice.processes)
        # Memory is taken as proportional to the number of processes.
        needed = self._holder.memory * most // self._holder.choice.processes
        free = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
        if needed > free:
            return f"it may need {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free"
        return ""

    def _untimed(self, choice: TunedRun) -> int:
        """Steps before a window: what was read ahead while the others had the machine is used up in them."""
        depth = dict(choice.settings).get("data.prefetch", 1)
        return depth if depth > 1 or self._steps > 1 else 0

    def _layouts(self) -> list[TunedRun]:
        """Other numbers of processes and threads; with GPUs it is a process for each."""
        training = self._config.training
        if training.device != "cpu":
            return []
        batch = training.global_batch_size // training.gradient_accumulation_steps
        return layouts(self._default, batch, len(os.sched_getaffinity(0)))

    def _bucket_sizes(self) -> list[TunedRun]:
        """Sizes with which the gradient is sent in another number of buckets."""
        if self._holder.choice.processes == 1 or "training.bucket_bytes" in given(self._settings):
            return []
        parameters = sum(torch.Size(shape).numel() for shape in parameter_shapes(self._config.model).values())
        usual = self._config.training.bucket_bytes
        # Of sizes that make equally many buckets one is enough; the usual size is last, and stands for those that do as
        # it does.
        by_count = {math.ceil(4 * parameters / size): size for size in (*_BUCKETS_BYTES, usual)}
        return [self._with("training.bucket_bytes", size) for size in by_count.values() if size != usual]

    def _prefetch_depths(self) -> list[TunedRun]:
        """Depths, where data are waited for at all."""
        # As many unmeasured steps as the deepest prefetch, so that nothing read ahead earlier is left.
        pace = self._holder.pace(self._steps, max(_DEPTHS) if self._steps > 1 else 0)
        if pace.waited < _WAIT * pace.seconds or "data.prefetch" in given(self._settings):
            return []
        return [self._with("data.prefetch", depth) for depth in _DEPTHS if depth > self._config.data.prefetch]

    def _with(self, name: str, value: int) -> TunedRun:
        settings = dict(self._holder.choice.settings) | {name: value}
        return replace(self._holder.choice, settings=tuple(settings.items()))


def layouts(default: TunedRun, batch: int, cores: int) -> list[TunedRun]:
    """Other numbers of processes and threads, on all cores and on half of them; the batch divides over the processes."""
    # Shares of the batch must be equal.
    counts = [2**power for power in range(cores.bit_length()) if batch % 2**power == 0]
    every = [TunedRun(count, cores // used // count) for used in (1, 2) for count in counts if cores // used >= count]
    # dict.fromkeys drops doubles and keeps the order: all cores before half of them.
    return [each for each in dict.fromkeys(every) if each != default]


def _told(choice: TunedRun, holder: TunedRun, found: Comparison | None) -> str:
    if found is None:
        return f"{choice}: not decided in its part of the time, which more --seconds would make longer"
    return f"{choice}: {found} of {holder}{', faster' if found.is_faster else ''}"
