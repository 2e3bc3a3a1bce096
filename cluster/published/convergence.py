"""Samples that a run needs to reach the target: the reference's convergence, and how practice differs from it.

The reference convergence points are those that count in review: no larger batch converges in fewer samples, and none lies
above the line between its neighbours. Between them samples are interpolated in the batch size, as the rules do; beyond the
largest, the last line is followed.
"""

from __future__ import annotations

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
"""Global batch size and mean samples, of mlperf-logging's `rcps_bert.json`, the same in rulesets 2.1.0 to 5.0.0."""

SEQUENCES_PER_GB = 1.2
"""Sequences of a micro-batch that fit in a GB of memory with 16-bit activations: published runs with 24 to 80 GB."""

TUNED_ACCELERATORS = 256
"""Scale from which even the recipes of round v2.0 were tuned for the very run."""

LONG_RUN_MINUTES = 17
"""Time to train of eight A100, for which the recipes in circulation were made."""


def log_samples(
    p: Parameters,
    batch: int,
    accelerators: int,
    memory_gb: float,
    sequences_per_second: float,
    old_recipe: bool,
) -> float:
    """Logarithm of the mean samples to the target.

    Args:
        batch: global batch size.
        accelerators: number of devices; `memory_gb` is each one's.
        sequences_per_second: of the whole system, for how long a trial takes.
        old_recipe: hyperparameters as published up to round v2.0.
    """
    found = log(_line(REFERENCE_POINTS, batch))
    practice = [(log(knot), p[f"practice_{knot}"]) for knot in BATCH_KNOTS]
    # How practice differs from the reference; beyond the knots the difference stays as it is at the last one.
    found += _line(practice, min(max(log(batch), practice[0][0]), practice[-1][0]))
    if old_recipe:  # the less, the more a recipe was tuned for the very run
        growth = p["old_recipe_growth"] * max(0.0, log2(batch / 448))
        # The effect decays with scale: large runs had recipes of their own even in that round.
        found += (p["old_recipe"] + growth) * exp(-accelerators / TUNED_ACCELERATORS)
    # Only above what memory takes at once: below it nothing is accumulated.
    found += p["accumulation"] * max(0.0, log2(batch / accelerators / (SEQUENCES_PER_GB * memory_gb)))
    # The longer a trial takes, here one at the smallest reference batch, the fewer are made.
    minutes = REFERENCE_POINTS[0][1] / sequences_per_second / 60
    return found + p["tuning"] * max(0.0, log2(minutes / LONG_RUN_MINUTES))


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Value at `x` of the lines between points; flat before the first, the last line goes on."""
    if x <= points[0][0]:
        return points[0][1]
    # Beyond the largest point the last line goes on.
    at = min(bisect_left(points, (x,)), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (high - low) * (x - left) / (right - left)
