"""Phases of a step, and the one that a rank is in."""

import time

# In the order of a step, by which the watchdog tells who is behind.
PHASES: tuple[str, ...] = ("data_wait", "forward_backward", "reduce", "update")
"""Parts of a step."""
EXCHANGE = "exchange in "
"""What a phase's name begins with while a rank waits, in the midst of it, for those that share its stage of the model."""


class PhaseTracker:
    """Phase that a rank is in, written for a microsecond a phase and read by ``bert.parallel.watchdog`` from its thread."""

    def __init__(self) -> None:
        self.step = 0
        """The optimizer step that is being taken, from 1."""
        self.phase = "start"
        self.entered = 0
        """Phases entered so far: it changes as long as the rank gets on."""
        self.longest: dict[str, float] = {}
        """Seconds that each phase has taken at most."""
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        """Leave the phase before for this one."""
        now = time.perf_counter()
        self.longest[self.phase] = max(self.longest.get(self.phase, 0.0), now - self._since)
        # No lock with the watchdog's thread: what it reads may be a beat old, which does no harm.
        self.phase, self._since = phase, now
        self.entered += 1

    def forget(self) -> None:
        """Forget how long phases took: start-up says nothing about what follows."""
        self.longest = {}
        self._since = time.perf_counter()
