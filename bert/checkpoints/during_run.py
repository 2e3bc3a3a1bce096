"""Checkpoints as used by the training loop. If one cannot be written, the run prints a warning and continues."""

from bert.checkpoints.training_state import Checkpoints
from bert.reporting.reporter import Position, Reporter
from bert.timing.phases import PhaseTracker


class NoCheckpoints:
    """Replacement for ``RunCheckpoints`` if no folder is configured: no checkpoint is due, and saving does nothing."""

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
    """Writer of ``checkpoints`` that reports waiting times to ``tracker`` and errors to ``reporter``."""

    def __init__(self, checkpoints: Checkpoints, tracker: PhaseTracker, reporter: Reporter) -> None:
        self._checkpoints = checkpoints
        self._tracker = tracker
        self._reporter = reporter

    def due(self, steps: int) -> bool:
        """Tell whether a checkpoint is due after ``steps`` steps."""
        return self._checkpoints.due(steps)

    def save(self, at: Position) -> None:
        """Start writing a checkpoint, after the previous one is on disk; every rank must call it after the same step."""
        # There is only one set of copies in host memory, and the thread may still be writing from it.
        self.wait(at)
        self._tracker.enter("checkpoint")
        self._checkpoints.save(at.steps, at.samples)

    def wait(self, at: Position) -> None:
        """Wait until the checkpoint that is being written is on disk."""
        if self._checkpoints.writing:
            self._tracker.enter("checkpoint_write")
            self._checkpoints.wait()
        self.look(at)

    def look(self, at: Position) -> None:
        """Warn if the last checkpoint could not be written, and record how long writing takes."""
        # The thread's error stays in its future, so the loop has to ask for it.
        error = self._checkpoints.failure()
        if error is not None:
            self._reporter.warn(at.steps, f"no checkpoint was written: {error.filename}: {error.strerror}")
        # The watchdog limits a phase to a multiple of its longest duration, and waiting may take as long as the writing did.
        if self._checkpoints.longest_s is not None:
            self._tracker.longest["checkpoint_write"] = self._checkpoints.longest_s
