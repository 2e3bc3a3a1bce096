"""Ranks that hold up the others, found from the time that each takes for its own work."""

from collections.abc import Sequence
from statistics import median

RATIO = 1.2
"""A rank is slow if it takes so many times the median."""
INTERVALS = 3
"""Before a rank is named, it is slow in so many intervals in a row."""


class Stragglers:
    """Search for stragglers among the ranks; ``hosts`` are their names by rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._in_a_row = [0] * len(hosts)
        """Intervals in which each was slow, or no longer slow if it has been named."""
        self._named = [False] * len(hosts)

    def add(self, seconds: Sequence[float]) -> list[str]:
        """Take in an interval's seconds a step, by rank; returns what to say, if anything."""
        middle = median(seconds)
        lines = []
        for rank, (host, own) in enumerate(zip(self._hosts, seconds, strict=True)):
            changed = (own > RATIO * middle) != self._named[rank]
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if changed else 0
            if self._in_a_row[rank] == INTERVALS:
                self._in_a_row[rank], self._named[rank] = 0, not self._named[rank]
                times = own / middle if middle else float("inf")
                state = "is slow" if self._named[rank] else "is no longer slow"
                spent = f"{1000 * own:.1f} ms a step of its own, {times:.2f} times the median"
                lines.append(f"rank {rank} on host {host} {state}: {spent}")
        return lines
