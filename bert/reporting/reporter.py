"""Reporter, which passes a run's records to all sinks: files and displays."""

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bert.configuration.run_plan import RunPlan
from bert.reporting.against_plan import compare_with_plan, difference
from bert.reporting.displays import StepLines
from bert.reporting.tensorboard import TensorBoard
from compliance.log.records import EndRecord, MetricsWriter, Record, StepRecord, Straggler, WarningRecord


@dataclass(frozen=True)
class Position:
    """Position of a run: the numbers of steps and samples trained so far."""

    steps: int = 0
    """Number of global batches trained."""
    samples: int = 0

    def after(self, global_batch_size: int) -> "Position":
        """Return the position after one more step."""
        return Position(self.steps + 1, self.samples + global_batch_size)


Sink = MetricsWriter | StepLines | TensorBoard
"""Destination of records."""


class Reporter:
    """Reporter that passes each record to every sink and measures the run's time. Only rank 0 has sinks."""

    def __init__(self, sinks: list[Sink], plan: tuple[RunPlan, Path] | None = None) -> None:
        """``plan`` is the plan to compare the run with, and the path of its file."""
        self._sinks, self._plan = sinks, plan
        self._steps: list[StepRecord] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Start to measure time. Call this when the clock of the run starts."""
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
            if error is not None:  # an error while closing a sink must not hide the error that ended the run
                closing.enter_context(suppress(OSError))
            for sink in self._sinks:
                # The exit stack closes all sinks, even if closing one of them raises an error.
                closing.callback(sink.close)

    def write(self, record: Record) -> None:
        """Write ``record`` to all sinks."""
        if isinstance(record, StepRecord):
            self._steps.append(record)
        for sink in self._sinks:
            sink.write(record)

    def end(self, steps: int, record: EndRecord) -> None:
        """Report the comparison with the plan, if any, and the end of the run after ``steps`` steps."""
        if self._plan and self._steps:
            plan, file = self._plan
            compared = compare_with_plan(plan, self._steps)
            self.write(compared)
            if text := difference(compared, file):
                self.warn(steps, text)
        self.write(record)

    def warn(self, steps: int, text: str, straggler: Straggler | None = None) -> None:
        """Report a warning after ``steps`` steps."""
        self.write(WarningRecord(steps, self.seconds, text, straggler))
