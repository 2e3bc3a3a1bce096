"""Comparison of a run's measured step time with the step time that its plan predicts."""

from pathlib import Path
from statistics import median

from bert.configuration.run_plan import RunPlan
from bert.timing.phases import PHASES
from compliance.log.records import PlanRecord, StepRecord

WORTH_SAYING = 0.2
"""Relative difference from the planned step time above which a warning is given."""


class AgainstPlan:
    """Comparison of a run with its plan. ``path`` is the plan's file, for messages."""

    def __init__(self, plan: RunPlan, path: Path) -> None:
        self._planned_ms = {part: 1000 * seconds for part, seconds in plan.step_seconds.items()}
        self._path = path
        self._intervals: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        """Add the measurements of one log interval."""
        self._intervals.append(record)

    def record(self) -> PlanRecord | None:
        """Return the median over all intervals beside the plan's prediction, or None if there were no intervals.

        The median is used because outliers hardly affect it.
        """
        if not self._intervals:
            return None
        # Compute the rest of each interval first, because medians of parts do not add up to the median of the whole.
        others = [each.step_ms - sum(getattr(each, f"{part}_ms") for part in PHASES) for each in self._intervals]
        return PlanRecord(
            step_ms=median(each.step_ms for each in self._intervals),
            **{f"{part}_ms": median(getattr(each, f"{part}_ms") for each in self._intervals) for part in PHASES},
            other_ms=median(others),
            planned_step_ms=sum(self._planned_ms.values()),
            **{f"planned_{part}_ms": milliseconds for part, milliseconds in self._planned_ms.items()},
        )

    def warning(self, found: PlanRecord) -> str:
        """Return a warning if the step time differs from the plan by more than a fifth, otherwise an empty string.

        The warning names the part of the step that differs most.
        """
        planned = found.planned_step_ms
        if abs(found.step_ms - planned) <= WORTH_SAYING * planned:
            return ""
        sign = 1 if found.step_ms > planned else -1
        most = max(self._planned_ms, key=lambda part: sign * (getattr(found, f"{part}_ms") - self._planned_ms[part]))
        return (
            f"a step took {found.step_ms:.1f} ms, {abs(found.step_ms / planned - 1):.0%} {'more' if sign > 0 else 'less'} "
            f"than the {planned:.1f} ms of {self._path}: mostly in {most.replace('_', ' ')}, "
            f"{getattr(found, f'{most}_ms'):.1f} ms instead of {self._planned_ms[most]:.1f}"
        )
