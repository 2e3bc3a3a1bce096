"""Reporter of a run's records to all that show or keep them.

The sinks that a person reads are in ``bert.reporting.displays``.
"""

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from bert.reporting.against_plan import AgainstPlan
from bert.reporting.displays import RunProgress
from compliance.log.records import EndRecord, Record, StepRecord, Straggler, WarningRecord


@dataclass(frozen=True)
class Position:
    """Position of a run: how far it has trained."""

    steps: int = 0
    """Global batches."""
    samples: int = 0

    def after(self, global_batch_size: int) -> "Position":
        """Return the position one step further on."""
        return Position(self.steps + 1, self.samples + global_batch_size)


class Sink(Protocol):
    """Destination of records."""

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class Reporter:
    """Reporter that hands each record to every sink, and keeps the time that they state.

    Without sinks (all ranks but the first) nothing is reported.
    """

    def __init__(self, progress: RunProgress, sinks: list[Sink], against_plan: AgainstPlan | None = None) -> None:
        self._progress = progress
        self._sinks = sinks
        self._against_plan = against_plan
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Count time from here on: the clock of the run has started."""
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since ``begin``."""
        return time.perf_counter() - self._began

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as closing:
            if error is not None:  # which may be why a sink cannot be closed
                closing.enter_context(suppress(OSError))
            for sink in self._sinks:
                # All are closed, even where closing one of them raises.
                closing.callback(sink.close)

    def write(self, record: Record) -> None:
        """Report ``record``."""
        # Before the sinks: displays draw the progress with this record in it.
        self._progress.add(record)
        if self._against_plan and isinstance(record, StepRecord):
            self._against_plan.add(record)
        for sink in self._sinks:
            sink.write(record)

    def end(self, steps: int, record: EndRecord) -> None:
        """Report the end after so many steps, and before it how they compare with the plan."""
        if self._against_plan and (compared := self._against_plan.record()):
            self.write(compared)
            if text := self._against_plan.warning(compared):
                self.warn(steps, text)
        self.write(record)

    def warn(self, steps: int, text: str, straggler: Straggler | None = None) -> None:
        """Report something to look at, after so many steps."""
        self.write(WarningRecord(steps, self.seconds, text, straggler))
