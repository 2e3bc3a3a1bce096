"""Hosts and shares of a run, noted in its checkpoints, so that a run on other hosts can rebalance the global batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from bert.configuration.config import Config
from bert.parallel.launch import job
from console.files import shown
from console.text import counted

_MOST_NAMED = 8


_Positive = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


@dataclass(frozen=True)
class World:
    """Hosts of a run, and the division of its global batch among their ranks."""

    hosts: Annotated[dict[str, _Positive], msgspec.Meta(min_length=1)]
    """Ranks of each host, by its name."""
    accumulation: _Positive
    """Micro-batches of a rank in a step."""
    sequences: _Positive
    """Most sequences of a micro-batch."""
    fitting: _Positive
    """Most sequences that a micro-batch has had so far, which therefore fit in the devices' memory."""
    job: str = ""
    """The job that the run belongs to, see ``bert.parallel.launch.job``."""

    @classmethod
    def of(cls, hosts: Sequence[str], config: Config, before: "World | None" = None) -> "World":
        """Return the world of a run on ``hosts``, named by rank, that continues a run of ``before``."""
        steps, copies = config.training.gradient_accumulation_steps, len(hosts) // config.parallel.copy_ranks
        sequences = -(-config.training.global_batch_size // (copies * steps))
        fitting = max(sequences, before.fitting if before else 0)
        return cls(dict(Counter(hosts)), steps, sequences, fitting, job())

    @property
    def ranks(self) -> int:
        """Ranks on all hosts."""
        return sum(self.hosts.values())


def rebalance_batch(config: Config, before: World, data_size: int) -> Config:
    """Share the global batch among ``data_size`` copies of the model, in as few micro-batches as fit in memory.

    No micro-batch gets more sequences than one has had ``before``, unless each had a single one and the ranks do not divide
    the batch. Reduction, shape buckets and kernels are chosen at every start anyway.
    """
    batch = config.training.global_batch_size
    # By the largest that fitted, not by the last run's, which may have been smaller on more hosts.
    steps = -(-batch // (data_size * before.fitting))
    steps = max(1, min(steps, batch // data_size))  # no rank without a sequence
    if config.parallel.pipeline > 1:  # as many micro-batches as its schedule needs, in whole rounds
        steps = -(-steps // config.parallel.pipeline) * config.parallel.pipeline
    return replace(config, training=replace(config.training, gradient_accumulation_steps=steps))


def changes(before: World, now: World) -> list[str]:
    """Describe lost and gained hosts and the new shares of the global batch, in lines; [] if nothing has changed."""
    # Counters, so that a host which came back with other ranks counts by the difference.
    gone, come = Counter(before.hosts), Counter(now.hosts)
    lines = [f"{what}: {_named(hosts)}" for what, hosts in (("lost", gone - come), ("gained", come - gone)) if hosts]
    shares = [
        f"{counted(world.ranks, 'rank')} on {counted(len(world.hosts), 'host')}, a step of each with at most "
        f"{world.accumulation} x {counted(world.sequences, 'sequence')}"
        for world in (before, now)
    ]
    if lines or shares[0] != shares[1]:
        lines.append(f"shares of the global batch: {shares[1]}; before {shares[0]}")
    return lines


def _named(hosts: Mapping[str, int]) -> str:
    names = [f"host {shown(name)} ({counted(ranks, 'rank')})" for name, ranks in sorted(hosts.items())]
    return ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )
