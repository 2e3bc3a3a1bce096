"""System description file: writing it, and changing it without losing fields that people edited."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compliance.artefact import write_whole
from compliance.doctor.host import ExaminedHost
from compliance.doctor.machine import read_machine
from compliance.doctor.system import check_values, complete, measure
from compliance.log.rules import SYSTEM_FIELDS
from compliance.submission.description import read_description


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a description as JSON atomically. Raises ValueError if the file cannot be written."""
    write_whole(path, json.dumps(dict(fields), indent=2, ensure_ascii=False) + "\n")


def renew(path: Path, given: Mapping[str, str], *, measure_again: bool = False) -> None:
    """Write the description of this machine to `path`, or change the given fields of an existing description.

    Args:
        given: fields that take precedence over the file and the machine.
        measure_again: also replace the fields of an existing description that this machine provides.

    Raises:
        ValueError: the file is not a system description or cannot be written, a field or value is unknown, or there is
            nothing to change.
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
    host = ExaminedHost()
    measured = {name: value for name, value in measure(host, read_machine(host)).items() if value}
    # Drop the measured fields, which may have changed since the file was written. Convert numbers to text.
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
    # Other JSON files may also have a field such as "status", so require half of the fields to be known.
    if description.fault or len(known) < max(1, len(description.fields) / 2):
        fault = description.fault or f"{len(known)} of its {len(description.fields)} names are fields of a description"
        raise ValueError(f"{path} is no system description: {fault}; choose another --out, or move the file away")
    return description.fields
