"""Find the number of processes and threads that train a recipe fastest on this machine, by short trial runs."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bert.configuration.config import REPOSITORY, Config
from bert.parallel.master_port import free_port
from bert.train import parse
from cluster.tuning.choice import VARIABLES, TunedRun, keep
from compliance.log.records import read_metrics
from console.processes import Output, run
from console.program import say

GAIN = 0.01
"""Share of the default's time that a choice must save even in its worst comparison."""
_CONFIRMATIONS = 2
_FIRST_STEPS, _FEWEST_STEPS = 12, 8
_INTERVALS = 4
"""Number of records of a short run. Its time is the median over the records, which ignores a disturbance."""
_FIRST_PATIENCE_S, _PATIENCE = 600.0, 3.0
"""Seconds after which the first run is killed, and the multiple of the expected duration after which other runs are."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_")
"""Prefixes of launcher variables. Short runs that inherited them would join the launcher's own run."""


def tune(recipe: str, settings: tuple[str, ...], seconds: float) -> TunedRun:
    """Measure for about ``seconds`` seconds, print the results, and store the best choice.

    Raises ``ValueError`` if the default choice cannot run.
    """
    if not 10 <= seconds <= 86400:
        raise ValueError(f"--seconds is {seconds:g}, expected 10 to 86,400")
    deadline = time.monotonic() + seconds
    config = parse([recipe, *settings])
    if config.training.device != "cpu":
        raise ValueError("tune chooses processes and threads on CPUs; with GPUs, a run has one process for each GPU")
    if config.checkpoint.folder or config.resume or config.save_checkpoint:
        raise ValueError("tune starts many short runs: omit --checkpoint.folder, --resume and --save-checkpoint")
    # Some recipes must generate their data first.
    _script("./run_and_time.sh", "--prepare", recipe, "--", *settings)
    default = default_choice(recipe)
    runs = _ShortRuns(config, settings, deadline)
    say(f"{default}: {1000 * runs.first(default):.1f} ms a step, the default")
    batch = config.training.global_batch_size // config.training.gradient_accumulation_steps
    best = _fastest(runs, default, layouts(default, batch, len(os.sched_getaffinity(0))))
    keep(config, best)
    say(f"kept for {recipe} on this machine: {best}{', the default' if best == default else ''}")
    return best


def _fastest(runs: _ShortRuns, default: TunedRun, challengers: list[TunedRun]) -> TunedRun:
    """Return the choice with the fastest first run if all of its runs beat the default, or else the default."""
    runs.plan(1 + len(challengers) + 2 * _CONFIRMATIONS)
    times = {default: [runs.seconds(default)]}
    for choice in challengers:
        if not runs.has_time:
            say(f"{choice}: not measured, the time is up")
            continue
        try:
            times[choice] = [runs.seconds(choice)]
        except ValueError as error:
            say(f"{choice}: not measured, {error}")
            continue
        say(f"{choice}: {times[choice][0] / times[default][0]:.3f} of the default's time")
    best = min(times, key=lambda choice: times[choice][0])
    for _ in range(_CONFIRMATIONS):
        if best == default or not runs.has_time:
            break
        for choice in (best, default):
            times[choice].append(runs.seconds(choice))
    if is_faster(times[best], times[default]):
        return best
    if best != default:
        say(f"{best}: not faster in every run")
    return default


def is_faster(times: list[float], default: list[float]) -> bool:
    """Tell whether there are enough times, and all are shorter by `GAIN` than all times of the default."""
    return len(times) > _CONFIRMATIONS and max(times) < (1 - GAIN) * min(default)


