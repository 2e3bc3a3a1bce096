"""Hosts and shares of a run, noted in its checkpoints: what a run that goes on with others compares, and plans anew by."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bert.configuration.config import Config
from bert.parallel.launch import job
from console.files import shown
from console.text import counted

_MOST_NAMED = 8


@dataclass(frozen=True)
class World:
    """Hosts of a run, and how its global batch is shared among their ranks."""

    hosts: dict[str, int]
    """Ranks of each host, by its name."""
    accumulation: int
    """Micro-batches of a rank in a step."""
    sequences: int
    """Most sequences of a micro-batch."""
    fitting: int
    """Most sequences that a micro-batch had on the way here: they fit in the devices' memory."""
    job: str = ""
    """That the run belongs to, see ``bert.parallel.launch.job``."""

    @classmethod
    def of(cls, hosts: Sequence[str], config: Config, before: "World | None" = None) -> "World":
        """The world of a run on ``hosts``, named by rank, which goes on from one of ``before``."""
        steps, copies = config.training.gradient_accumulation_steps, len(hosts) // config.parallel.copy_ranks
        sequences = -(-config.training.global_batch_size // (copies * steps))
        fitting = max(sequences, before.fitting if before else 0)
        return cls(dict(Counter(hosts)), steps, sequences, fitting, job())

    @property
    def ranks(self) -> int:
        """Ranks on all hosts."""
        return sum(self.hosts.values())

    def require_sound(self) -> None:
        """Raise ``TypeError`` where a value is of another type, or a number beyond what a run can have."""
        counts = [*self.hosts.values(), self.accumulation, self.sequences, self.fitting]
        if not all(type(count) is int and 0 < count < 1 << 31 for count in counts):
            raise TypeError
        # Names are printed and counted, as they stand in a file that may be damaged.
        if not self.hosts or not all(isinstance(name, str) for name in (*self.hosts, self.job)):
            raise TypeError


def planned_anew(config: Config, before: World, data_size: int) -> Config:
    """The same global batch over ``data_size`` copies of the model, in as few micro-batches as have room for it.

    None gets more sequences than one has had ``before``, except where each had a single one and ranks do not divide the
    batch. Everything else that depends on the ranks (reduction, shape buckets, kernels) is chosen at every start.
    """
    batch = config.training.global_batch_size
    # By what has fitted in memory, not by what the last run had, which may have been less on more hosts.
    steps = -(-batch // (data_size * before.fitting))
    steps = max(1, min(steps, batch // data_size))  # no rank without a sequence
    if config.parallel.pipeline > 1:  # as many micro-batches as its schedule needs, in whole rounds
        steps = -(-steps // config.parallel.pipeline) * config.parallel.pipeline
    return replace(config, training=replace(config.training, gradient_accumulation_steps=steps))


def changes(before: World, now: World) -> list[str]:
    """Lines that say which hosts have gone and come, and how the global batch is shared since; [] where all is the same."""
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
