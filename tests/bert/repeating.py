"""A stand-in for CUDA graphs where there is no GPU."""

from collections.abc import Callable


class Repeating:
    """Captures by running, replays by running again: on what the first run saw, as a device would."""

    def __init__(self, note: Callable[[str], object] = lambda _: None) -> None:
        """``note`` is told "run" and "capture" before they happen."""
        self._note = note
        self.prepared: list[Callable[[], None]] = []
        self.captured = 0
        """How many of them."""
        self.replays: list[int] = []

    def prepare(self, function: Callable[[], None]) -> Callable[[], None]:
        self._note("run")
        function()
        number = len(self.prepared)
        self.prepared.append(function)

        def replay() -> None:
            assert number < self.captured
            self.replays.append(number)
            function()

        return replay

    def capture(self) -> None:
        self._note("capture")
        self.captured = len(self.prepared)
