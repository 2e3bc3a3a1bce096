"""Check whether a system description is complete, and true of the machine it is read on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shlex import quote

from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.host import ExaminedHost
from compliance.doctor.layout import RunLayout
from compliance.doctor.system import measure
from compliance.log.rules import DIVISIONS, NEWEST_RULESET
from compliance.submission.agreement import ESSENTIAL, same_model, same_number, same_release, same_size
from compliance.submission.description import Description, description_findings, read_description

WANTED = ("submitter", "framework", "operating_system", "host_networking", "cooling")
"""Fields that a reader of a submission looks for; the tools accept them empty."""


def compare(path: Path, layout: RunLayout, host: ExaminedHost) -> Iterator[Diagnosis]:
    """Report what is missing, of the wrong kind, or different here. A description that is not there yet is a warning."""
    subject = "system file"
    if not path.is_file():
        remedy = f"python -m compliance system --out {quote(str(path))} --set submitter=NAME, then look at it"
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
            text = f"{name} is {written!r}, but here it is {here!r}"
            yield fail_or_warn("system file", name in ESSENTIAL, text, "describe the machines that the run takes")


_COMPARED: dict[str, Callable[[str, str], bool]] = {
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
