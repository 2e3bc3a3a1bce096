"""Check a system description: its fields, their types, and whether they agree with the logs of the system's runs.

Submitters word descriptions freely. Two texts agree if they share the identifying part, such as the model number of a
processor or the first number of a release.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from compliance.artefact import MAX_FILE_BYTES
from compliance.log import rules
from compliance.log.findings import Finding, Severity, shown
from compliance.log.logged_run import LoggedRun
from console.files import read_bounded
from console.text import counted

RULE = "SR System description; system_desc_checker"

TEXT_FIELDS = (
    "submitter", "system_name", "host_processor_model_name", "host_processor_core_count", "accelerator_model_name",
    "accelerators_per_node", "framework",
)  # fmt: skip
"""Fields that the official description checker concatenates as text. A number in one of them crashes the checker."""

AGREEMENT = "SR System description"

_HEADER_KEYS = ("accelerator", "cpu", "torch", "processes")
_NONE = ("", "none", "n/a", "-")

# The official checker is meant to check the status from 4.1 on, but its condition is already true for 4.0.
RULESETS_WITH_STATUS = rules.RULESETS[rules.RULESETS.index("4.0.0") :]


@dataclass(frozen=True)
class Description:
    """A system description as read from its file.

    Attributes:
        fields: values by field name; empty if the file is not a JSON object.
        lines: line of each field, from 1.
        fault: fault of the file itself; "" if there is none.
    """

    path: Path
    fields: dict[str, Any]
    lines: dict[str, int]
    fault: str = ""

    def text(self, name: str) -> str | None:
        """Return the value of a field if it is non-empty text, else None."""
        value = self.fields.get(name)
        return value if isinstance(value, str) and value.strip() else None


def read_description(path: Path) -> Description:
    """Read a description. For an unreadable file, return a description with a `fault`."""
    try:
        content = read_bounded(path, MAX_FILE_BYTES, "name the file results/systems/<system>.json").decode("utf-8")
        fields = json.loads(content)
    except UnicodeDecodeError:
        return Description(path, {}, {}, "the file is not UTF-8 text")
    except json.JSONDecodeError as error:
        # Store the line under an empty name, because the fault belongs to no field.
        return Description(path, {}, {"": error.lineno}, f"the file is not JSON ({error.msg})")
    except (ValueError, RecursionError) as error:
        return Description(path, {}, {}, str(error).removeprefix(f"{path}: "))
    if not isinstance(fields, dict):
        return Description(path, {}, {}, f"the file holds a JSON {type(fields).__name__}")
    lines: dict[str, int] = {}
    # json reports no positions, so use the first line that contains the field's name.
    for number, line in enumerate(content.split("\n"), start=1):
        for name in re.findall(r'"([\w-]+)"\s*:', line):
            lines.setdefault(name, number)
    return Description(path, fields, lines)


def description_findings(description: Description, ruleset: str) -> Iterator[Finding]:
    """Yield findings about a description by itself, without the logs."""

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
        # Allow spaces around the digits, because the summarizer calls int(), which accepts them.
        elif name in rules.SYSTEM_INTEGERS and not re.fullmatch(r"\s*\d+\s*", str(value), re.ASCII):
            found = f"value {shown(value)}, expected a whole number in quotes: the result summarizer computes with it"
            yield at(name, found, f'write the number alone, such as "{name}": "8"', "result summarizer")
        elif name in rules.SYSTEM_INTEGERS and not isinstance(value, str):
            found = f"value {shown(value)} is a number, expected text, as in all other fields"
            yield at(name, found, in_quotes, severity="warning")
        elif name in rules.SYSTEM_INTEGERS:
            low, high = rules.SYSTEM_INTEGERS[name]
            # Limit the length before converting to an integer, because the text is untrusted.
            if len(value.strip()) > 9 or not low <= int(value) <= high:
                found = f"value {shown(value)}, expected {low} to {high:,}, the range of real systems"
                severity: Severity = "error" if name == "number_of_nodes" else "warning"
                yield at(name, found, "describe the system that ran", severity=severity)
    division, status = fields.get("division"), fields.get("status")
    if "division" in fields and division not in rules.DIVISIONS:
        found = f"value {shown(division)}, expected closed or open in lower case: in any other spelling the package "
        found += "checker leaves out seeds and reference convergence points, and reports success"
        yield at("division", found, "write closed or open")
    statuses = rules.SYSTEM_STATUSES.values()
    if ruleset in RULESETS_WITH_STATUS and "status" in fields and status not in statuses:
        found = f"value {shown(status)}, expected one of: {', '.join(statuses)}"
        yield at("status", found, "write the status of this system")


# Agreement with the logs


def against_logs(description: Description, runs: Sequence[LoggedRun]) -> Iterator[Finding]:
    """Yield findings for the fields that differ from the records or headers of most logs."""
    for name, key, agree, severity in _RECORDS:
        described, said = description.text(name), _most_frequent([run.value(key) for run in runs])
        # Skip a field that the description or all logs lack. It is optional, or another finding reports it.
        if described is None or said is None or agree(described, said):
            continue
        # An invalid division has been reported already, by the check of the description or of the log.
        if name == "division" and not {described, said} <= {*rules.DIVISIONS}:
            continue
        if name == "status" and (said not in rules.SYSTEM_STATUSES or described not in rules.SYSTEM_STATUSES.values()):
            continue
        rule = f"{AGREEMENT}; TR 4" if name == "division" else AGREEMENT
        found = f"value {shown(described)}, expected what the logs say, {key} {shown(said)}"
        remedy = f"correct {name}, or the setting that is logged as {key}"
        yield Finding(description.lines.get(name), name, rule, found, remedy, severity=severity)
    yield from _implausible_rate(description, runs)
    # Compare also the hardware and software that the headers of this repository's logs name.
    head = {key: _most_frequent([run.header.get(key) for run in runs]) or "" for key in _HEADER_KEYS}
    # Each rank uses one accelerator. Do not compare ranks on CPUs, where their number does not depend on the hardware.
    ranks = "" if head["accelerator"].lower() in _NONE else head["processes"].partition(" ")[0]
    model, torch = head["cpu"].rpartition(", ")[0], f"PyTorch {head['torch']}" if head["torch"] else ""
    text, count = description.text, count_accelerators(description.fields)
    for name, described, logged, agree in (
        ("accelerator_model_name", text("accelerator_model_name") or "none", head["accelerator"], _same_device),
        ("accelerators_per_node", None if count is None else str(count), ranks, str.__eq__),
        ("host_processor_model_name", text("host_processor_model_name"), model, _same_model),
        ("framework", text("framework"), torch, _same_release),
    ):
        if described and logged and not agree(described, logged):
            what = "number_of_nodes x accelerators_per_node" if name == "accelerators_per_node" else "value"
            found = f"{what} {shown(described)}, expected what the headers of the logs say, {shown(logged)}"
            remedy = f"`python -m compliance system --out FILE --set {name}=...`, or take the logs of this system"
            # Different accelerators are an error, because the description is then of another system.
            severity = "error" if name.startswith("accelerator") else "warning"
            yield Finding(description.lines.get(name), name, AGREEMENT, found, remedy, severity=severity)


def _implausible_rate(description: Description, runs: Sequence[LoggedRun]) -> Iterator[Finding]:
    """Yield a finding if the described accelerators cannot have trained as fast as the logs say."""
    count, rates = count_accelerators(description.fields), [run.sequences_per_s or 0.0 for run in runs]
    if count and rates and (rate := max(rates) / count) > rules.MAX_ACCELERATOR_RATE:
        found = (
            f"{counted(count, 'accelerator')} with {rate:,.0f} sequences a second each by the logs, expected at most "
        )
        found += f"{rules.MAX_ACCELERATOR_RATE:,.0f}: published accelerators stay below a fifth of this"
        remedy = "describe the system that ran, and check train_samples and the times in the logs"
        name = "accelerators_per_node"
        yield Finding(description.lines.get(name), name, AGREEMENT, found, remedy)


def count_accelerators(fields: Mapping[str, Any]) -> int | None:
    """Return the number of accelerators of all nodes from a description's fields; None if they do not state it."""
    counts = [str(fields.get(name, "")) for name in ("number_of_nodes", "accelerators_per_node")]
    # Limit the length before converting to an integer, because the text is untrusted.
    if not all(count.isascii() and count.isdigit() and len(count) < 7 for count in counts):
        return None
    return int(counts[0]) * int(counts[1])


