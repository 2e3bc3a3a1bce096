"""Measure everything that this repository measures on a GPU (docs/kernels.md).

    python benchmarks/gpu.py [--part NAME,...] [--out FOLDER] [--seconds N]

Needs torch, triton and numpy; the parts peers and end-to-end say which packages they need besides. Needs no network and no
data set: samples are random tokens with Wikipedia's lengths. Without --part, all parts but end-to-end run. Each part is a
process of its own with a share of the time: if it fails or is cut off, the other parts run, and the rows that it has
measured stay. Figures go to FOLDER/PART.json; a table of the important rows is printed last. Exit status: 0 if everything
was measured and is right, 1 if not, 2 for wrong input, 128 + n after signal n.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_parts.measuring.report import CUT_OFF, Figure, PartReport
from benchmarks.gpu_parts.measuring.table import page
from benchmarks.gpu_parts.part import LOST
from console.program import RaisingParser


@dataclass(frozen=True)
class Part:
    """Function that gets a ``Context``, and its share of the time if several parts run."""

    function: str
    # A relative share: parts that are not asked for leave theirs to the others.
    share: int


PARTS = {
    "ceilings": Part("ceilings:ceilings", 30),
    "correctness": Part("correctness:correctness", 100),
    "step": Part("step:step", 90),
    "kernels": Part("kernels:kernels", 80),
    "fp8": Part("step:fp8", 70),
    "peers": Part("peers:peers", 120),
    "memory": Part("memory:memory", 60),
    "end-to-end": Part("end_to_end:end_to_end", 450),
}
"""In the order for a first run: later parts compare with what earlier parts measure."""

ALONE = ("end-to-end",)
"""Parts that run only if they are named."""

SECONDS = 530
"""Time for all parts together: under nine minutes."""


@dataclass(frozen=True)
class Settings:
    """Options of the command: what to measure, for how long at most, and where the figures go."""

    parts: list[str]
    folder: Path
    device: str
    tiny: bool
    seconds: float


# An exception, so that the part under way is ended and the page still printed.
class StoppedError(Exception):
    """Error for a signal that asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"cut off by {signal.Signals(number).name}")
        self.number = number


def parse(arguments: Sequence[str]) -> Settings:
    """Return the settings of a command line. Raises ``ValueError`` for wrong input."""
    parser = RaisingParser(
        prog="python benchmarks/gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="all", metavar="NAME,...", help=f"all, or some of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="by default benchmarks/results/<device>")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="N", help="of all parts; by default %(default)s"
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
    import torch  # takes seconds, and nothing else here needs it

    from benchmarks.gpu_parts.measuring.timing import folder_name

    if not torch.cuda.is_available():
        raise ValueError("needs a CUDA device, and PyTorch sees none here")
    return out or Path(__file__).parent / "results" / folder_name(torch.device("cuda"))


def measure(settings: Settings) -> bool:
    """Run the parts one after another, and tell whether all ended well. Later parts get the time that a part leaves."""
    end, well = time.monotonic() + settings.seconds, True
    for at, part in enumerate(settings.parts):
        # Of the shares that are still to come, so that what a part leaves goes to the later ones.
        later = sum(PARTS[other].share for other in settings.parts[at:])
        seconds = (end - time.monotonic()) * PARTS[part].share / later
        report = run_part(part, f"benchmarks.gpu_parts.{PARTS[part].function}", settings, seconds)
        well = well and report.complete and not report.failures
    return well


def run_part(part: str, function: str, settings: Settings, seconds: float) -> PartReport:
    """Run one part in processes of its own until it has ended or its time is up, and return what it has measured.

    A process that ends in the middle of a row, as after an access out of bounds, is followed by another, which goes on
    behind that row.
    """
    path = settings.folder / f"{part}.json"
    # A file of an earlier run would pass for rows of this one.
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
        # 1 means that rows failed, which is a result; anything else is an end in the middle.
        if status in (0, 1) and report.error != CUT_OFF:
            return report
        # Ended amid a row: that one has failed, and the next process goes on behind it. Lost between two rows, the part
        # is begun once more, but not twice at the same place.
        if report.measuring:
            report.add(Figure(report.measuring, note=f"failed: the process ended with {_ending(status)}"))
        elif status != LOST or len(report.rows) == rows:
            return _end(path, f"the process ended with {_ending(status)}")
        rows = len(report.rows)


def _run(function: str, path: Path, settings: Settings, seconds: float) -> int | None:
    """Return the exit status of one process, or None if its time was up; end everything that it has started."""
    command = [sys.executable, str(Path(__file__).parent / "gpu_parts" / "part.py"), function, str(path), str(seconds)]
    command += ["--device", settings.device, *(["--tiny"] if settings.tiny else [])]
    # In a group of its own, which Ctrl-C does not reach and with which all that the part has started is ended.
    # process_group came with Python 3.11, which is the oldest that is supported.
    process = subprocess.Popen(command, process_group=0)
    try:
        return process.wait(max(0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # The whole group: a part starts compilers of its own.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end(path: Path, error: str) -> PartReport:
    """Write into a part's file why it is not complete, and what was being measured."""
    report = PartReport.load(path)
    place = f" while measuring {report.measuring}" if report.measuring else ""
    report.end(f"{error}{place}")
    return report


def _ending(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)  # the page is printed in peace
    raise StoppedError(number)


def main(arguments: Sequence[str]) -> int:
    """Measure, write and print; returns the exit status."""
    try:
        settings = parse(arguments)
        for number in _SIGNALS:
            signal.signal(number, _stop)
        try:
            status = 0 if measure(settings) else 1
        except StoppedError as stopped:
            # As a shell has it.
            status = 128 + stopped.number
        print(page(settings.folder, list(PARTS)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
