"""Phases of a step, and the phase that a rank is in."""

import time

# In the order of a step, by which the watchdog finds the rank that is behind.
PHASES: tuple[str, ...] = ("data_wait", "forward_backward", "reduce", "update")
"""Parts of a step."""
EXCHANGE = "exchange in "
"""Prefix of a phase's name while a rank waits, inside the phase, for ranks that share its stage of the model."""


class PhaseTracker:
    """The phase that a rank is in, which ``bert.parallel.watchdog`` reads from its thread."""

    def __init__(self) -> None:
        self.step = 0
        """The current optimizer step, from 1."""
        self.phase = "start"
        self.entered = 0
        """Phases entered so far: it changes as long as the rank makes progress."""
        self.longest: dict[str, float] = {}
        """Longest duration of each phase in seconds."""
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        """Leave the current phase for this one."""
        now = time.perf_counter()
        self.longest[self.phase] = max(self.longest.get(self.phase, 0.0), now - self._since)
        # No lock: the watchdog's thread may read values that are one heartbeat old.
        self.phase, self._since = phase, now
        self.entered += 1

    def forget(self) -> None:
        """Forget the longest durations: start-up says nothing about the phases that follow."""
        self.longest = {}
        self._since = time.perf_counter()
