"""Check whether a system description is complete, and true of the machine it is read on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.host import ExaminedHost
from compliance.doctor.layout import RunLayout
from compliance.doctor.system import measure
from compliance.log.rules import DIVISIONS, NEWEST_RULESET
from compliance.submission.description import Description, description_findings, read_description

WANTED = ("submitter", "framework", "operating_system", "host_networking", "cooling")
"""Fields that a reader of a submission looks for; the tools accept them empty."""

_MEMORY_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


def compare(path: Path, layout: RunLayout, host: ExaminedHost) -> Iterator[Diagnosis]:
    """Report what is missing, of the wrong kind, or different here. A description that is not there yet is a warning."""
    subject = "system file"
    if not path.is_file():
        remedy = f"python -m compliance system --out {path} --set submitter=NAME, then look at it"
        yield warn(subject, f"{path}: not there; the first run writes one", remedy)
        return
    description = read_description(path)
    fields = description.fields
    faults = list(_faults(description, layout))
    yield from faults
    if not any(fault.state == "fail" for fault in faults):
        different = list(_differences(fields, measure(host), layout))
        yield from different
        if not faults and not different:
            yield ok(subject, f"{path}: complete, and true of this machine")


def _faults(description: Description, layout: RunLayout) -> Iterator[Diagnosis]:
    fields = description.fields
    for finding in description_findings(description, NEWEST_RULESET):
        found = f"{finding.key}: {finding.sentence}" if finding.key else finding.sentence
        yield fail_or_warn("system file", finding.severity == "error", found, finding.remedy)
    division = layout.setting("log", "division")
    if division and fields.get("division") in DIVISIONS and fields["division"] != division:
        found = f"division is {fields['division']!r}, but the run's is {division!r}"
        yield fail("system file", found, "correct it, or set log.division")
    # Fields that are absent have been reported.
    empty = [name for name in WANTED if fields.get(name) == ""]
    if empty and layout.is_closed:
        yield warn("system file", f"empty: {', '.join(empty)}", "fill them in before you submit")


def _differences(fields: Mapping[str, object], found: Mapping[str, str], layout: RunLayout) -> Iterator[Diagnosis]:
    """Fields that say something else than this machine; people word them in their own way, so only the essence counts."""
    if layout.recipe and str(fields.get("number_of_nodes")) != str(layout.nodes):
        text = f"number_of_nodes is {fields.get('number_of_nodes')!r}, but the run takes {layout.nodes}"
        yield warn("system file", text, "correct it, or give --nodes")
    for name, same in _COMPARED.items():
        # What cannot be found out here, or was left empty, contradicts nothing.
        written, here = str(fields.get(name, "")), found.get(name, "")
        if written and here and not same(written, here):
            # Other GPUs make it the description of another system; the rest people word in their own ways.
            is_essential = name in ("accelerators_per_node", "accelerator_model_name")
            text = f"{name} is {written!r}, but here it is {here!r}"
            yield fail_or_warn("system file", is_essential, text, "describe the machines that the run takes")


def _same_number(written: str, here: str) -> bool:
    return written.strip() == here.strip()


def _same_model(written: str, here: str) -> bool:
    """Tell whether two names of a product share its number: "Intel Xeon 8480C" and "Intel(R) Xeon(R) Platinum 8480C"."""
    # Words with numbers in them that are no model: cores, sizes, frequencies.
    ignored = re.compile(r"\d+-core|\d+(\.\d+)?(gb|ghz)|cpu|processor|gpu")

    def words(text: str) -> set[str]:
        return {word for word in re.split(r"[^a-z0-9.]+", text.lower()) if word and not ignored.fullmatch(word)}

    numbered = {word for word in words(here) if re.search(r"\d{2,}", word)}
    if not numbered:
        return bool(words(written) & words(here)) or not words(here)
    return any(a.startswith(b) or b.startswith(a) for a in numbered for b in words(written) if re.search(r"\d{2,}", b))


def _same_size(written: str, here: str) -> bool:
    """Tell whether two sizes of memory are the same within 10 %: part of it is never free to use."""
    sizes = [_size(written), _size(here)]
    if None in sizes:
        return True  # what cannot be read is no difference
    first, second = (float(size or 0) for size in sizes)
    return abs(first - second) <= 0.1 * max(first, second)


def _size(text: str) -> float | None:
    match = re.search(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)\b", text.lower())
    return float(match[1]) * _MEMORY_UNITS[match[2]] if match else None


def _same_release(written: str, here: str) -> bool:
    """Tell whether the first number, and a word beside it, are the same: "Ubuntu 22.04" and "Ubuntu 22.04.5 LTS"."""
    numbers = [re.search(r"\d+(\.\d+)?", text) for text in (written, here)]
    same_number = not all(numbers) or numbers[0][0] == numbers[1][0]  # type: ignore[index]
    return same_number and written.split()[0].lower() == here.split()[0].lower()


_COMPARED: dict[str, Callable[[str, str], bool]] = {
    "accelerators_per_node": _same_number,
    "accelerator_model_name": _same_model,
    "accelerator_memory_capacity": _same_size,
    "host_processors_per_node": _same_number,
    "host_processor_model_name": _same_model,
    "host_processor_core_count": _same_number,
    "host_memory_capacity": _same_size,
    "framework": _same_release,
    "operating_system": _same_release,
}
