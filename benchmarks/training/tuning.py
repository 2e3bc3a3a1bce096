"""Tune small and middle-size training on this machine, and compare what was found with the default once more.

    python benchmarks/training/tuning.py [--seconds S] [--out FILE]

The second comparison has new processes of both, a number of turns that is fixed beforehand, and is no part of what `tune`
decided by. Where tuning keeps the default there is nothing to compare. Choices go to a folder that is removed.
"""

import math
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tyro

from benchmarks.conditions import write_figures
from cluster.tuning.choice import TunedRun
from cluster.tuning.group import Group
from cluster.tuning.race import Comparison, window_steps
from cluster.tuning.tune import default_choice, tune

MIDDLE = (
    "--data.initial-checkpoint=None",
    "--model.num-hidden-layers=4",
    "--model.hidden-size=256",
    "--model.intermediate-size=1024",
)
CASES = {"tiny_cpu": (), "middle": MIDDLE, "tiny_cpu, batch 4": ("--training.global-batch-size=4",)}
# Fixed beforehand: a comparison that stops when it looks good is biased.
TURNS = 20


def main(seconds: float = 120.0, out: Path | None = None) -> None:
    """Print what tuning says, and the ratio of times in the second comparison.

    Args:
        seconds: For each tuning.
        out: Write the figures here as JSON.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        # The choices of this machine's user stay as they are.
        os.environ["MLPERF_BERT_CACHE"] = folder
        for name, settings in CASES.items():
            print(name, flush=True)
            rows.append({"case": name, **_row(tune("tiny_cpu", settings, seconds), settings)})
    if out:
        write_figures(out, {"seconds": seconds, "turns": TURNS, "rows": rows})
    for row in rows:
        between = f"{row['low']:.3f} to {row['high']:.3f}"
        print(f"{row['case']}, time of the choice over that of the default: {row['ratio']:.3f} ({between})")


def _row(choice: TunedRun, settings: tuple[str, ...]) -> dict[str, object]:
    default = default_choice("tiny_cpu")
    found = Comparison(1.0, 1.0, 1.0, 0) if choice == default else compared(default, choice, settings)
    return {"default": str(default), "choice": str(choice), "ratio": found.ratio, "low": found.low, "high": found.high}


def compared(one: TunedRun, other: TunedRun, settings: tuple[str, ...]) -> Comparison:
    """Time of the other over that of the one, by turns."""
    deadline = time.monotonic() + 600
    with Group(one, "tiny_cpu", settings, deadline) as first, Group(other, "tiny_cpu", settings, deadline) as second:
        steps = window_steps(first)
        # Once unmeasured: the second group has just started.
        second.pace(steps)
        logarithms = []
        for _ in range(TURNS):
            # In the order one, other, other, one: a drift of the machine's speed falls on both alike.
            a, b, c, d = (group.pace(steps).seconds_a_token for group in (first, second, second, first))
            logarithms.append(math.log((b + c) / (a + d)))
    return Comparison.of(logarithms)


if __name__ == "__main__":
    tyro.cli(main)
