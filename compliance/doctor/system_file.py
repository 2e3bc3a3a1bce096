"""The system description as a file: written, changed without losing what people wrote, and compared with this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from compliance.artefact import write_whole
from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.host import ExaminedHost
from compliance.doctor.layout import RunLayout
from compliance.doctor.machine import Machine, read_machine
from compliance.doctor.system import check_values, complete, measure
from compliance.log.rules import DIVISIONS, NEWEST_RULESET, SYSTEM_FIELDS
from compliance.submission.agreement import ESSENTIAL, same_model, same_number, same_release, same_size
from compliance.submission.description import description_findings, read_description

_COMPARED = {
    "accelerators_per_node": same_number,
    "accelerator_model_name": same_model,
    "accelerator_memory_capacity": same_size,
    "host_processors_per_node": same_number,
    "host_processor_model_name": same_model,
    "host_processor_core_count": same_number,
    "host_memory_capacity": same_size,
    "framework": same_release,
    "operating_system": same_release,
}
"""How fields are compared: people word them in their own way, so only the essence counts."""


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a description as JSON; the file appears whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    write_whole(path, json.dumps(dict(fields), indent=2, ensure_ascii=False) + "\n")


def renew(
    path: Path,
    given: Mapping[str, str],
    *,
    measure_again: bool = False,
    host: ExaminedHost | None = None,
    machine: Machine | None = None,
) -> None:
    """Write the description of this machine to `path`, or change the given fields of an existing description.

    Args:
        given: fields that take precedence over the file and the machine.
        measure_again: also replace the fields that this machine tells, in an existing description.
        host, machine: what to describe; by default the machine that this program runs on.

    Raises:
        ValueError: the file is no system description, or cannot be written; an unknown field or value; nothing to change.
    """
    before = _read(path)
    if before and not measure_again:
        if not given:
            raise ValueError(
                f"{path} exists: --set KEY=VALUE changes its fields, --measure measures this machine again"
            )
        check_values(given)
        write(path, before | dict(given))
        return
    host = host or ExaminedHost()
    measured = {name: value for name, value in measure(host, machine or read_machine(host)).items() if value}
    # A field that the machine tells may have changed since the file was written. Numbers become text.
    kept = {
        name: str(value) for name, value in before.items() if name in SYSTEM_FIELDS and name not in measured and value
    }
    fields = complete(measured, {"system_name": path.stem} | kept | dict(given))
    write(path, fields | {name: value for name, value in before.items() if name not in fields})


def _read(path: Path) -> dict[str, Any]:
    """Return the fields of an existing description; empty if there is no file."""
    if not os.path.lexists(path):
        return {}
    description = read_description(path)
    known = [name for name in description.fields if name in SYSTEM_FIELDS]
    # A file of something else may have a field "status" too.
    if description.fault or len(known) < max(1, len(description.fields) / 2):
        fault = description.fault or f"{len(known)} of its {len(description.fields)} names are fields of a description"
        raise ValueError(f"{path} is no system description: {fault}; choose another --out, or move the file away")
    return description.fields


def compare(path: Path, layout: RunLayout, host: ExaminedHost, machine: Machine) -> Iterator[Diagnosis]:
    """Report what a description lacks, and where it differs from this machine or from the run."""
    subject = "system file"
    if not path.is_file():
        remedy = f"python -m compliance system --out {quote(str(path))} --set submitter=NAME, then look at it"
        yield warn(subject, f"{path}: no such file; the first run writes it", remedy)
        return
    description = read_description(path)
    fields, faults = description.fields, 0
    for finding in description_findings(description, NEWEST_RULESET):
        found = f"{finding.key}: {finding.sentence}" if finding.key else finding.sentence
        yield fail_or_warn(subject, finding.severity == "error", found, finding.remedy)
        faults += 1
    division = layout.setting("log", "division")
    if division and fields.get("division") in DIVISIONS and fields["division"] != division:
        found = f"division is {fields['division']!r}, but the run's division is {division!r}"
        yield fail(subject, found, "correct it, or set log.division")
        faults += 1
    if layout.recipe and fields.get("number_of_nodes", "1") not in ("", str(layout.nodes)):
        found = f"number_of_nodes is {fields['number_of_nodes']!r}, but the run takes {layout.nodes}"
        yield warn(subject, found, "correct it, or give --nodes")
        faults += 1
    measured = measure(host, machine)
    for name, agree in _COMPARED.items():
        # A field that is empty, or that the machine does not tell, contradicts nothing.
        written, here = str(fields.get(name, "")), measured.get(name, "")
        if written and here and not agree(written, here):
            found = f"{name} is {written!r}, but here it is {here!r}"
            yield fail_or_warn(subject, name in ESSENTIAL, found, "describe the machines that the run takes")
            faults += 1
    if not faults:
        yield ok(subject, f"{path}: complete, and true of this machine")
