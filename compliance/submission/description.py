"""Check whether a system description is complete, and of types that the official tools survive."""

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
from compliance.log.findings import Finding, shown
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
"""Fields that the official description checker joins as text: a number there ends it with a traceback."""

# The official checker means 4.1 by its condition, which already holds from 4.0 on.
FIRST_RULESET_WITH_STATUS = "4.0.0"


@dataclass(frozen=True)
class Description:
    """A system description as read.

    Attributes:
        fields: empty when the file is no JSON object.
        lines: the line of each field, from 1.
        fault: what is wrong with the file itself, "" when nothing is.
    """

    path: Path
    fields: dict[str, Any]
    lines: dict[str, int]
    fault: str = ""

    def text(self, name: str) -> str | None:
        """The value of a field, when it is text that is not empty."""
        value = self.fields.get(name)
        return value if isinstance(value, str) and value.strip() else None


def read_description(path: Path) -> Description:
    """Read a description; what is wrong with it becomes its `fault`."""
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
    # json tells no positions, so the first line that names a field is taken for its own.
    for number, line in enumerate(content.split("\n"), start=1):
        for name in re.findall(r'"([\w-]+)"\s*:', line):
            lines.setdefault(name, number)
    return Description(path, fields, lines)


def description_findings(description: Description, ruleset: str) -> Iterator[Finding]:
    """Yield what is wrong with a description by itself."""
    remedy = "move it away, and write it again: `python -m compliance system --out FILE`"
    if description.fault:
        found = f"{description.fault}, expected a JSON object with the {len(rules.SYSTEM_FIELDS)} fields"
        yield Finding(description.lines.get(""), "", RULE, found, remedy)
        return
    fields = description.fields
    missing = [name for name in rules.SYSTEM_FIELDS if name not in fields]
    if missing:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        found = f"there is no {named}, expected all {len(rules.SYSTEM_FIELDS)} fields"
        empty = " ".join(f"{name}=" for name in missing[:5])
        remedy = (
            f"`python -m compliance system --out {quote(str(description.path))} --set {empty}`; a text may be empty"
        )
        yield Finding(None, missing[0], RULE, found, remedy)
    for name, value in fields.items():
        yield from _value_findings(name, value, description.lines.get(name))
    division, status = fields.get("division"), fields.get("status")
    if "division" in fields and division not in rules.DIVISIONS:
        found = f"value {shown(division)}, expected closed or open in lower case: in any other spelling the package "
        found += "checker leaves out seeds and reference convergence points, and reports success"
        yield Finding(description.lines.get("division"), "division", RULE, found, "write closed or open")
    # Rulesets compare by their place, as version numbers are texts.
    must = rules.RULESETS.index(ruleset) >= rules.RULESETS.index(FIRST_RULESET_WITH_STATUS)
    if must and "status" in fields and status not in rules.SYSTEM_STATUSES.values():
        found = f"value {shown(status)}, expected one of: {', '.join(rules.SYSTEM_STATUSES.values())}"
        yield Finding(description.lines.get("status"), "status", RULE, found, "write the one that is true")


def _value_findings(name: str, value: object, line: int | None) -> Iterator[Finding]:
    if name in TEXT_FIELDS and not isinstance(value, str):
        found = f"value {shown(value)}, expected text: the official tools end with a traceback on anything else"
        yield Finding(line, name, RULE, found, f'write it in quotes, such as "{name}": "8"')
    # The summarizer calls int(), which takes spaces around the digits.
    elif name in rules.SYSTEM_INTEGERS and not re.fullmatch(r"\s*\d+\s*", str(value), re.ASCII):
        found = f"value {shown(value)}, expected a whole number in quotes: the result summarizer computes with it"
        yield Finding(line, name, "result summarizer", found, f'write the number alone, such as "{name}": "8"')
    elif name in rules.SYSTEM_INTEGERS and not isinstance(value, str):
        found = f"value {shown(value)} is a number, expected text, as in all other fields"
        yield Finding(line, name, RULE, found, f'write it in quotes, such as "{name}": "8"', severity="warning")
