"""Check before a run for everything that would stop it, slow it down or make its result invalid.

Each check prints a line: ok, warn or fail, what was found, and what to do. The checks change nothing: they drop no caches
and write no files. Every query of the machine has a time limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from compliance.doctor import machine_checks, run_checks
from compliance.doctor.accelerators import accelerators
from compliance.doctor.diagnosis import Diagnosis
from compliance.doctor.host import ExaminedHost
from compliance.doctor.layout import IntendedRun, layout_of
from compliance.doctor.machine import Machine, read_machine
from compliance.doctor.run_checks import ExaminedRun
from compliance.doctor.storage import Mount, read_mounts
from compliance.doctor.system import ask_pytorch
from console.program import say, say_json
from console.text import visible
from console.version import commit

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def examine(
    intended: IntendedRun,
    host: ExaminedHost | None = None,
    machine: Machine | None = None,
    mounts: Sequence[Mount] | None = None,
) -> Iterator[Diagnosis]:
    """Run all checks, the quick ones first, by default on the machine that this program runs on.

    Raises:
        ValueError: the recipe is unknown, the number of nodes is below 1, or a given file or folder does not exist.
    """
    host = host or ExaminedHost()
    for path in (intended.data, intended.checkpoint):
        if path is not None and not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    if intended.checkpoint and not intended.recipe:
        raise ValueError("--checkpoint needs --recipe: the trainer checks that the weights fit its model")
    machine = machine or read_machine(host)
    layout = layout_of(intended, host, len(machine.gpus.gpus))
    # Importing PyTorch is slow, and only GPU runs need the answer.
    pytorch = ask_pytorch(host) if layout.on_gpus else {}
    run = ExaminedRun(intended, layout, host, read_mounts() if mounts is None else mounts)
    yield from run_checks.check_recipe(run)
    # Allow a day, because a file server sets the time of a file, and its clock may be ahead.
    yield from machine_checks.clock(machine, layout, Path(__file__).stat().st_mtime - 24 * 3600)
    yield from accelerators(layout, machine.gpus, pytorch)
    yield from machine_checks.memory(machine, layout)
    yield from machine_checks.processors(machine, layout)
    yield from machine_checks.network(machine, layout)
    for check in (run_checks.check_caches, run_checks.check_storage, run_checks.check_results):
        yield from check(run)
    yield from run_checks.check_source(commit())
    yield from run_checks.check_dry_run(run)
    yield from run_checks.check_data(run)


def print_diagnoses(diagnoses: Iterable[Diagnosis], as_json: bool) -> int:
    """Print each diagnosis as soon as it is known, or all as one JSON list. Return the exit status, 1 if any failed."""
    console = Console(highlight=False, soft_wrap=True)
    found: list[Diagnosis] = []
    for diagnosis in diagnoses:
        found.append(diagnosis)
        if not as_json:
            console.print(_lines(diagnosis))
    counts = Counter(diagnosis.state for diagnosis in found)
    if as_json:
        say_json([diagnosis._asdict() for diagnosis in found])
    else:
        say(f"{counts['fail']} fail, {counts['warn']} warn, {counts['ok']} ok")
    return 1 if counts["fail"] else 0


def _lines(diagnosis: Diagnosis) -> Text:
    shown = Text(no_wrap=True)
    shown.append(f"{diagnosis.state:<5}", style=_COLOURS[diagnosis.state])
    shown.append(f"{diagnosis.subject:<15} ", style="bold").append(visible(diagnosis.found))
    if diagnosis.remedy:
        shown.append(f"\n{'':20} -> {visible(diagnosis.remedy)}")
    return shown
