"""Everything that is measured on a GPU, in one command.

    python benchmarks/gpu.py [--part NAME] [--out FOLDER]

Without a part, all of them but end-to-end, each in a process of its own, so that one that fails leaves the others. No
network is used and no data set needed: samples are random tokens of Wikipedia's lengths. Every part writes a JSON file to
the folder, by default ``benchmarks/results/<device>``; the table comes last. ``--device cpu --tiny`` runs the same code on
small shapes, to test it; the figures mean nothing.
"""

import importlib
import json
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_scale import FULL, TINY, Context
from benchmarks.gpu_timing import Report, first_line, folder_name
from kernels.precision import set_product_precision

PARTS: dict[str, tuple[str, int]] = {
    "ceilings": ("gpu_ceilings", 35),
    "correctness": ("gpu_kernels", 85),
    "step": ("gpu_step", 80),
    "peers": ("gpu_peers", 160),
    "kernels": ("gpu_kernels", 75),
    "fp8": ("gpu_step", 60),
    "memory": ("gpu_step", 35),
}
"""Module with a function of the part's name, and the seconds after which the part is cut short: 530 in all."""

ALONE = {"end-to-end": "gpu_end_to_end"}
"""Parts that run only when they are asked for, by themselves."""


@dataclass(frozen=True)
class Settings:
    """What to measure, and where the figures go."""

    part: Literal["all", "ceilings", "correctness", "step", "peers", "kernels", "fp8", "memory", "end-to-end"] = "all"
    """All but end-to-end, or one of them."""
    out: Path | None = None
    """Folder for the JSON files; by default benchmarks/results/<device>."""
    device: Literal["cuda", "cpu"] = "cuda"
    tiny: bool = False
    """Small shapes: shows that the code runs."""

    def check(self) -> None:
        """ValueError where nothing can be measured so."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("needs a CUDA device, and PyTorch sees none here")
        if self.device == "cpu" and not (self.tiny and self.out):
            raise ValueError("--device cpu only tests the program: it needs --tiny, and a folder by --out")

    @property
    def folder(self) -> Path:
        """Where the figures go."""
        return self.out or Path(__file__).parent / "results" / folder_name(torch.device(self.device))


def run_part(settings: Settings) -> int:
    """Run one part in this process; 1 when it failed."""
    set_product_precision()
    device = torch.device(settings.device)
    report = Report(settings.folder / f"{settings.part}.json", settings.part, device)
    report.write()
    try:
        module = ALONE.get(settings.part) or PARTS[settings.part][0]
        measure = getattr(importlib.import_module(f"benchmarks.{module}"), settings.part.replace("-", "_"))
        measure(Context(device, TINY if settings.tiny else FULL, report))
        report.complete = True
    except Exception as error:  # the file says why it is not complete
        traceback.print_exc()
        report.error = first_line(error)
    report.write()
    return 0 if report.complete else 1


def run_all(settings: Settings) -> int:
    """Run every part in a process of its own, one after another; 1 when any failed."""
    failed = 0
    for part, (_, seconds) in PARTS.items():
        (settings.folder / f"{part}.json").unlink(missing_ok=True)
        command = [sys.executable, __file__, "--part", part, "--device", settings.device, "--out", str(settings.folder)]
        try:
            subprocess.run(
                [*command, "--tiny"] if settings.tiny else command,
                timeout=seconds,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        except subprocess.SubprocessError as error:
            failed += 1
            print(f"{part}: {first_line(error)}", file=sys.stderr)
    return 1 if failed else 0


def print_table(settings: Settings) -> None:
    """The rows of every part that has a file."""
    table = Table("part", "what", "ms", "figure", "", "of ceiling", "note", title=str(settings.folder.name))
    for part in PARTS if settings.part == "all" else [settings.part]:
        path = settings.folder / f"{part}.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
        for row in found["rows"]:
            cells = (_number(row["milliseconds"]), _number(row["figure"]), row["unit"], _percent(row["share"]))
            table.add_row(part, row["name"], *cells, row["note"])
        if not found.get("complete"):
            table.add_row(part, "not complete", "", "", "", "", note_of(found), style="bold red")
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def note_of(found: dict[str, Any]) -> str:
    """Why a part is not complete."""
    return found.get("error") or "cut short or never started"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def main(arguments: Sequence[str]) -> int:
    """Measure, write and print; returns the exit status."""
    try:
        settings = tyro.cli(Settings, args=arguments, description=__doc__)
        settings.check()
        status = run_all(settings) if settings.part == "all" else run_part(settings)
        print_table(settings)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
