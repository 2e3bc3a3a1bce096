"""Compare a system description with the machine, and with the logs of its runs.

People word descriptions in their own way. Two texts agree if they share what identifies the thing: the model number of a
processor, the first number of a release.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from compliance.log import rules
from compliance.log.findings import Finding, Severity, shown
from compliance.log.run import LoggedRun
from compliance.submission.description import Description

RULE = "SR System description"

ESSENTIAL = ("accelerators_per_node", "accelerator_model_name")
"""Fields that must agree, or the description is of another system."""

_HEADS = ("accelerator", "cpu", "torch", "processes")
_NONE = ("", "none", "n/a", "-")


def against_logs(description: Description, runs: Sequence[LoggedRun]) -> Iterator[Finding]:
    """Yield the fields for which most logs say something else, in their records or in their heads."""
    for name, key, agree, severity in _RECORDS:
        described, said = description.text(name), _usual([run.value(key) for run in runs])
        # A field that is absent, or that no log names, has been reported or may be absent.
        if described is None or said is None or agree(described, said):
            continue
        # A value that no rule allows has been reported, here or in the log.
        if name == "division" and not {described, said} <= {*rules.DIVISIONS}:
            continue
        if name == "status" and (said not in rules.SYSTEM_STATUSES or described not in rules.SYSTEM_STATUSES.values()):
            continue
        rule = f"{RULE}; TR 4" if name == "division" else RULE
        remedy = f"correct {name}, or the setting that is logged as {key}"
        found = f"value {shown(described)}, expected what the logs say, {key} {shown(said)}"
        yield Finding(description.lines.get(name), name, rule, found, remedy, severity=severity)
    # The heads of this repository's logs name hardware and software.
    head = {key: _usual([run.header.get(key) for run in runs]) or "" for key in _HEADS}
    has_accelerators = head["accelerator"].lower() not in _NONE
    # Each rank has an accelerator of its own; ranks on processors may be any number.
    ranks = head["processes"].partition(" ")[0] if has_accelerators else ""
    model, torch = head["cpu"].rpartition(", ")[0], f"PyTorch {head['torch']}" if head["torch"] else ""
    compared = [
        (
            "accelerator_model_name",
            description.text("accelerator_model_name") or "none",
            head["accelerator"],
            same_device,
        ),
        ("accelerators_per_node", _accelerators(description), ranks, same_number),
        ("host_processor_model_name", description.text("host_processor_model_name") or "", model, same_model),
        ("framework", description.text("framework") or "", torch, same_release),
    ]
    for name, described, logged, agree in compared:
        if described and logged and not agree(described, logged):
            what = "number_of_nodes x accelerators_per_node" if name == "accelerators_per_node" else "value"
            found = f"{what} {shown(described)}, expected what the heads of the logs say, {shown(logged)}"
            severity: Severity = "error" if name in ESSENTIAL else "warning"
            remedy = f"`python -m compliance system --out FILE --set {name}=...`, or take the logs of this system"
            yield Finding(description.lines.get(name), name, RULE, found, remedy, severity=severity)


def _accelerators(description: Description) -> str:
    counts = [str(description.fields.get(name, "")) for name in ("number_of_nodes", "accelerators_per_node")]
    # The bound keeps a text of any length from being computed with.
    if not all(count.isascii() and count.isdigit() and len(count) < 7 for count in counts):
        return ""
    return str(int(counts[0]) * int(counts[1]))


def _usual(values: Sequence[object]) -> str | None:
    counts = Counter(value for value in values if isinstance(value, str) and value.strip())
    return counts.most_common(1)[0][0] if counts else None


def _alike(described: str, said: str) -> bool:
    """Tell whether two names may mean the same: letters and digits of one within the other, in any case."""
    one, other = ("".join(filter(str.isalnum, name.casefold())) for name in (described, said))
    return one in other or other in one


_RECORDS: tuple[tuple[str, str, Callable[[str, str], bool], Severity], ...] = (
    ("division", "submission_division", str.__eq__, "error"),
    ("submitter", "submission_org", _alike, "warning"),
    ("system_name", "submission_platform", _alike, "warning"),
    ("status", "submission_status", lambda described, said: rules.SYSTEM_STATUSES.get(said) == described, "warning"),
)
"""Field of the description, key of the log, how to compare them, and the severity of a difference."""


def same_number(written: str, here: str) -> bool:
    """Tell whether two numbers are written alike."""
    return written.strip() == here.strip()


def same_device(written: str, here: str) -> bool:
    """Tell whether two names mean the same accelerator, or both say that there is none."""
    absent = [name.strip().lower() in _NONE for name in (written, here)]
    return all(absent) if any(absent) else same_model(written, here)


def same_model(written: str, here: str) -> bool:
    """Tell whether two names of a product share its number: "Intel Xeon 8480C" and "Intel(R) Xeon(R) Platinum 8480C"."""
    # Words with numbers in them that name no model: cores, sizes, frequencies.
    ignored = re.compile(r"\d+-core|\d+(\.\d+)?(gb|ghz)|cpu|processor|gpu")

    def words(text: str) -> set[str]:
        return {word for word in re.split(r"[^a-z0-9.]+", text.lower()) if word and not ignored.fullmatch(word)}

    numbered = {word for word in words(here) if re.search(r"\d{2,}", word)}
    if not numbered:
        return bool(words(written) & words(here)) or not words(here)
    return any(a.startswith(b) or b.startswith(a) for a in numbered for b in words(written) if re.search(r"\d{2,}", b))


def same_release(written: str, here: str) -> bool:
    """Tell whether the first number, and a word beside it, are the same: "Ubuntu 22.04" and "Ubuntu 22.04.5 LTS"."""
    numbers = [re.search(r"\d+(\.\d+)?", text) for text in (written, here)]
    same_number = not all(numbers) or numbers[0][0] == numbers[1][0]  # type: ignore[index]
    return same_number and written.split()[0].lower() == here.split()[0].lower()
