"""Run all GPU measurements of this repository (docs/kernels.md).

    python benchmarks/gpu.py [--part NAME,...] [--out FOLDER] [--seconds N] [--without OP[=IMPLEMENTATION],...]
    python benchmarks/gpu.py --part end-to-end [-- SETTINGS of bert.train]

Needs torch, triton and numpy. The parts peers and end-to-end report which other packages they need. Needs no network and no
data set: samples are random tokens with Wikipedia's lengths. Without --part, all parts except end-to-end run. The part
end-to-end trains for about five minutes, or on N samples with -- --evaluation.interval-samples N. Each part runs in its own
process with a share of the time. If a part fails or is cut off, the rows that it has measured are kept and the other parts
still run. A row that takes too long is ended. --without replaces an implementation, for example a wrong one. Figures go to
FOLDER/PART.json and FOLDER/report.md; the report's first page is also printed. Exit status: 0 if everything was measured and
is correct, 1 if not, 2 for wrong input, 128 + n after signal n.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_parts.page import page
from benchmarks.gpu_parts.part import LOST
from benchmarks.gpu_parts.report import CUT_OFF, Figure, PartReport
from console.interruption import ignore_signals
from console.program import RaisingParser
from console.version import commit


class Part(NamedTuple):
    """A part's function as ``MODULE:FUNCTION``, and its ``share``. Parts get time in proportion to their shares."""

    function: str
    share: int


PARTS = {
    "correctness": Part("ops:correctness", 100),
    "step": Part("step:step", 100),
    "peers": Part("peers:peers", 120),
    "fp8": Part("step:fp8", 70),
    "kernels": Part("ops:kernels", 80),
    "memcheck": Part("memcheck:memcheck", 90),
    "memory": Part("step:memory", 60),
    "end-to-end": Part("end_to_end:end_to_end", 450),
}
"""Parts in the order in which they run. The most informative come first. Some parts use results of earlier ones."""

SECONDS = 530
"""Time limit in seconds for all parts together, a little under nine minutes."""


@dataclass(frozen=True)
class Settings:
    parts: list[str]
    folder: Path
    device: str
    tiny: bool
    seconds: float
    more: Mapping[str, object] = field(default_factory=dict)
    """Arguments that are passed on to ``part.run``."""


class StoppedError(Exception):
    """Error that the signal handler raises, so that the running part is ended and the report is still written."""

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
    other = "ops to run with another implementation; by default the next one that is installed"
    parser.add_argument("--without", action="append", default=[], metavar="OP[=IMPLEMENTATION],...", help=other)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="by default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small shapes: shows that the code runs")
    # Split at -- here, because argparse would also pass stray words before it to bert.train.
    cut = [*arguments, "--"].index("--")
    chosen, training = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    asked = [part for part in PARTS if part != "end-to-end"] if chosen.part == "all" else chosen.part.split(",")
    if unknown := [part for part in asked if part not in PARTS]:
        raise ValueError(f"--part: there is no part {unknown[0]!r}; use all, or some of {', '.join(PARTS)}")
    if not 0 < chosen.seconds < math.inf:
        raise ValueError(f"--seconds is {chosen.seconds:g}; use a finite number above 0")
    if training and "end-to-end" not in asked:
        raise ValueError("settings after -- need --part end-to-end")
    if chosen.device == "cpu" and not chosen.tiny:
        raise ValueError("--device cpu only tests the program: it needs --tiny")
    if chosen.tiny and not chosen.out:
        raise ValueError("--tiny only tests the program, so its figures have no default folder: set --out")
    if not chosen.tiny and commit() == "unknown":
        raise ValueError("figures must name the commit, which is unknown without .git: set MLPERF_BERT_COMMIT to it")
    without = replacements([text for given in chosen.without for text in given.split(",")], chosen.device)
    folder = _folder_of_the_gpu(chosen.out) if chosen.device == "cuda" else chosen.out
    more = {"without": without, "settings": training}
    return Settings(list(dict.fromkeys(asked)), folder, chosen.device, chosen.tiny, chosen.seconds, more)