def _most_frequent(values: Sequence[object]) -> str | None:
    counts = Counter(value for value in values if isinstance(value, str) and value.strip())
    return max(counts, key=lambda value: counts[value], default=None)


def _alike(described: str, said: str) -> bool:
    """Tell whether the letters and digits of one name are contained in the other, ignoring case."""
    one, other = ("".join(filter(str.isalnum, name.casefold())) for name in (described, said))
    return one in other or other in one


_RECORDS: tuple[tuple[str, str, Callable[[str, str], bool], Severity], ...] = (
    ("division", "submission_division", str.__eq__, "error"),
    ("submitter", "submission_org", _alike, "warning"),
    ("system_name", "submission_platform", _alike, "warning"),
    ("status", "submission_status", lambda described, said: rules.SYSTEM_STATUSES.get(said) == described, "warning"),
)
"""Each entry has a field, the key of the log that must agree with it, the comparison, and the severity of a difference."""


def _same_device(written: str, here: str) -> bool:
    """Tell whether two names refer to the same accelerator, or both say that there is none."""
    absent = [name.strip().lower() in _NONE for name in (written, here)]
    return all(absent) if any(absent) else _same_model(written, here)


def _same_model(written: str, here: str) -> bool:
    """Tell whether two names of a product share its number: "Intel Xeon 8480C" and "Intel(R) Xeon(R) Platinum 8480C"."""
    # Ignore words that are not model numbers: cores, sizes, frequencies.
    ignored = re.compile(r"\b(\d+-core|\d+(\.\d+)?(gb|ghz)|cpu|processor|gpu)\b")

    def words(text: str) -> set[str]:
        return {*re.findall(r"[a-z0-9.]+", ignored.sub(" ", text.lower()))}

    numbered = {word for word in words(here) if re.search(r"\d{2,}", word)}
    if not numbered:
        return bool(words(written) & words(here)) or not words(here)
    return any(a.startswith(b) or b.startswith(a) for a in numbered for b in words(written) if re.search(r"\d{2,}", b))


def _same_release(written: str, here: str) -> bool:
    """Tell whether two releases have the same first word and number: "PyTorch 2.6" and "PyTorch 2.6.0+cu126"."""
    numbers = [re.search(r"\d+(\.\d+)?", text) for text in (written, here)]
    same_number = not all(numbers) or numbers[0][0] == numbers[1][0]  # type: ignore[index]
    return same_number and written.split()[0].lower() == here.split()[0].lower()
