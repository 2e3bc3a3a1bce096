"""Samples that a run needs to reach the target: the reference convergence, and corrections from published results.

Only reference points that count in review are listed: no larger batch converges in fewer samples, and no point lies above
the line between its neighbours. Samples are interpolated linearly in the batch size, as the rules do. Beyond the largest
point, the line through the last two points continues.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log, log2

from cluster.published.parameters import BATCH_KNOTS, Parameters

REFERENCE_POINTS = (
    (448, 2_414_421),
    (4608, 2_798_080),
    (6144, 3_319_125),
    (6912, 3_601_920),
    (12288, 4_465_067),
    (13056, 4_645_333),
    (16384, 5_505_422),
)
"""Global batch size and mean samples from mlperf-logging's `rcps_bert.json`, identical in rulesets 2.1.0 to 5.0.0."""

SEQUENCES_PER_GB = 1.2
"""Sequences of a 16-bit micro-batch that fit per GB of memory, from published runs with 24 to 80 GB."""

TUNED_ACCELERATORS = 256
"""Scale of the decay of the old recipes' effect. Runs on more accelerators had tuned recipes even in round v2.0."""

LONG_RUN_MINUTES = 17
"""Time to train on eight A100s. The recipes that many submitters copied were made for eight A100s."""


def log_samples(
    p: Parameters, batch: int, accelerators: int, memory_gb: float, sequences_per_second: float, old_recipe: bool
) -> float:
    """Return the logarithm of the mean samples to the target.

    ``memory_gb`` is per device, and ``sequences_per_second`` is for the whole system. ``old_recipe`` means hyperparameters
    as published up to round v2.0.
    """
    practice = [(log(knot), p[f"practice_{knot}"]) for knot in BATCH_KNOTS]
    found = log(_line(REFERENCE_POINTS, batch)) + _line(practice, min(log(batch), practice[-1][0]))
    if old_recipe:  # the effect decays with scale, because large runs had tuned recipes even then
        growth = p["old_recipe_growth"] * max(0.0, log2(batch / 448))
        found += (p["old_recipe"] + growth) * exp(-accelerators / TUNED_ACCELERATORS)
    found += p["accumulation"] * max(0.0, log2(batch / accelerators / (SEQUENCES_PER_GB * memory_gb)))
    # The longer a trial takes (here at the smallest reference batch), the fewer trials a submitter makes.
    minutes = REFERENCE_POINTS[0][1] / sequences_per_second / 60
    return found + p["tuning"] * max(0.0, log2(minutes / LONG_RUN_MINUTES))


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly. Values are constant before the first point, and the last segment continues beyond its end."""
    if x <= points[0][0]:
        return points[0][1]
    at = min(bisect_left(points, (x,)), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (high - low) * (x - left) / (right - left)
