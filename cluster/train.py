"""Training that looks at machines when they have changed: ``python -m cluster.train RECIPE [--section.field value ...]``.

As ``python -m bert.train`` in everything else. A run that goes on from a checkpoint on other hosts than those that wrote it
probes these first, for some seconds, and its log says what is slow.
"""

import sys
from typing import TYPE_CHECKING

from bert.train import main

if TYPE_CHECKING:
    from bert.parallel.mesh import Mesh


def look(mesh: "Mesh") -> list[str]:
    """Probe the ranks of ``mesh`` within ten seconds; returns what was found, on rank 0."""
    from cluster.probe.command import short_probe  # only where it is needed: a second of imports

    return [f"probe: {line}" for line in short_probe(mesh)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], look))
