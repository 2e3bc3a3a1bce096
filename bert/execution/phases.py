"""Phases of a step, and the phase that a rank is in."""

import time

PHASES: tuple[str, ...] = ("data_wait", "forward_backward", "reduce", "update")
"""Names of the phases in the order of a step. The watchdog uses this order to find the rank that is furthest behind."""
SITE_WAIT = "site_wait"
"""Name of the phase in which a rank waits for other sites. Only runs whose sites take steps alone have this phase."""
EXCHANGE = "exchange in "
"""Prefix of a phase's name while a rank waits for the ranks that share its stage of the model."""


class PhaseTracker:
    """Tracker of the phase that a rank is in. ``bert.parallel.watchdog`` reads it from its own thread."""

    def __init__(self) -> None:
        self.step = 0
        """Number of the current optimizer step. The first step has the number 1."""
        self.phase = "start"
        self.entered = 0
        """Number of phases entered so far. It keeps growing as long as the rank makes progress."""
        self.longest: dict[str, float] = {}
        """Longest duration of each phase in seconds."""
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        now = time.perf_counter()
        self.longest[self.phase] = max(self.longest.get(self.phase, 0.0), now - self._since)
        # No lock is needed: the watchdog tolerates values that are one heartbeat old.
        self.phase, self._since = phase, now
        self.entered += 1

    def forget(self) -> None:
        """Forget the longest durations. Call this after start-up, whose durations are not typical of training."""
        self.longest = {}
        self._since = time.perf_counter()
