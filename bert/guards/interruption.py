"""Orderly end of a run after SIGTERM or Ctrl-C, and its exit status."""

import os
import signal
from types import FrameType


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

    Before ``defer``, and for the second and any later signal, it raises ``Interrupted`` at once.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the last signal, or None if none has arrived."""
        self._deferred = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def defer(self) -> None:
        """From now on, only record the first signal, so that the training loop can act on it."""
        self._deferred = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.number is not None
        self.number = number
        # Before training, stop at once, because there is no step after which all ranks could stop together.
        if again or not self._deferred:
            raise Interrupted(number)


def orderly_status(status: int) -> int:
    """Return ``status``, but 0 if torchrun started the process, because torchrun treats any other status as a crash."""
    # torchrun sets this variable for every process that it starts.
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else status
