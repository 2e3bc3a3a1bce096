"""SIGTERM and Ctrl-C as an orderly end, and the exit status of an orderly end."""

import os
import signal
from types import FrameType


class Interrupted(Exception):  # noqa: N818 an event, not an error
    """A signal came before training started."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def status(self) -> int:
        """Return the exit status."""
        return orderly(128 + self.number)


class Interruption:
    """Signal handler that notes the first signal for the training loop, where all ranks stop after the same step.

    Before ``defer``, and from the second signal on, it raises ``Interrupted`` at once.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the first signal."""
        self._deferred = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def defer(self) -> None:
        """From now on, leave the first signal to the training loop."""
        self._deferred = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.number is not None
        self.number = number
        # Before training there is no step after which all ranks could stop.
        if again or not self._deferred:
            raise Interrupted(number)


def orderly(status: int) -> int:
    """Return the exit status of an orderly end: 0 under torchrun, which treats anything else as a crash."""
    # torchrun sets this for every process that it starts.
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else status
