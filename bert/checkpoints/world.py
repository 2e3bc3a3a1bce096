"""Hosts and batch shares of a run. Checkpoints record them, so that a run on other hosts can rebalance the global batch."""

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
    """Hosts of a run, and how the global batch is divided among their ranks."""

    hosts: Annotated[dict[str, _Positive], msgspec.Meta(min_length=1)]
    """Number of ranks on each host, by host name."""
    accumulation: _Positive
    """Number of micro-batches per rank and step."""
    sequences: _Positive
    """Maximum number of sequences in a micro-batch."""
    fitting: _Positive
    """Largest number of sequences in a micro-batch so far, which is known to fit in the devices' memory."""
    job: str = ""
    """Job of the run, see ``bert.parallel.launch.job``."""

    @classmethod
    def of(cls, hosts: Sequence[str], config: Config, before: "World | None" = None) -> "World":
        """Return a run's world, given each rank's host name. ``before`` is the world of the run that this run continues."""
        steps, copies = config.training.gradient_accumulation_steps, len(hosts) // config.parallel.copy_ranks
        sequences = -(-config.training.global_batch_size // (copies * steps))
        fitting = max(sequences, before.fitting if before else 0)
        return cls(dict(Counter(hosts)), steps, sequences, fitting, job())


def rebalance_batch(config: Config, before: World, data_size: int) -> Config:
    """Divide the global batch among ``data_size`` copies of the model, in as few micro-batches as fit in memory.

    A micro-batch gets at most ``before.fitting`` sequences, or two if this is 1 and ``data_size`` does not divide the batch.
    Nothing else needs an adjustment: reduction, shape buckets and kernels are chosen at every start.
    """
    batch = config.training.global_batch_size
    # Use the largest micro-batch so far: the last run may have had smaller ones, because it had more hosts.
    steps = -(-batch // (data_size * before.fitting))
    steps = max(1, min(steps, batch // data_size))  # every rank needs a sequence
    if config.parallel.pipeline > 1:  # pipeline schedules need rounds of equal size
        steps = -(-steps // config.parallel.pipeline) * config.parallel.pipeline
    return replace(config, training=replace(config.training, gradient_accumulation_steps=steps))


def changes(before: World, now: World) -> list[str]:
    """Return lines that describe lost and gained hosts and the new batch shares; [] if nothing has changed."""
    # Subtracting counters also finds hosts on which only the number of ranks has changed.
    gone, come = Counter(before.hosts), Counter(now.hosts)
    lines = [f"{what}: {_named(hosts)}" for what, hosts in (("lost", gone - come), ("gained", come - gone)) if hosts]
    shares = [
        f"{counted(sum(world.hosts.values()), 'rank')} on {counted(len(world.hosts), 'host')}, a step of each with at most "
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
