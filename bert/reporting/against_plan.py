"""Comparison of a run's measured step with the step that its plan expects."""

from pathlib import Path
from statistics import median

from bert.configuration.run_plan import RunPlan
from bert.timing.phases import PHASES
from compliance.log.records import PlanRecord, StepRecord

WORTH_SAYING = 0.2
"""Difference of a step from the plan's, as a share of that, which a person should look at."""


class AgainstPlan:
    """Comparison of a run with its plan; ``path`` names the plan."""

    def __init__(self, plan: RunPlan, path: Path) -> None:
        self._planned_ms = {part: 1000 * seconds for part, seconds in plan.step_seconds.items()}
        self._path = path
        self._intervals: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        """Take in an interval."""
        self._intervals.append(record)

    def record(self) -> PlanRecord | None:
        """Compare the median interval, which neither the first one nor a hiccup decides; None without any."""
        if not self._intervals:
            return None
        phases = [{part: getattr(each, f"{part}_ms") for part in PHASES} for each in self._intervals]
        # Of each interval before the median: medians of parts do not add up to that of the whole.
        other = median(each.step_ms - sum(own.values()) for each, own in zip(self._intervals, phases, strict=True))
        return PlanRecord(
            step_ms=median(each.step_ms for each in self._intervals),
            **{f"{part}_ms": median(own[part] for own in phases) for part in PHASES},
            other_ms=other,
            planned_step_ms=sum(self._planned_ms.values()),
            **{f"planned_{part}_ms": milliseconds for part, milliseconds in self._planned_ms.items()},
        )

    def warning(self, found: PlanRecord) -> str:
        """Say by how much a step differs from the plan's, and in which part most; empty where it is no more than a fifth."""
        planned = found.planned_step_ms
        if abs(found.step_ms - planned) <= WORTH_SAYING * planned:
            return ""
        apart = {part: getattr(found, f"{part}_ms") - ms for part, ms in self._planned_ms.items()}
        longer = found.step_ms > planned
        most = max(apart, key=lambda part: apart[part] if longer else -apart[part])
        difference = f"{abs(found.step_ms / planned - 1):.0%} {'more' if longer else 'less'}"
        return (
            f"a step took {found.step_ms:.1f} ms, {difference} than the {planned:.1f} ms of {self._path}: most of that in "
            f"{most.replace('_', ' ')}, {getattr(found, f'{most}_ms'):.1f} ms in place of {self._planned_ms[most]:.1f}"
        )
