"""SIGTERM and Ctrl-C, turned into an orderly end."""

import signal
from types import FrameType


class Interrupted(Exception):  # noqa: N818 an event, not an error
    """The run was told to stop before it trained."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Interruption:
    """Notes the first signal for the training loop, where all ranks stop after the same step.

    Before ``deferred`` is set, and from the second signal on, it raises ``Interrupted`` at once.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.deferred = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.number is not None
        self.number = number
        if again or not self.deferred:
            raise Interrupted(number)
