"""Write the description of this machine to a file, and change one that is there without losing what people wrote in it.

A file that is no description belongs to somebody else and is left alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compliance.artefact import write_whole
from compliance.doctor.host import ExaminedHost
from compliance.doctor.system import check_values, complete, measure
from compliance.log.findings import shown
from compliance.log.rules import SYSTEM_FIELDS
from compliance.submission.description import read_description


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
    replace: bool = False,
    host: ExaminedHost | None = None,
) -> list[str]:
    """Write the description of this machine to `path`, or change the given fields of a description that is there.

    Args:
        given: fields that take precedence over the file and the machine.
        measure_again: also replace the fields that this machine tells, in a description that is there.
        replace: write the file anew and keep nothing of it.
        host: the machine; by default the one that this program runs on.

    Returns:
        A line for each text of the file that a measurement replaced.

    Raises:
        ValueError: the file is no system description, or cannot be written; an unknown field or value; nothing to change.
    """
    before = _read(path, replace)
    if before and not measure_again:
        if not given:
            raise ValueError(
                f"{path} is there already: --set KEY=VALUE changes fields of it, --measure measures this machine again"
            )
        check_values(given)
        write(path, before | dict(given))
        return []
    # Numbers become text, because the official tools end with a traceback on numbers.
    before = {name: str(value) if name in SYSTEM_FIELDS else value for name, value in before.items()}
    measured = {name: value for name, value in measure(host or ExaminedHost()).items() if value}
    # A field that the machine tells is never kept: it may have changed since the file was written.
    kept = {name: value for name, value in before.items() if name in SYSTEM_FIELDS and name not in measured and value}
    fields = complete(measured, {"system_name": path.stem} | kept | dict(given))
    # Fields of the submitter's own stay, behind the fields that the rules ask for.
    write(path, fields | {name: value for name, value in before.items() if name not in fields})
    return [
        f"{name} was {shown(before[name])}, measured is {shown(measured[name])}"
        for name in fields
        if before.get(name) and name in measured and name not in given and before[name] != measured[name]
    ]


def _read(path: Path, replace: bool) -> dict[str, Any]:
    """Return the fields of an existing description; empty if there is none to keep."""
    if not os.path.lexists(path):
        return {}
    # Before `replace` is looked at: a pipe, a device or a folder is never written anew.
    if not path.is_file():
        raise ValueError(f"{path}: is no regular file, expected a file such as results/systems/<system>.json")
    if replace:
        return {}
    description = read_description(path)
    fault = description.fault or _foreign(description.fields)
    if fault:
        remedy = "choose another --out, or give --replace to write it anew"
        raise ValueError(f"{path}: is no system description: {fault}; {remedy}")
    return description.fields


def _foreign(fields: Mapping[str, Any]) -> str:
    """Say why a JSON object is no description, also none that was begun by hand; "" when it is one."""
    known = [name for name in fields if name in SYSTEM_FIELDS]
    # By half of its names at least, so that a file of something else with a field "status" in it is not overwritten.
    if not known or len(known) < len(fields) / 2:
        return f"{len(known)} of its {len(fields)} names are fields of one, expected most"
    odd = [name for name in known if isinstance(fields[name], bool) or not isinstance(fields[name], str | int)]
    return f"{odd[0]} is {shown(fields[odd[0]])}, expected text" if odd else ""
