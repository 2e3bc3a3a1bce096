"""Find the number of processes and threads that train a recipe fastest on this machine, by short trial runs."""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bert.configuration.config import REPOSITORY
from bert.launch.layout import Layout, default_layout, keep
from bert.parallel.master_port import free_port
from bert.train import parse
from compliance.log.records import read_metrics
from console.processes import Output, run
from console.program import say

GAIN = 0.01
"""Share of the default's time that a choice must save, even if its slowest run is compared with the default's fastest."""
_CONFIRMATIONS = 2
_FIRST_STEPS, _FEWEST_STEPS = 12, 8
_INTERVALS = 4
"""Number of records of a short run. The run's time is the median over the records, which ignores a disturbance."""
_PATIENCE_S = 600.0
"""Seconds after which a short run is killed."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_")
"""Prefixes of launcher variables. Short runs that inherited them would join the launcher's own run."""


def tune(recipe: str, settings: tuple[str, ...], seconds: float) -> None:
    """Measure for about ``seconds`` seconds, print the results, and store the best choice.

    Raises ``ValueError`` if the default choice cannot run.
    """
    if not 10 <= seconds <= 86400:
        raise ValueError(f"--seconds is {seconds:g}, expected 10 to 86,400")
    begin = time.monotonic()
    config = parse([recipe, *settings])
    if config.training.device != "cpu":
        raise ValueError("tune chooses processes and threads on CPUs; with GPUs, a run has one process for each GPU")
    if config.checkpoint.folder or config.resume or config.save_checkpoint:
        raise ValueError("tune starts many short runs: omit --checkpoint.folder, --resume and --save-checkpoint")
    # Some recipes must generate their data first.
    prepared = run([sys.executable, "-m", "bert.launch", "--prepare", recipe, "--", *settings], folder=REPOSITORY)
    if prepared.trouble:
        raise ValueError(_complaint(prepared))
    default = default_layout(config)
    batch = config.training.global_batch_size
    most_steps = config.training.sample_limit // batch
    steps = min(_FIRST_STEPS, most_steps)
    arguments = [recipe, *settings, "--training.seed=1"]

    def seconds_of_step(choice: Layout) -> float:
        return _short_run(choice, arguments, steps, batch)

    first = time.monotonic()
    step_s = seconds_of_step(default)
    start_s = time.monotonic() - first - steps * step_s
    say(f"{default}: {1000 * step_s:.1f} ms a step, the default")
    challengers = layouts(default, batch // config.training.gradient_accumulation_steps, len(os.sched_getaffinity(0)))
    # Choose the steps per run so that all runs together take the rest of the time.
    a_run = (begin + seconds - time.monotonic()) / (1 + len(challengers) + 2 * _CONFIRMATIONS)
    steps = min(max(_FEWEST_STEPS, int((a_run - start_s) / step_s)), most_steps)
    times = {default: [seconds_of_step(default)]}
    for choice in challengers:
        try:
            times[choice] = [seconds_of_step(choice)]
        except ValueError as error:
            say(f"{choice}: not measured, {error}")
            continue
        say(f"{choice}: {times[choice][0] / times[default][0]:.3f} of the default's time")
    best = min(times, key=lambda choice: times[choice][0])
    if best != default:
        for choice in (best, default) * _CONFIRMATIONS:
            times[choice].append(seconds_of_step(choice))
        if not is_faster(times[best], times[default]):
            say(f"{best}: not faster in every run")
            best = default
    keep(config, best)
    say(f"kept for {recipe} on this machine: {best}{', the default' if best == default else ''}")


def is_faster(times: list[float], default: list[float]) -> bool:
    """Tell whether there are enough times, and all times are shorter by `GAIN` than every time of the default."""
    return len(times) > _CONFIRMATIONS and max(times) < (1 - GAIN) * min(default)


def _short_run(choice: Layout, arguments: list[str], steps: int, batch: int) -> float:
    """Run some steps with a choice and return the median seconds of a step. Raises ``ValueError`` if the run fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    environment["OMP_NUM_THREADS"] = str(choice.threads)
    with tempfile.TemporaryDirectory() as folder:
        launcher = [
            *("-m", "torch.distributed.run", f"--nproc-per-node={choice.processes}", f"--log-dir={folder}"),
            *("--master-addr=127.0.0.1", f"--master-port={free_port()}"),
        ]
        command = [
            *(sys.executable, *(launcher if choice.processes > 1 else ()), "-m", "bert.train", *arguments),
            f"--training.max-steps={steps}",
            f"--log.interval-steps={max(1, steps // _INTERVALS)}",
            f"--evaluation.interval-samples={steps * batch}",
            f"--log.results={folder}",
        ]
        done = run(command, timeout_s=_PATIENCE_S, folder=REPOSITORY, environment=environment)
        files = [*Path(folder).rglob("metrics_*.jsonl")]
        found = [each.step_ms / 1000 for each in read_metrics(files[0]).steps] if files else []
    # The exit status does not help, because a run that misses its target ends with status 1.
    if len(found) < 2:
        raise ValueError(f"{choice} {_complaint(done)}")
    return statistics.median(found[1:])


def _complaint(done: Output) -> str:
    lines = done.errors.strip().splitlines()
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), done.complaint)


def layouts(default: Layout, batch: int, cores: int) -> list[Layout]:
    """Return alternatives to the default, on all cores and on half of them. Their processes divide the batch evenly."""
    counts = [2**power for power in range(cores.bit_length()) if batch % 2**power == 0]
    every = [Layout(count, cores // used // count) for used in (1, 2) for count in counts if cores // used >= count]
    return [each for each in dict.fromkeys(every) if each != default]
