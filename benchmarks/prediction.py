"""Hold predictions of the time to train against published results that the model has not seen, and of a step against steps.

    python benchmarks/prediction.py --published [--rows] [--out FILE]
    sudo python benchmarks/prediction.py --measured [--cases 0 1 2] [--seconds 20] [--out FILE]

One submitter, one scale (number of accelerators), one accelerator is left out at a time, the cost model is fitted to the
other results, and predicts those left out: median error, and how many lie in the 80 % intervals. Beside it stands a look-up:
the median of other submitters' results on the same accelerator, nodes and batch size, which knows no physics and predicts
nothing new, but shows how far results of equal systems lie apart.

With --measured, steps on this machine are predicted from a probe alone and then run (`benchmarks/measured_steps.py`): hosts
are network namespaces with links of several rates, which needs root.
"""

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported: of ranks that share few cores

import tyro

from benchmarks.conditions import write_figures
from cluster.published.calibration import GROUPS, Calibration, Held, calibrate
from cluster.published.results import results


def main(
    published: tyro.conf.FlagCreatePairsOff[bool] = False,
    measured: tyro.conf.FlagCreatePairsOff[bool] = False,
    rows: bool = False,
    cases: tuple[int, ...] = (),
    seconds: float = 20.0,
    out: Path | None = None,
) -> None:
    """Print the table.

    Args:
        published: Cross-validate on the published results; takes half a minute of a processor.
        measured: Predict steps from a probe, and run them; takes about a minute a case. Needs root.
        rows: Print every result and what was predicted, too.
        cases: Numbers of the cases that are measured, from 0; all of them unless given.
        seconds: About how long a probe takes.
        out: Write the figures here as JSON; measured cases are added to those that are there.
    """
    if published == measured:
        raise SystemExit("error: nothing to do; expected either --published or --measured")
    if measured:
        # Imported where it is asked for: it brings in training.
        from benchmarks import measured_steps

        measured_steps.measured(cases or range(len(measured_steps.CASES)), seconds, out)
        return
    # The shipped parameters are not used: they have seen every result.
    calibration, validation = calibrate()
    figures = {
        f"{name}: {title}": summary(calibration, [held for held in validation[name] if choose(held)])
        for name, title, choose in CASES
    }
    # What results of equal systems differ by, for scale.
    figures["look-up of equal systems"] = of_errors([abs(error) for error in look_up_errors()])
    print(f"{'left out: predicted':44}{'results':>8}{'median':>9}{'75 %':>8}{'90 %':>8}{'in interval':>13}")
    for title, figure in figures.items():
        held = f"{figure['in_interval']:12.0%}" if "in_interval" in figure else f"{'-':>12}"
        errors = f"{figure['median']:9.1%}{figure['three_quarters']:8.1%}{figure['nine_tenths']:8.1%}"
        print(f"{title:44}{figure['results']:8.0f}{errors} {held}")
    groups: dict[str, float] = {}
    # Ratios by group show what the model takes for too slow or too fast.
    for name in ("scale", "accelerator"):
        groups |= medians_of_groups(name, validation[name])
    print("\nmedian of predicted / observed, by what was left out:")
    print("  ".join(f"{group} {ratio:.2f}" for group, ratio in groups.items()))
    if rows:
        for held in validation["submitter"]:
            print_row(held)
    if out is not None:
        write_figures(out, {"errors": figures, "predicted_over_observed": groups})


CASES: tuple[tuple[str, str, Callable[[Held], bool]], ...] = (
    ("submitter", "accelerator and scale in the data", lambda held: held.model_seen and held.scale_seen),
    ("submitter", "all", lambda _: True),
    ("scale", "accelerator in the data", lambda held: held.model_seen),
    ("accelerator", "all", lambda _: True),
)


def summary(calibration: Calibration, held: Iterable[Held]) -> dict[str, float]:
    """Errors of predictions, and the share of results in their intervals."""
    held = list(held)
    found = of_errors([abs(each.deviation) for each in held])
    return found | {"in_interval": statistics.mean(each.is_inside(calibration) for each in held)}


def of_errors(errors: list[float]) -> dict[str, float]:
    """Median and tails; an error is the absolute logarithm of predicted over observed."""
    # Of twenty parts: the 10th is the median, the 15th three quarters, the 18th nine tenths.
    ranked = statistics.quantiles(errors, n=20, method="inclusive")
    return {"results": len(errors), "median": ranked[9], "three_quarters": ranked[14], "nine_tenths": ranked[17]}


def look_up_errors() -> list[float]:
    """Logarithms of a look-up over what was observed, where another submitter has the same system and recipe."""
    errors = []
    for result in results():
        # Another company: the same one would look itself up.
        alike = [other for other in results() if other.kind == result.kind and other.company != result.company]
        if alike:
            errors.append(math.log(statistics.median(other.seconds for other in alike) / result.seconds))
    return errors


def medians_of_groups(name: str, held: Iterable[Held]) -> dict[str, float]:
    """Median of predicted over observed of each group that was left out."""
    groups: dict[object, list[float]] = {}
    for each in held:
        groups.setdefault(GROUPS[name](each.result), []).append(each.seconds / each.result.seconds)
    return {str(group): statistics.median(ratios) for group, ratios in groups.items()}


def print_row(held: Held) -> None:
    """Print a line of a result and what was predicted for it."""
    result, machine = held.result, held.result.run.machine
    print(
        f"{result.run.round} {result.submitter[:14]:14} {machine.nodes:4} x {machine.per_node:2} {machine.device.name:15}"
        f"{result.run.batch:6} {result.seconds / 60:9.3f} min, predicted {held.seconds / 60:9.3f}"
        f" ({held.seconds / result.seconds - 1:+.1%})"
    )


if __name__ == "__main__":
    tyro.cli(main)
