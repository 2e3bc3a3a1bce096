"""Reporter, which passes a run's records to all sinks: files and displays."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType

from bert.configuration.run_plan import RunPlan
from bert.reporting.displays import StepLines
from bert.reporting.tensorboard import TensorBoard
from bert.timing.phases import PHASES
from compliance.log.records import EndRecord, MetricsWriter, PlanRecord, Record, StepRecord, Straggler, WarningRecord


@dataclass(frozen=True)
class Position:
    """Position of a run: the numbers of steps and samples trained so far."""

    steps: int = 0
    """Number of global batches trained."""
    samples: int = 0


Sink = MetricsWriter | StepLines | TensorBoard

WORTH_SAYING = 0.2
"""Relative difference from the planned step time above which a warning is given."""


class Reporter:
    """Reporter that passes each record to every sink and measures the run's time. Only rank 0 has sinks."""

    def __init__(self, sinks: list[Sink], plan: tuple[RunPlan, Path] | None = None) -> None:
        """``plan`` is the plan with which the run is compared, and the path of the plan's file."""
        self._sinks, self._plan = sinks, plan
        self._steps: list[StepRecord] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Start to measure time. Call this when the clock of the run starts."""
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
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
        self.write(WarningRecord(steps, self.seconds, text, straggler))


def compare_with_plan(plan: RunPlan, intervals: Sequence[StepRecord]) -> PlanRecord:
    """Return the medians over all log intervals beside the plan's prediction. Outliers hardly affect a median."""
    planned_ms = {f"planned_{part}_ms": 1000 * seconds for part, seconds in plan.step_seconds.items()}
    # Compute the rest of each interval first, because medians of parts do not add up to the median of the whole.
    others = [each.step_ms - sum(getattr(each, f"{part}_ms") for part in PHASES) for each in intervals]
    return PlanRecord(
        step_ms=median(each.step_ms for each in intervals),
        **{f"{part}_ms": median(getattr(each, f"{part}_ms") for each in intervals) for part in PHASES},
        other_ms=median(others),
        planned_step_ms=sum(planned_ms.values()),
        **planned_ms,
    )


def difference(found: PlanRecord, plan: Path) -> str:
    """Describe how the step time differs from the plan, and which phase differs most; "" below a difference of 20 %.

    The text names the file ``plan``.
    """
    planned = found.planned_step_ms
    if abs(found.step_ms - planned) <= WORTH_SAYING * planned:
        return ""
    pairs = {part: (getattr(found, f"{part}_ms"), getattr(found, f"planned_{part}_ms")) for part in (*PHASES, "other")}
    sign = 1 if found.step_ms > planned else -1
    most = max(pairs, key=lambda part: sign * (pairs[part][0] - pairs[part][1]))
    return (
        f"a step took {found.step_ms:.1f} ms, {abs(found.step_ms / planned - 1):.0%} {'more' if sign > 0 else 'less'} "
        f"than the {planned:.1f} ms of {plan}: mostly in {most.replace('_', ' ')}, {pairs[most][0]:.1f} ms instead of "
        f"{pairs[most][1]:.1f}"
    )
