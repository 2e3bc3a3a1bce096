"""A stand-in for CUDA graphs where there is no GPU."""

from collections.abc import Callable


class Repeating:
    """Captures by running, replays by running again: on what the first run saw, as a device would."""

    def __init__(self) -> None:
        self.prepared: list[Callable[[], None]] = []
        self.captured = 0
        """How many of them."""
        self.replays: list[int] = []

    def prepare(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        number = len(self.prepared)
        self.prepared.append(function)

        def replay() -> None:
            assert number < self.captured
            self.replays.append(number)
            function()

        return replay

    def capture(self) -> None:
        self.captured = len(self.prepared)
