"""Checkpoints as the training loop sees them: one that cannot be written costs a warning, not the run."""

from bert.checkpoints.training_state import Checkpoints
from bert.reporting.reporter import Position, Reporter
from bert.timing.phases import PhaseTracker


class NoCheckpoints:
    """Checkpoints of a run that has no folder for them: none is due, and saving does nothing."""

    def due(self, _steps: int) -> bool:
        """Return False."""
        return False

    def save(self, at: Position) -> None:
        """Do nothing."""

    def wait(self, at: Position) -> None:
        """Do nothing."""

    def look(self, at: Position) -> None:
        """Do nothing."""


class RunCheckpoints:
    """Writer of ``checkpoints`` that tells ``tracker`` what is waited for, and ``reporter`` what went wrong."""

    def __init__(self, checkpoints: Checkpoints, tracker: PhaseTracker, reporter: Reporter) -> None:
        self._checkpoints = checkpoints
        self._tracker = tracker
        self._reporter = reporter

    def due(self, steps: int) -> bool:
        """Tell whether a checkpoint is to be written after so many steps."""
        return self._checkpoints.due(steps)

    def save(self, at: Position) -> None:
        """Begin one, when the one before is there; every rank must call it after the same step."""
        # There is one set of copies in the host's memory, which the thread may still be writing from.
        self.wait(at)
        self._tracker.enter("checkpoint")
        self._checkpoints.save(at.steps, at.samples)

    def wait(self, at: Position) -> None:
        """Wait until the one that is being written is there."""
        if self._checkpoints.writing:
            self._tracker.enter("checkpoint_write")
            self._checkpoints.wait()
        self.look(at)

    def look(self, at: Position) -> None:
        """Warn if the last one could not be written, and note how long writing takes."""
        # Asked from the loop: an error of the thread stays in its future until somebody asks.
        error = self._checkpoints.failure()
        if error is not None:
            self._reporter.warn(at.steps, f"no checkpoint was written: {error.filename}: {error.strerror}")
        # The watchdog allows a phase so many times its longest: what the thread took stands for waits that are to come.
        if self._checkpoints.longest_s is not None:
            self._tracker.longest["checkpoint_write"] = self._checkpoints.longest_s
