"""Published MLPerf BERT results of rounds v2.0 to v3.1, and where an unverified time would stand among them.

`published_results.csv` was computed from the logs that MLCommons publishes (github.com/mlcommons/training_results_v2.0 to
training_results_v3.1): every distinct entry, mean minutes without the fastest and the slowest run, a failed run counted as
the slowest. Only the same accelerator in the same number is compared: a place among others would say nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

TABLE = Path(__file__).with_name("published_results.csv")
SOURCE = "closed logs of MLPerf Training v2.0 to v3.1 (github.com/mlcommons/training_results_v2.0 to v3.1)"

NEIGHBOURS = 3
"""Results shown on either side."""


@dataclass(frozen=True)
class Published:
    """A published closed result: accelerators in the whole system, and sequences per second and accelerator as `rate`."""

    round: str
    submitter: str
    system: str
    accelerator: str
    accelerators: int
    minutes: float
    global_batch_size: int
    rate: float | None

    @property
    def name(self) -> str:
        """Name who published it, on what, and when."""
        return f"{self.submitter} {self.system} ({self.round})"


@dataclass(frozen=True)
class PublishedPlace:
    """The place where a time would stand.

    Attributes:
        sentence: the answer in words, also when there is none.
        faster, slower: the neighbours, fastest first.
        compared: number of published results with which the time can be compared.
        ahead: how many of them are faster.
    """

    sentence: str
    faster: tuple[Published, ...] = ()
    slower: tuple[Published, ...] = ()
    compared: int = 0
    ahead: int = 0


@lru_cache
def published() -> tuple[Published, ...]:
    """The closed results of the table, fastest first."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["division"] == "closed"]
    results = [
        Published(
            row["round"],
            row["submitter"].replace("_", " "),
            row["system"],
            row["accelerator"],
            accelerators=int(row["nodes"]) * int(row["accelerators_per_node"]),
            minutes=float(row["minutes"]),
            global_batch_size=int(row["global_batch_size"]),
            rate=float(row["sequences_per_second_per_accelerator"] or 0) or None,  # no rate where the logs told none
        )
        for row in rows
    ]
    return tuple(sorted(results, key=lambda result: result.minutes))


def family(accelerator: str) -> str | None:
    """The model in an accelerator's name: H100 of "NVIDIA H100 80GB HBM3", GAUDI 2 of "Habana Gaudi2"; None when unknown."""
    text = accelerator.upper()
    if match := re.search(r"\b(GAUDI|TPU)[ -]?V?(\d*)", text):
        return " ".join(filter(None, match.groups()))
    for word in re.findall(r"[A-Z]+\d*[A-Z]?", text):
        # Parts of a name that look like a model and are none: form, memory, generation.
        if word == "BOW" or re.fullmatch(r"(?!SXM|HBM|OAM|GEN)[A-Z]{1,3}\d{1,4}[A-Z]?", word):
            return word
    return None


def form(accelerator: str) -> str | None:
    """Tell how the accelerator is built in, "SXM" or "PCIe", if its name tells; a driver's name for SXM has HBM3 in it."""
    text = accelerator.upper()
    if "PCIE" in text or "NVL" in text:  # H100 NVL is a card for PCIe
        return "PCIe"
    return "SXM" if "SXM" in text or "HBM3" in text else None


def placement(minutes: float, accelerator: str, accelerators: int) -> PublishedPlace:
    """Find where a closed run set of `minutes` on `accelerators` of this name would stand among published ones."""
    if accelerators < 1:
        return PublishedPlace("The system has no accelerator: nothing published to compare with.")
    model = family(accelerator)
    own = form(accelerator)
    of_model = [result for result in published() if family(result.accelerator) == model]
    # Where a name does not tell the form, it is compared with both.
    alike = [result for result in of_model if own is None or form(result.accelerator) in (None, own)]
    kind = f"{model} ({own})" if model and own else model or accelerator
    if model is None or not alike:
        return PublishedPlace(f"No published result of rounds v2.0 to v3.1 was trained on {kind}.")
    same = [result for result in alike if result.accelerators == accelerators]
    if not same:
        return PublishedPlace(_nearest_scale(alike, accelerators, kind))
    faster = [result for result in same if result.minutes < minutes]
    # The results are sorted, so that those that are not faster follow them.
    slower = same[len(faster) :]
    sentence = (
        f"On {accelerators} {kind}, {minutes:.2f} min would stand {_between(faster, slower)}. Of {len(same)} published with "
        f"the same accelerator and scale, {len(faster)} {'is' if len(faster) == 1 else 'are'} faster."
    )
    return PublishedPlace(sentence, tuple(faster[-NEIGHBOURS:]), tuple(slower[:NEIGHBOURS]), len(same), len(faster))


def _between(faster: Sequence[Published], slower: Sequence[Published]) -> str:
    if not faster:
        return f"before the {slower[0].minutes:.2f} min of {slower[0].name}"
    before = f"the {faster[-1].minutes:.2f} min of {faster[-1].name}"
    if not slower:
        return f"after {before}"
    return f"between {before} and the {slower[0].minutes:.2f} min of {slower[0].name}"


def _nearest_scale(alike: Sequence[Published], accelerators: int, kind: str) -> str:
    scales = {result.accelerators for result in alike}
    # By ratio: from 8 accelerators, 4 and 16 are equally near; then the smaller one.
    nearest = min(scales, key=lambda scale: (max(scale, accelerators) / min(scale, accelerators), scale))
    times = [result.minutes for result in alike if result.accelerators == nearest]
    span = f"{times[0]:.2f}" if len(times) == 1 else f"{times[0]:.2f} to {times[-1]:.2f}"
    number = "one result" if len(times) == 1 else f"{len(times)} results"
    return (
        f"No published result was trained on {accelerators} {kind}. The nearest scale is {nearest}: {number}, {span} min. "
        "Times at different scales do not compare, so no place is given."
    )
