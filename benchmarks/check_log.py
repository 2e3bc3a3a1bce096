"""Large logs and many logs: ``python -m compliance check`` against the official checker.

    python benchmarks/check_log.py [--megabytes N] [--logs N] [--rounds N] [--out FILE]

Both sides are whole commands, imports included, and alternate. Ours gives the official verdict too, so its time holds that
one. The logs are a committed log of this repository with lines added to it: plain text as other programs print it, or
records of a key that no rule names; and copies of it, one after another in one command for ours and a command each for the
official checker, which takes one file.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

# Run as a script: the repository is not on the path then.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro

from benchmarks.conditions import write_figures

REPOSITORY = Path(__file__).resolve().parents[1]
LOG = REPOSITORY / "results" / "cpu_2cores" / "bert" / "result_0.txt"
PLAIN = b"step   1180  samples     37760     66.8 ms     478.8 seq/s      43386 tok/s  wait  2.7 %  loss 3.5512\n"
RECORD = (
    b':::MLLOG {"namespace": "", "time_ms": %d, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": '
    b'{"throughput": 2210.5, "loss": 3.4276}, "metadata": {"file": "train.py", "lineno": 812, "step": 336}}\n'
)


def main(megabytes: int = 120, logs: int = 50, rounds: int = 3, out: Path | None = None) -> None:
    """Print the medians of both sides for each kind of log.

    Args:
        megabytes: Size of a large log.
        logs: Number of usual logs.
        rounds: Runs of each side.
        out: Write the figures here as JSON.
    """
    records = min(megabytes, 50)  # more would not be read: no submission may hold it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workloads = {
            f"{megabytes} MB, plain text": [large_log(folder / "plain.txt", PLAIN, megabytes)],
            f"{records} MB, records": [large_log(folder / "records.txt", record(), records)],
            f"{logs} logs of {LOG.stat().st_size / 1e3:.0f} kB": copies(folder, logs),
        }
        figures = {title: measure(paths, rounds) for title, paths in workloads.items()}
    for title, seconds in figures.items():
        print(f"{title}: ours {seconds['ours']:.2f} s, official {seconds['official']:.2f} s")
    if out:
        write_figures(out, {"rounds": rounds, "seconds": figures})


def record() -> bytes:
    """A record of a key that no rule names, at the time of the run's end."""
    return RECORD % int(lines_of_the_log()[-1][1])


def lines_of_the_log() -> list[tuple[bytes, str]]:
    """The lines with records, each with its time_ms."""
    lines = LOG.read_bytes().splitlines(keepends=True)
    return [(line, line.split(b'"time_ms": ')[1].split(b",")[0].decode()) for line in lines if b":::MLLOG" in line]


def large_log(path: Path, line: bytes, megabytes: int) -> Path:
    """The committed log without what only our own logs carry, and with `line` before its last record, over and over."""
    # Records of our own keys would be checked by one side alone.
    *most, last = [of_run for of_run, _ in lines_of_the_log()]
    with path.open("wb") as file:
        file.writelines(most)
        # Repeated lines are written as they come: a list of them would take the size of the log in memory.
        file.writelines(islice(cycle([line]), megabytes * 10**6 // len(line)))
        file.write(last)
    return path


def copies(folder: Path, logs: int) -> list[Path]:
    """Copies of the committed log."""
    paths = [folder / f"result_{number}.txt" for number in range(logs)]
    for path in paths:
        path.write_bytes(LOG.read_bytes())
    return paths


def measure(paths: list[Path], rounds: int) -> dict[str, float]:
    """Median seconds of both sides over the same logs."""
    official = ["mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "5.0.0"]
    sides = {
        "ours": [["compliance", "check", *map(str, paths)]],
        "official": [[*official, str(path)] for path in paths],
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    # Sides alternate, so that a busy moment of the machine falls on both.
    for _ in range(rounds):
        for side, commands in sides.items():
            begin = time.perf_counter()
            # Imports and start of each process count, as for somebody who checks a log.
            for command in commands:
                run(command, paths[0].parent)
            seconds[side].append(time.perf_counter() - begin)
    return {side: round(statistics.median(values), 3) for side, values in seconds.items()}


def run(command: list[str], folder: Path) -> None:
    """Run a command in the folder of the logs, since the official checker leaves a file where it runs."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        # No other variable of this shell, so that both sides start alike.
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    # 1 is ours for a log of more than 50 MiB, which no submission may hold.
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise ValueError(f"{' '.join(command[:2])} ended with {done.returncode}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    tyro.cli(main)
