"""Check before a run for everything that would stop it, slow it down or make its result invalid.

Each check prints a line that begins with ok, warn or fail and says what was found and what to do. The checks change nothing:
they drop no caches and write no files. Every query of the machine has a time limit.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from compliance.doctor.diagnosis import Diagnosis
from compliance.doctor.gpus import check_gpus
from compliance.doctor.host import ExaminedHost
from compliance.doctor.intended_run import IntendedRun, check_files, check_recipe, lay_out
from compliance.doctor.machine import Machine, check_machine, read_machine
from compliance.doctor.system import ask_pytorch
from console.program import say, say_json
from console.text import visible

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def examine(
    intended: IntendedRun, host: ExaminedHost | None = None, machine: Machine | None = None
) -> Iterator[Diagnosis]:
    """Run all checks, beginning with the quick ones. By default, they check the machine that this program runs on.

    Raises ``ValueError`` as `compliance.doctor.intended_run.lay_out` does.
    """
    host = host or ExaminedHost()
    machine = machine or read_machine(host)
    run = lay_out(intended, host, len(machine.gpus.gpus))
    # Importing PyTorch is slow, so ask it only for a run on GPUs, whose checks need the answer.
    pytorch = ask_pytorch(host) if run.on_gpus else {}
    yield check_recipe(run)
    yield from check_gpus(run, machine.gpus, pytorch)
    yield from check_machine(machine, run)
    yield from check_files(run, host)


def print_diagnoses(diagnoses: Iterable[Diagnosis], as_json: bool) -> int:
    """Print each diagnosis as soon as it is known, or all as one JSON list. Return 1 if any check failed, else 0."""
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
