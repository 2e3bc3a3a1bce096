"""Orderly end of a run after SIGTERM or Ctrl-C, and its exit status."""

import os
import signal
from types import FrameType

from bert.parallel.environment import CLAIM


class Interrupted(Exception):  # noqa: N818 an event, not an error
    """A signal that ends the process at once, because it arrived before training or was not the first."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def status(self) -> int:
        return orderly_status(128 + self.number)


class Interruption:
    """Signal handler that records the first signal, so that the training loop can stop all ranks after the same step.

    Before ``defer``, and for the second and any later signal, it raises ``Interrupted`` at once. SIGUSR1 asks for the same
    stop as SIGTERM, but does not count: a launcher can send it without knowing whether the run is stopping already.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the last signal, or None if none has arrived."""
        self._counted = 0  # signals other than SIGUSR1
        self._deferred = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def defer(self) -> None:
        """From now on, only record the first signal, so that the training loop can act on it."""
        self._deferred = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_first, is_request = self.number is None, number == signal.SIGUSR1
        if is_request and not is_first:
            return
        self.number = signal.SIGTERM if is_request else number
        self._counted += not is_request
        # Before training, stop at once, because there is no step after which all ranks could stop together.
        if self._counted > 1 or (is_first and not self._deferred):
            raise Interrupted(self.number)


def orderly_status(status: int) -> int:
    """Return ``status``, or 0 if a launcher would treat it as a crash.

    That is any status under torchrun, and status 1, a missed target, under a launcher that reads the log anyway.
    """
    # torchrun sets the first variable for every process that it starts.
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ or (status == 1 and CLAIM in os.environ) else status
