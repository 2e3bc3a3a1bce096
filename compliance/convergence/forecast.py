"""Forecast when a run may reach its target, from its own accuracy curve or from the reference's runs.

Two curves go through the last evaluation, with the least-squares slope of the last four. A straight line in the samples n
gives the early end of the range. The curve a - b / n, plus two evaluations for the scatter, gives the late end. BERT-Large's
accuracy jumps from 0.4 to 0.7 before it rises slowly to 0.72, so evaluations of closed runs below 0.70 are ignored. As long
as fewer than four evaluations can be used, the range is the reference's mean plus and minus two standard deviations; an
open run has no range yet. On five published closed runs, the curves' range contained the true end 35 of 37 times.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compliance.log import rules
from compliance.log.schedule import EvaluationSchedule
from console.text import clock

if TYPE_CHECKING:
    from compliance.convergence.outlook import Reference

WINDOW = 4
"""Number of evaluations from which the slope is computed."""
KNEE = 0.70
"""Accuracy from which a closed run's curve can be extrapolated."""
BENDING = -1.0
"""Exponent of n in the curve a - b / n. With a smaller exponent, the curve often never reaches the target."""
SCATTER = 2
"""Number of evaluations by which the late end of the range is postponed, because accuracies scatter."""
MAX_SAMPLES = 2.0**63
SPREADS = 2.0
"""Width of the range on each side of the reference's mean, in standard deviations of the reference's runs."""


@dataclass(frozen=True)
class Forecast:
    """Range of evaluations, numbered from 1, at which the target may be reached.

    Attributes:
        earliest: first evaluation of the range; None if there is no forecast yet.
        latest: last evaluation of the range; None if the curve may not reach the target.
        basis: what the forecast is based on, or why there is none.
    """

    earliest: int | None
    latest: int | None
    basis: str


def forecast(
    evaluations: Sequence[tuple[int, float]], target: float, schedule: EvaluationSchedule, reference: "Reference | None"
) -> Forecast:
    """Forecast the end of a run that has not reached its target.

    `evaluations` are pairs (samples trained, accuracy) in order. `reference` is None in the open division and for a
    batch size above the largest reference point.
    """
    # Only BERT-Large has the jump in its curve, and only BERT-Large has this target.
    is_large = target == rules.QUALITY_TARGET
    # The curve a - b / n has no value at 0 samples, so skip an evaluation of the untrained model.
    usable = [point for point in evaluations if point[0] > 0 and (not is_large or point[1] >= KNEE)][-WINDOW:]
    following = len(evaluations) + 1
    if len(usable) < WINDOW:
        if reference is None:
            return Forecast(None, None, f"too early: {len(usable)} of {WINDOW} evaluations")
        earliest = schedule.index_after(reference.mean - SPREADS * reference.stdev)
        latest = schedule.index_after(reference.mean + SPREADS * reference.stdev)
        # A run may have passed the reference's mean already. Its range then begins at its next evaluation.
        return Forecast(max(following, earliest), max(following, latest), "by the reference's runs")
    early, late = reach(usable, 1.0, target), reach(usable, BENDING, target)
    # If the straight line does not rise, the curve a - b / n does not rise either.
    if early is None:
        return Forecast(None, None, f"no rise over the last {WINDOW} evaluations")
    first = max(following, schedule.index_after(early - schedule.interval / 2))
    last = None if late is None else max(first, schedule.index_after(late)) + SCATTER
    return Forecast(first, last, f"by its last {WINDOW} evaluations")


def reach(points: Sequence[tuple[int, float]], power: float, target: float) -> float | None:
    """Return the samples at which a curve reaches the target; None if that takes more than `MAX_SAMPLES`.

    The accuracy is linear in samples ** power. The curve goes through the last point, with the points' least-squares slope.
    """
    # Divide by the last point's samples, so that no power overflows. The sign makes x rise with the samples.
    scale = points[-1][0]
    sign = math.copysign(1.0, power)
    xs = [sign * (samples / scale) ** power for samples, _ in points]
    if len(set(xs)) < 2:
        return None
    slope = statistics.linear_regression(xs, [accuracy for _, accuracy in points]).slope
    if slope <= 0:
        return None
    x = xs[-1] + (target - points[-1][1]) / slope
    # If the power is -1, x is -1 divided by the scaled number of samples, which is negative. If the curve never reaches the
    # target, the computed x is 0 or more. Then max() gives 0, and 0 to the power of -1 raises ZeroDivisionError.
    try:
        reached = scale * max(0.0, sign * x) ** (1 / power)
    except (OverflowError, ZeroDivisionError):
        return None
    return reached if reached <= MAX_SAMPLES else None


def time_left(
    found: Forecast, schedule: EvaluationSchedule, samples: int, rate: float, limit: int | None = None
) -> str:
    """Return the time until the early and until the late end of a forecast: "0:50 to 3:11", or "0:50 or more".

    `samples` is the number trained so far, and `rate` the samples per second including evaluations. At `limit` samples
    the run ends even without reaching the target.
    """
    longest = math.inf if limit is None else limit / rate

    def left(index: int | None) -> str:
        at = math.inf if index is None else schedule.samples(index) / rate
        return clock(max(0.0, min(at, longest) - samples / rate))

    is_open = found.latest is None and limit is None
    if found.earliest is None:
        return "-" if is_open else f"at most {left(found.latest)}"
    return f"{left(found.earliest)} or more" if is_open else f"{left(found.earliest)} to {left(found.latest)}"
