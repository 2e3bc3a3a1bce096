"""Training that looks at machines when they have changed: ``python -m cluster.train RECIPE [--section.field value ...]``.

As ``python -m bert.train`` in everything else. A run that goes on from a checkpoint on other hosts than those that wrote it
probes these first, for some seconds, and its log says what is slow. A dry run on GPUs, or of shared copies, says what memory
and a step are expected to take.
"""

import sys
from typing import TYPE_CHECKING

from bert.train import main

if TYPE_CHECKING:
    from bert.configuration.config import Config
    from bert.parallel.mesh import Mesh


def look(mesh: "Mesh") -> list[str]:
    """Probe the ranks of ``mesh`` within ten seconds; returns what was found, on rank 0."""
    from cluster.probe.command import short_probe  # only where it is needed: a second of imports

    return [f"probe: {line}" for line in short_probe(mesh)]


def forecast(config: "Config", world_size: int, local_size: int) -> list[str]:
    """Say what memory a rank is expected to take, and how long a step, but of a small model on processors."""
    if config.training.device == "cpu" and config.parallel.copy_ranks == 1:
        return []
    from cluster.plan.forecast import forecast  # a second of imports, too

    return list(forecast(config, world_size, local_size))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], look, forecast))
