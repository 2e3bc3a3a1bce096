"""Run all GPU measurements of this repository (docs/kernels.md).

    python benchmarks/gpu.py [--part NAME,...] [--out FOLDER] [--seconds N]

Needs torch, triton and numpy. The parts peers and end-to-end report which other packages they need. Needs no network and no
data set: samples are random tokens with Wikipedia's lengths. Without --part, all parts except end-to-end run. Each part
runs in its own process with a share of the time. If a part fails or is cut off, the rows that it has measured are kept and
the other parts still run. Figures go to FOLDER/PART.json; a table of the important rows is printed last. Exit status: 0 if
everything was measured and is correct, 1 if not, 2 for wrong input, 128 + n after signal n.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_parts.page import page
from benchmarks.gpu_parts.part import LOST
from benchmarks.gpu_parts.report import CUT_OFF, Figure, PartReport
from console.program import RaisingParser


class Part(NamedTuple):
    """Measuring function as ``MODULE:FUNCTION``, and the part's weight when the parts of a run divide its time."""

    function: str
    share: int


PARTS = {
    "ceilings": Part("timing:ceilings", 30),
    "correctness": Part("ops:correctness", 100),
    "step": Part("step:step", 90),
    "kernels": Part("ops:kernels", 80),
    "fp8": Part("step:fp8", 70),
    "peers": Part("peers:peers", 120),
    "memory": Part("step:memory", 60),
    "end-to-end": Part("end_to_end:end_to_end", 450),
}
"""Parts in the order in which they run. Later parts use the results of earlier parts."""

ALONE = ("end-to-end",)
"""Parts that run only if --part names them."""

SECONDS = 530
"""Seconds for all parts together, a little under nine minutes."""


@dataclass(frozen=True)
class Settings:
    parts: list[str]
    folder: Path
    device: str
    tiny: bool
    seconds: float


class StoppedError(Exception):
    """Error that the signal handler raises, so that the running part is ended and the table is still printed."""

    def __init__(self, number: int) -> None:
        super().__init__(f"cut off by {signal.Signals(number).name}")
        self.number = number


def parse(arguments: Sequence[str]) -> Settings:
    """Parse a command line. Raises ``ValueError`` for wrong input."""
    parser = RaisingParser(
        prog="python benchmarks/gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="all", metavar="NAME,...", help=f"all, or some of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="by default benchmarks/results/<device>")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="N", help="time of all parts; by default %(default)s"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="by default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small shapes: shows that the code runs")
    chosen = parser.parse_args(arguments)
    asked = [part for part in PARTS if part not in ALONE] if chosen.part == "all" else chosen.part.split(",")
    if unknown := [part for part in asked if part not in PARTS]:
        raise ValueError(f"--part: unknown {unknown[0]!r}, expected all, or some of {', '.join(PARTS)}")
    if not chosen.seconds > 0:
        raise ValueError(f"--seconds: {chosen.seconds:g}, expected more than 0")
    if chosen.device == "cpu" and not chosen.tiny:
        raise ValueError("--device cpu only tests the program: it needs --tiny")
    if chosen.tiny and not chosen.out:
        raise ValueError("--tiny only tests the program: name a folder for its figures by --out")
    folder = _folder_of_the_gpu(chosen.out) if chosen.device == "cuda" else chosen.out
    return Settings(list(dict.fromkeys(asked)), folder, chosen.device, chosen.tiny, chosen.seconds)


def _folder_of_the_gpu(out: Path | None) -> Path:
    import torch  # imported here because it takes seconds and nothing else in this file needs it

    if not torch.cuda.is_available():
        raise ValueError("needs a CUDA device, and PyTorch sees none here")
    name = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
    return out or Path(__file__).parent / "results" / name


def measure(settings: Settings) -> bool:
    """Run the parts one after another, and return whether all succeeded."""
    end, well = time.monotonic() + settings.seconds, True
    for at, part in enumerate(settings.parts):
        # Divide the remaining time among the remaining parts, so that the later parts get unused time.
        later = sum(PARTS[other].share for other in settings.parts[at:])
        seconds = (end - time.monotonic()) * PARTS[part].share / later
        report = run_part(part, f"benchmarks.gpu_parts.{PARTS[part].function}", settings, seconds)
        well = well and report.complete and not report.failures
    return well


def run_part(part: str, function: str, settings: Settings, seconds: float) -> PartReport:
    """Run one part in a separate process until it ends or its time is up, and return its report.

    If the process dies while it measures a row, for example after an access out of bounds, another process continues
    after that row.
    """
    path = settings.folder / f"{part}.json"
    # Rows of an earlier run must not count as rows of this run.
    path.unlink(missing_ok=True)
    end, rows = time.monotonic() + seconds, -1
    while True:
        try:
            status = _run(function, path, settings, end - time.monotonic())
        except StoppedError as stopped:
            _end(path, str(stopped))
            raise
        if status is None:
            return _end(path, f"cut off at its limit of {seconds:.0f} s")
        report = PartReport.load(path)
        # Status 1 means that rows failed, which is a result. With any other status, the process died early.
        if status in (0, 1) and report.error != CUT_OFF:
            return report
        # If the process died during a row, that row has failed, and the next process continues after it. If it died
        # between two rows because the device was lost, the part is restarted, but only once at the same place.
        if report.measuring:
            report.add(Figure(report.measuring, note=f"failed: the process ended with {_ending(status)}"))
        elif status != LOST or len(report.rows) == rows:
            return _end(path, f"the process ended with {_ending(status)}")
        rows = len(report.rows)


def _run(function: str, path: Path, settings: Settings, seconds: float) -> int | None:
    """Run one process, and then end all of its child processes. Returns its exit status, or None if its time was up."""
    program, scale = Path(__file__).parent / "gpu_parts" / "part.py", "tiny" if settings.tiny else "full"
    command = [sys.executable, str(program), function, str(path), str(seconds), settings.device, scale]
    # A process group of its own shields the part from Ctrl-C, and makes it possible to end all child processes at once.
    # process_group needs Python 3.11, the oldest supported version.
    process = subprocess.Popen(command, process_group=0)
    try:
        return process.wait(max(0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # A part also starts compilers, so end the whole group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end(path: Path, error: str) -> PartReport:
    """Record in a part's file why the part is incomplete and which row was being measured."""
    report = PartReport.load(path)
    place = f" while measuring {report.measuring}" if report.measuring else ""
    report.end(f"{error}{place}")
    return report


def _ending(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)  # further signals must not interrupt printing the table
    raise StoppedError(number)


def main(arguments: Sequence[str]) -> int:
    try:
        settings = parse(arguments)
        for number in _SIGNALS:
            signal.signal(number, _stop)
        try:
            status = 0 if measure(settings) else 1
        except StoppedError as stopped:
            # Shells report this status for a process that was ended by a signal.
            status = 128 + stopped.number
        print(page(settings.folder, list(PARTS)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
