"""Measure what the small commands cost: wall and processor seconds of whole processes, imports included.

    python benchmarks/startup.py [--repeats N] [--quick] [--out FILE]

Rounds go over all commands, so that a busy moment of the machine meets every one of them; the table holds medians.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro

from benchmarks.conditions import write_figures

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = "results/cpu_2cores/bert"
COMMANDS = (
    "compliance --help",
    "compliance check --help",
    "dataloading --help",
    "dataloading prepare --help",
    "kernels --help",
    "kernels autotune --help",
    "kernels.ahead_of_time --help",
    "bert.convert --help",
    "bert.evaluate --help",
    "bert.phase1 --help",
    "bert.train --help",
    "bert.train tiny_cpu --help",
    f"compliance summary {RESULTS}",
    f"compliance check {RESULTS}",
    "compliance doctor --quick",
)


def main(repeats: int = 5, quick: bool = False, out: Path | None = None) -> None:
    """Print a table of the commands.

    Args:
        repeats: Runs of each command.
        quick: One run of each.
        out: Write the figures here as JSON.
    """
    rounds = [[seconds_of(command) for command in COMMANDS] for _ in range(1 if quick else repeats)]
    figures = {
        command: {
            kind: round(statistics.median(values), 3)
            for kind, values in zip(("wall_s", "processor_s"), zip(*runs, strict=True), strict=True)
        }
        for command, runs in zip(COMMANDS, zip(*rounds, strict=True), strict=True)
    }
    print(f"{'python -m':46}{'wall':>8}{'processor':>12}")
    for command, seconds in figures.items():
        print(f"{command:46}{seconds['wall_s']:6.2f} s{seconds['processor_s']:10.2f} s")
    if out:
        write_figures(out, {"rounds": len(rounds), "commands": figures})


def seconds_of(command: str) -> tuple[float, float]:
    """Wall and processor seconds of one process. Raises ``ValueError`` where it ends with a traceback."""
    # Processor seconds of children, which count once they have ended and were waited for.
    began, before = time.perf_counter(), getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    wall, after = time.perf_counter() - began, getrusage(RUSAGE_CHILDREN)
    # A command that fails quickly must not pass for a fast one.
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:  # 1: the doctor found something
        raise ValueError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    tyro.cli(main)
