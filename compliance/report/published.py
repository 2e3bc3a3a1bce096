"""Published MLPerf BERT results of rounds v2.0 to v3.1, and where an unverified time would stand among them.

`published_results.csv` was computed from the logs that MLCommons publishes (github.com/mlcommons/training_results_v2.0 to
training_results_v3.1): every distinct entry, with the mean minutes without the fastest and the slowest run, a failed run
counted as the slowest. Only results on the same accelerator in the same number are compared.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from compliance.log.accelerator import family, form

TABLE = Path(__file__).with_name("published_results.csv")
SOURCE = "closed logs of MLPerf Training v2.0 to v3.1 (github.com/mlcommons/training_results_v2.0 to v3.1)"

NEIGHBOURS = 3
"""Results shown on either side."""


@dataclass(frozen=True)
class Published:
    """A published closed result: `accelerators` of the whole system, `rate` in sequences per second and accelerator."""

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
        sentence: the answer in words, also if there is no place.
        faster, slower: the neighbours, fastest first.
        compared, ahead: number of published results with which the time can be compared, and of faster ones.
    """

    sentence: str
    faster: tuple[Published, ...] = ()
    slower: tuple[Published, ...] = ()
    compared: int = 0
    ahead: int = 0


@lru_cache
def published() -> tuple[Published, ...]:
    """Return the closed results of the table, fastest first."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        results = [
            Published(
                row["round"],
                row["submitter"].replace("_", " "),
                row["system"],
                row["accelerator"],
                accelerators=int(row["nodes"]) * int(row["accelerators_per_node"]),
                minutes=float(row["minutes"]),
                global_batch_size=int(row["global_batch_size"]),
                rate=float(row["sequences_per_second_per_accelerator"] or 0) or None,
            )
            for row in csv.DictReader(file)
            if row["division"] == "closed"
        ]
    return tuple(sorted(results, key=lambda result: result.minutes))


def placement(minutes: float, accelerator: str, accelerators: int) -> PublishedPlace:
    """Find where a closed run set of `minutes` on `accelerators` of this name would stand among published ones."""
    if accelerators < 1:
        return PublishedPlace("The system has no accelerator: nothing published to compare with.")
    model, own = family(accelerator), _slot(accelerator)
    # If a name does not tell the form, it is compared with both forms.
    alike = [
        result
        for result in published()
        if family(result.accelerator) == model and (own is None or _slot(result.accelerator) in (None, own))
    ]
    kind = f"{model} ({own})" if model and own else model or accelerator
    if model is None or not alike:
        return PublishedPlace(f"No published result of rounds v2.0 to v3.1 was trained on {kind}.")
    same = [result for result in alike if result.accelerators == accelerators]
    if not same:
        return PublishedPlace(_scales(alike, accelerators, kind))
    faster = [result for result in same if result.minutes < minutes]
    slower = same[len(faster) :]  # sorted, so the others follow
    between = [f"the {each.minutes:.2f} min of {each.name}" for each in (*faster[-1:], *slower[:1])]
    place = (
        f"between {' and '.join(between)}" if len(between) == 2 else f"{'after' if faster else 'before'} {between[0]}"
    )
    sentence = (
        f"On {accelerators} {kind}, {minutes:.2f} min would stand {place}. Of {len(same)} published with "
        f"the same accelerator and scale, {len(faster)} {'is' if len(faster) == 1 else 'are'} faster."
    )
    return PublishedPlace(sentence, tuple(faster[-NEIGHBOURS:]), tuple(slower[:NEIGHBOURS]), len(same), len(faster))


def _slot(accelerator: str) -> str | None:
    # An H100 NVL is a card for PCIe.
    return "PCIe" if form(accelerator) == "NVL" else form(accelerator)


def _scales(alike: Sequence[Published], accelerators: int, kind: str) -> str:
    published_ones = ", ".join(map(str, sorted({result.accelerators for result in alike})))
    return (
        f"No published result was trained on {accelerators} {kind}, only on {published_ones}. "
        "Times at different scales do not compare, so no place is given."
    )
