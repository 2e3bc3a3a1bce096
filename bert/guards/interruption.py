"""SIGTERM and Ctrl-C, turned into an orderly end, and what an orderly end is to whoever started the process."""

import os
import signal
from types import FrameType


class Interrupted(Exception):  # noqa: N818 an event, not an error
    """The run was told to stop before it trained."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def status(self) -> int:
        """The exit status."""
        return orderly(128 + self.number)


class Interruption:
    """Signal handler that notes the first for the training loop, where all ranks stop after the same step.

    Before ``defer``, and from the second signal on, it raises ``Interrupted`` at once.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """Of the first signal."""
        self._deferred = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def defer(self) -> None:
        """Note the first signal from here on, and leave it to the training loop."""
        self._deferred = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.number is not None
        self.number = number
        # Before training there is no step after which all could stop.
        if again or not self._deferred:
            raise Interrupted(number)


def orderly(status: int) -> int:
    """The exit status of an end in order: under torchrun 0, because it takes anything else for a crash."""
    # torchrun sets it for every process that it starts, elastic or not.
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else status