def replacements(asked: Sequence[str], device: str) -> dict[str, str]:
    """Parse texts ``OP[=IMPLEMENTATION]``, and return for each op the implementation that replaces the usual one."""
    if not asked:
        return {}
    from kernels import OPS  # imported here, because importing PyTorch takes seconds

    chosen = {}
    for text in asked:
        op, _, name = text.partition("=")
        if op not in OPS:
            raise ValueError(f"--without: there is no op {op!r}; use some of {', '.join(OPS)}")
        installed = [each for each in OPS[op].orders[device] if each.requires is None or find_spec(each.requires)]
        # Implementations that no CUDA graph can capture come last, because they make all steps run without CUDA graphs.
        others = sorted(installed[1:], key=lambda each: not each.capturable)
        names = [each.name for each in (installed if name else others)]
        if not names:
            raise ValueError(f"--without {text}: no other implementation is installed; remove {op} from --without")
        if name not in (*names, ""):
            raise ValueError(f"--without {text}: {name!r} is not available; use one of {', '.join(names)}")
        chosen[op] = name or names[0]
    return chosen


def _folder_of_the_gpu(out: Path | None) -> Path:
    import torch  # imported here, so that --help and error messages need not wait for it

    if not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA device; to test the program, use --device cpu --tiny --out FOLDER")
    name = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
    return out or Path(__file__).parent / "results" / name


def measure(settings: Settings) -> bool:
    """Run the parts one after another, and return whether all succeeded."""
    end, well = time.monotonic() + settings.seconds, True
    for at, part in enumerate(settings.parts):
        # Divide the remaining time among the remaining parts, so that these also get the time that earlier parts saved.
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
    began, rows = time.monotonic(), -1
    while True:
        try:
            status, how = _run(function, path, settings, began + seconds)
        except StoppedError as stopped:
            _end(path, str(stopped), began)
            raise
        if status is None:
            return _end(path, f"cut off at its limit of {seconds:.0f} s", began)
        report = PartReport.load(path)
        # Status 1 means that rows failed, which is a result. With any other status, the process died early.
        if status in (0, 1) and report.error != CUT_OFF:
            return report
        # If the process died during a row, that row has failed, and the next process continues after it. If the device was
        # lost between two rows, restart the part, but only if it has added rows since the last restart.
        if report.measuring:
            row, report.measuring = Figure(report.measuring, note=f"failed: {how}"), None
            report.took = time.monotonic() - began
            report.add(row)
        elif status != LOST or len(report.rows) == rows:
            return _end(path, how, began)
        rows = len(report.rows)


def _run(function: str, path: Path, settings: Settings, end: float) -> tuple[int | None, str]:
    """Run one process, and then end all of its child processes.

    Returns its exit status, or None if its time was up, and a text that says how it ended.
    """
    given = {"function": function, "file": str(path), "device_type": settings.device, "tiny": settings.tiny}
    arguments = given | {"seconds": max(0.0, end - time.monotonic())} | dict(settings.more)
    command = [sys.executable, str(Path(__file__).parent / "gpu_parts" / "part.py"), json.dumps(arguments)]
    # A process group of its own shields the part from Ctrl-C, and makes it possible to end all child processes at once.
    process = subprocess.Popen(command, process_group=0)
    try:
        return _wait(process, path, end)
    finally:
        # A part also starts compilers, so end the whole group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], path: Path, end: float) -> tuple[int | None, str]:
    """Wait until a process ends, its time is up, or its row takes too long. Like ``_run``, returns a status and a text."""
    written, since, patience = None, 0.0, 0.0
    while (left := end - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(min(left, 1.0))
            return status, f"the process ended with {_ending(status)}"
        now, content = time.monotonic(), path.read_bytes() if path.exists() else b""
        if content != written:  # the part writes the file when a row begins or ends
            written, since, patience = content, now, _patience(end - now)
        elif now - since > patience and PartReport.load(path).measuring:
            return -signal.SIGKILL, f"ended after {now - since:.0f} s"
    return None, ""


def _patience(left: float) -> float:
    """Return the seconds that a row may take: half of the time ``left``, but at least 90, enough to compile a model."""
    return max(90.0, left / 2)


def _end(path: Path, error: str, began: float) -> PartReport:
    """Record in a part's file why the part is incomplete, which row was being measured, and the time since it ``began``."""
    report = PartReport.load(path)
    place = f" while measuring {report.measuring}" if report.measuring else ""
    report.took = time.monotonic() - began
    report.end(f"{error}{place}")
    return report


def _ending(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    ignore_signals()  # further signals must not interrupt writing the report
    raise StoppedError(number)


def main(arguments: Sequence[str]) -> int:
    try:
        settings = parse(arguments)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        try:
            status = 0 if measure(settings) else 1
        except StoppedError as stopped:
            # Shells report this status for a process that was ended by a signal.
            status = 128 + stopped.number
        (settings.folder / "report.md").write_text(
            f"{page(settings.folder, PARTS, every_row=True)}\n", encoding="utf-8"
        )
        print(page(settings.folder, PARTS))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