class _ShortRuns:
    """Short runs of a recipe that end after some steps. Every choice trains on the same samples."""

    def __init__(self, config: Config, settings: tuple[str, ...], deadline: float) -> None:
        self._arguments = [config.recipe, *settings, "--training.seed=1"]
        self._deadline = deadline
        self._batch = config.training.global_batch_size
        self._most_steps = config.training.sample_limit // self._batch
        self._steps = min(_FIRST_STEPS, self._most_steps)
        self._run_s = _FIRST_PATIENCE_S / _PATIENCE

    def first(self, choice: TunedRun) -> float:
        """Make the first run, which also measures the start-up time for `plan`, and return the seconds of a step."""
        begin = time.monotonic()
        self._step_s = self.seconds(choice)
        self._start_s = time.monotonic() - begin - self._steps * self._step_s
        return self._step_s

    def plan(self, count: int) -> None:
        """Choose the steps per run so that ``count`` runs end before the deadline."""
        left = (self._deadline - time.monotonic()) / count - self._start_s
        self._steps = min(max(_FEWEST_STEPS, int(left / self._step_s)), self._most_steps)
        self._run_s = self._start_s + self._steps * self._step_s

    @property
    def has_time(self) -> bool:
        """Whether another run would end before the deadline."""
        return time.monotonic() + self._run_s < self._deadline

    def seconds(self, choice: TunedRun) -> float:
        """Run once with a choice and return the median seconds of a step. Raises ``ValueError`` if the run fails."""
        with tempfile.TemporaryDirectory() as folder:
            arguments = [
                *self._arguments,
                f"--training.max-steps={self._steps}",
                f"--log.interval-steps={max(1, self._steps // _INTERVALS)}",
                f"--evaluation.interval-samples={self._steps * self._batch}",
                f"--log.results={folder}",
            ]
            environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
            environment["OMP_NUM_THREADS"] = str(choice.threads)
            command = [sys.executable, *_launcher(choice.processes, folder), "-m", "bert.train", *arguments]
            done = run(command, timeout_s=_PATIENCE * self._run_s, folder=REPOSITORY, environment=environment)
            files = [*Path(folder).rglob("metrics_*.jsonl")]
            steps = [each.step_ms / 1000 for each in read_metrics(files[0]).steps] if files else []
        # The exit status does not help, because a run that misses its target ends with status 1.
        if len(steps) < 2:
            raise ValueError(f"{choice} {_complaint(done)}")
        return statistics.median(steps[1:])


def _launcher(processes: int, folder: str) -> list[str]:
    if processes == 1:
        return []
    return [
        *("-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--log-dir={folder}"),
        *("--master-addr=127.0.0.1", f"--master-port={free_port()}"),
    ]


def default_choice(recipe: str) -> TunedRun:
    """Return the default choice of ``run_and_time.sh``."""
    script = 'source launch/processes.sh; default_processes "$1" .venv/bin/python; echo "$NPROC $OMP_NUM_THREADS"'
    processes, threads = _script("bash", "-euo", "pipefail", "-c", script, "bash", recipe).split()
    return TunedRun(int(processes), int(threads))


def _script(*command: str) -> str:
    """Run a script of this checkout and return its output. Raises ``ValueError`` with its error message."""
    if not (REPOSITORY / "run_and_time.sh").exists():
        raise ValueError(f"there is no {REPOSITORY}/run_and_time.sh, whose runs are tuned: expected a checkout")
    environment = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "WORLD_SIZE")}
    done = run(command, folder=REPOSITORY, environment=environment)
    if done.trouble:
        raise ValueError(_complaint(done))
    return done.text


def _complaint(done: Output) -> str:
    lines = done.errors.strip().splitlines()
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), done.complaint)


def layouts(default: TunedRun, batch: int, cores: int) -> list[TunedRun]:
    """Return alternatives to the default, on all cores and on half of them. The processes must divide the batch evenly."""
    counts = [2**power for power in range(cores.bit_length()) if batch % 2**power == 0]
    every = [TunedRun(count, cores // used // count) for used in (1, 2) for count in counts if cores // used >= count]
    return [each for each in dict.fromkeys(every) if each != default]
