"""Published MLPerf BERT results of rounds v2.0 to v3.1, and the place of an unverified time among them.

`published_results.csv` was computed from the logs that MLCommons publishes (github.com/mlcommons/training_results_v2.0 to
training_results_v3.1). It has every distinct entry with the mean minutes of its runs without the fastest and the slowest. A
failed run counts as the slowest. Only results with the same accelerator and the same number of accelerators are compared.
"""

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from compliance.log.accelerator import family, form

TABLE = Path(__file__).with_name("published_results.csv")
SOURCE = "closed logs of MLPerf Training v2.0 to v3.1 (github.com/mlcommons/training_results_v2.0 to v3.1)"

NEIGHBOURS = 3  # faster and slower results that are shown


@dataclass(frozen=True)
class Published:
    """A published closed result. `accelerators` counts the whole system; `rate` is sequences per second per accelerator."""

    round: str
    submitter: str
    system: str
    accelerator: str
    accelerators: int
    minutes: float
    global_batch_size: int
    rate: float | None


@dataclass(frozen=True)
class PublishedPlace:
    """Place of a time among published results.

    Attributes:
        sentence: the place in words, or why there is none.
        faster, slower: neighbouring results, fastest first.
        compared, ahead: number of comparable published results, and number of faster ones.
    """

    sentence: str
    faster: tuple[Published, ...] = ()
    slower: tuple[Published, ...] = ()
    compared: int = 0
    ahead: int = 0


@lru_cache
def published() -> tuple[Published, ...]:
    """Return all closed results of the table, fastest first."""
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
    """Find the place of a closed result of `minutes` on `accelerators` accelerators among published results."""
    if accelerators < 1:
        return PublishedPlace("The system has no accelerator: nothing published to compare with.")
    model, own = family(accelerator), _slot(accelerator)
    # A name without a form factor is compared with all form factors.
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
        scales = ", ".join(map(str, sorted({result.accelerators for result in alike})))
        return PublishedPlace(
            f"No published result was trained on {accelerators} {kind}, only on {scales}. "
            "Times at different scales do not compare, so no place is given."
        )
    faster = [result for result in same if result.minutes < minutes]
    slower = same[len(faster) :]  # the list is sorted, so these are the slower results
    between = [
        f"the {each.minutes:.2f} min of {each.submitter} {each.system} ({each.round})"
        for each in (*faster[-1:], *slower[:1])
    ]
    place = (
        f"between {' and '.join(between)}" if len(between) == 2 else f"{'after' if faster else 'before'} {between[0]}"
    )
    sentence = (
        f"On {accelerators} {kind}, {minutes:.2f} min would stand {place}. Of {len(same)} published with "
        f"the same accelerator and scale, {len(faster)} {'is' if len(faster) == 1 else 'are'} faster."
    )
    return PublishedPlace(sentence, tuple(faster[-NEIGHBOURS:]), tuple(slower[:NEIGHBOURS]), len(same), len(faster))


def _slot(accelerator: str) -> str | None:
    # An H100 NVL is a PCIe card.
    return "PCIe" if form(accelerator) == "NVL" else form(accelerator)
