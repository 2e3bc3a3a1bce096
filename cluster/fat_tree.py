"""Simulation of all-reduce on a fat tree of three levels, to compare orders of hosts without having the hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.placement import Path


@dataclass(frozen=True)
class FatTree:
    """Leaves of hosts, pods of leaves, and cores above the pods; each of ``rails`` network cards of a host has a tree alike.

    Attributes:
        oversubscription: how many times as much the hosts below a leaf, or a pod, can send as its uplinks carry.
    """

    pods: int
    leaves_per_pod: int
    hosts_per_leaf: int
    rails: int = 8
    oversubscription: float = 1.0

    def paths(self) -> list[Path]:
        """Return the switches above each host, pod by pod."""
        return [
            (f"pod {pod}", f"leaf {pod}.{leaf}")
            for pod in range(self.pods)
            for leaf in range(self.leaves_per_pod)
            for _ in range(self.hosts_per_leaf)
        ]

    def ring_slowdown(self, order: Sequence[Path]) -> float:
        """Return how many times as long a ring all-reduce along the rails takes as where every host is under one leaf.

        Every host sends to the next, on all rails alike, as fast as the fullest uplink lets it. Flows share an uplink
        evenly; that they meet on single cables, as hashing has it, is left out.
        """
        # Uplinks carry both ways at once: load up and load down are counted apart.
        up: Counter[Path] = Counter()
        down: Counter[Path] = Counter()
        for place, one in enumerate(order):
            # The ring closes: the last host sends to the first.
            other = order[(place + 1) % len(order)]
            for level in (1, 2):  # uplinks of the pod, and of the leaf
                if one[:level] != other[:level]:
                    up[one[:level]] += 1
                    down[other[:level]] += 1
        # As many flows as hosts below fit through uplinks that are not oversubscribed.
        below = {1: self.leaves_per_pod * self.hosts_per_leaf, 2: self.hosts_per_leaf}
        capacity = {level: hosts / self.oversubscription for level, hosts in below.items()}
        # At least 1: where no uplink is full, the hosts' own cards are the limit.
        return max([1.0, *(load / capacity[len(switch)] for flows in (up, down) for switch, load in flows.items())])
