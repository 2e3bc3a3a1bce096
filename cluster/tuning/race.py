"""Comparison of two choices that train in turns, which ends as soon as it is decided."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from cluster.tuning.group import Group

GAIN = 0.01
"""A share of the time that is worth leaving the default for."""
DOUBT = 0.005
"""Chance that a choice is taken for so much faster, or dropped as not so much, by mistake: looked at once."""
WINDOW_SECONDS = 0.3
TURNS = (5, 60)
"""How many are enough to decide, and to give up."""
_HOPELESS = 1.15
"""What is so many times slower in each of two turns is not measured further."""


@dataclass(frozen=True)
class Comparison:
    """Time of a challenger over that of the other, in the geometric mean of the turns, and an interval around it."""

    ratio: float
    low: float
    high: float
    turns: int

    @classmethod
    def of(cls, logarithms: Sequence[float]) -> Comparison:
        """Compare by the logarithm of the ratio of each turn."""
        # Logarithms: half and twice the time are equally far from equal.
        mean, many = statistics.fmean(logarithms), len(logarithms)
        error = statistics.stdev(logarithms) / math.sqrt(many) if many > 1 else math.inf
        reach = -float(stdtrit(max(1, many - 1), DOUBT)) * error
        # After few turns the reach may be infinite, and exp overflows a little above 700.
        return cls(math.exp(mean), math.exp(mean - reach), math.exp(min(mean + reach, 700.0)), many)

    @property
    def is_faster(self) -> bool:
        """Tell whether the challenger gains, beyond the noise, and enough to be worth it."""
        return self.high < 1 and self.ratio <= 1 - GAIN

    @property
    def is_decided(self) -> bool:
        """Tell whether more turns would hardly change ``is_faster``."""
        return self.high < 1 - GAIN or self.low > 1 - GAIN

    def __str__(self) -> str:
        """Say it in one line."""
        between = f"{self.low:.3f} to {self.high:.3f}, " if self.turns >= TURNS[0] else ""
        return f"{self.ratio:.3f} of the time ({between}{self.turns} turns)"


def window_steps(group: Group) -> int:
    """Steps that take about ``WINDOW_SECONDS``: at least one."""
    group.pace(1)
    seconds = group.pace(2).seconds / 2
    return max(1, round(WINDOW_SECONDS / seconds))


def race(holder: Group, challenger: Group, steps: int, untimed: int, deadline: float) -> Comparison | None:
    """Have both train in turns until it is decided or ``deadline`` (by ``time.monotonic``); None before enough turns.

    In each turn both have the machine twice, in the order holder, challenger, challenger, holder, so that a drift of the
    machine's speed counts for neither. Tokens are counted, as lengths differ from step to step.
    """
    least, most = TURNS
    logarithms: list[float] = []
    # Not counted: the challenger has just started.
    challenger.pace(steps, untimed)
    while len(logarithms) < most:
        # A linear drift of the machine's speed falls on both alike.
        paces = [group.pace(steps, untimed) for group in (holder, challenger, challenger, holder)]
        of_holder, of_challenger = (
            sum(paces[place].seconds_a_token for place in places) for places in ((0, 3), (1, 2))
        )
        logarithms.append(math.log(of_challenger / of_holder))
        # Two turns, as one may have been disturbed.
        hopeless = len(logarithms) >= 2 and min(logarithms) > math.log(_HOPELESS)
        if hopeless or (len(logarithms) >= least and Comparison.of(logarithms).is_decided):
            return Comparison.of(logarithms)
        if time.monotonic() > deadline:
            break
    return Comparison.of(logarithms) if len(logarithms) >= least else None
