"""The check of a whole data set in one pass: digests, repeats, order, and whether it is the benchmark's."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataloading.dataset import known
from dataloading.dataset.folder import Dataset
from dataloading.dataset.order import OrderCheck
from dataloading.shards.samples import Samples
from dataloading.shards.shard import ShardRecord


@dataclass(frozen=True)
class Findings:
    """Result of a check that found no error."""

    lines: tuple[str, ...]
    order: str
    """What the order of the samples says."""
    unshuffled: bool
    multiset_digest: int


def verify(
    dataset: Dataset, checksums: Path | None = None, visit: Callable[[ShardRecord], None] = lambda _: None
) -> Findings:
    """Read a data set and compare it with its digests, its length index and ``checksums`` (`known.check_published`).

    Raises:
        ValueError: a shard is damaged or missing, differs from the list, or samples are there twice.
    """
    # Digests, repeats and order come of one pass over the data.
    census, order = known.Census(dataset), OrderCheck(len(dataset))

    def examine(shard: ShardRecord, samples: Samples) -> None:
        census.add(samples)
        order.add(samples)
        visit(shard)

    dataset.verify(examine)
    published = () if checksums is None else tuple(known.check_published(dataset, checksums))
    lines = (
        *published,
        known.describe_vocabulary(dataset.info),
        known.describe_options(dataset.info),
        known.describe_samples(dataset),
        census.describe_repeats(),
    )
    return Findings(lines, *order.finding(), census.multiset_digest)
