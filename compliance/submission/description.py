"""Check whether a system description is complete, and of types that do not crash the official tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from compliance.artefact import MAX_FILE_BYTES
from compliance.log import rules
from compliance.log.findings import Finding, Severity, shown
from console.files import read_bounded

RULE = "SR System description; system_desc_checker"

TEXT_FIELDS = (
    "submitter",
    "system_name",
    "host_processor_model_name",
    "host_processor_core_count",
    "accelerator_model_name",
    "accelerators_per_node",
    "framework",
)
"""Fields that the official description checker joins as text: a number there crashes it."""

# The official checker means 4.1 by its condition, which already holds from 4.0 on.
RULESETS_WITH_STATUS = rules.RULESETS[rules.RULESETS.index("4.0.0") :]


@dataclass(frozen=True)
class Description:
    """A system description as read.

    Attributes:
        fields: empty if the file is no JSON object.
        lines: the line of each field, from 1.
        fault: fault of the file itself, "" if there is none.
    """

    path: Path
    fields: dict[str, Any]
    lines: dict[str, int]
    fault: str = ""

    def text(self, name: str) -> str | None:
        """Return the value of a field if it is text that is not empty."""
        value = self.fields.get(name)
        return value if isinstance(value, str) and value.strip() else None


def read_description(path: Path) -> Description:
    """Read a description. A file that cannot be read gives a description with a `fault`."""
    try:
        content = read_bounded(path, MAX_FILE_BYTES, "name the file results/systems/<system>.json").decode("utf-8")
        fields = json.loads(content)
    except UnicodeDecodeError:
        return Description(path, {}, {}, "the file is not UTF-8 text")
    except json.JSONDecodeError as error:
        # Under the empty name, as the line belongs to no field.
        return Description(path, {}, {"": error.lineno}, f"the file is not JSON ({error.msg})")
    except (ValueError, RecursionError) as error:
        return Description(path, {}, {}, str(error).removeprefix(f"{path}: "))
    if not isinstance(fields, dict):
        return Description(path, {}, {}, f"the file holds a JSON {type(fields).__name__}")
    lines: dict[str, int] = {}
    # json tells no positions: the first line that names a field is taken.
    for number, line in enumerate(content.split("\n"), start=1):
        for name in re.findall(r'"([\w-]+)"\s*:', line):
            lines.setdefault(name, number)
    return Description(path, fields, lines)


def description_findings(description: Description, ruleset: str) -> Iterator[Finding]:
    """Yield the faults of a description by itself."""

    def at(name: str, found: str, remedy: str, rule: str = RULE, severity: Severity = "error") -> Finding:
        return Finding(description.lines.get(name), name, rule, found, remedy, severity=severity)

    fields, all_fields = description.fields, f"{len(rules.SYSTEM_FIELDS)} fields"
    if description.fault:
        found = f"{description.fault}, expected a JSON object with the {all_fields}"
        yield at("", found, "move it away, and write it again: `python -m compliance system --out FILE`")
        return
    if missing := [name for name in rules.SYSTEM_FIELDS if name not in fields]:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        empty = " ".join(f"{name}=" for name in missing[:5])
        remedy = (
            f"`python -m compliance system --out {quote(str(description.path))} --set {empty}`; a text may be empty"
        )
        yield at(missing[0], f"there is no {named}, expected all {all_fields}", remedy)
    for name, value in fields.items():
        in_quotes = f'write it in quotes, such as "{name}": "8"'
        if name in TEXT_FIELDS and not isinstance(value, str):
            yield at(name, f"value {shown(value)}, expected text: anything else crashes the official tools", in_quotes)
        # The summarizer calls int(), which takes spaces around the digits.
        elif name in rules.SYSTEM_INTEGERS and not re.fullmatch(r"\s*\d+\s*", str(value), re.ASCII):
            found = f"value {shown(value)}, expected a whole number in quotes: the result summarizer computes with it"
            yield at(name, found, f'write the number alone, such as "{name}": "8"', "result summarizer")
        elif name in rules.SYSTEM_INTEGERS and not isinstance(value, str):
            found = f"value {shown(value)} is a number, expected text, as in all other fields"
            yield at(name, found, in_quotes, severity="warning")
    division, status = fields.get("division"), fields.get("status")
    if "division" in fields and division not in rules.DIVISIONS:
        found = f"value {shown(division)}, expected closed or open in lower case: in any other spelling the package "
        found += "checker leaves out seeds and reference convergence points, and reports success"
        yield at("division", found, "write closed or open")
    statuses = rules.SYSTEM_STATUSES.values()
    if ruleset in RULESETS_WITH_STATUS and "status" in fields and status not in statuses:
        found = f"value {shown(status)}, expected one of: {', '.join(statuses)}"
        yield at("status", found, "write the one that is true")
