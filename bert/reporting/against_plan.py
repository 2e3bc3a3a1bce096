"""Comparison of a run's measured step time with the step time that its plan predicts."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bert.configuration.run_plan import RunPlan
from bert.timing.phases import PHASES
from compliance.log.records import PlanRecord, StepRecord

WORTH_SAYING = 0.2
"""Relative difference from the planned step time above which a warning is given."""


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
