"""Compare predictions with published results that the model has not seen, or with measured step times.

    python benchmarks/prediction.py --published [--out FILE]
    sudo python benchmarks/prediction.py --measured [--cases 0 1 2] [--seconds 20] [--out FILE]

With --published, the results of one submitter, one number of accelerators, or one accelerator are held out at a time; the
model is fitted to the other results and predicts the held-out results. For comparison, a look-up predicts the median of
other submitters' results on the same system, which shows how much results of equal systems differ.

With --measured, steps on this machine are predicted from a probe alone and then run (`benchmarks/measured_steps.py`). Hosts
are network namespaces with links of several rates, which need root.
"""

import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before PyTorch is imported, because ranks share few cores

import tyro

from benchmarks.conditions import write_figures
from cluster.published.calibration import Held, calibrate
from cluster.published.results import results

CASES: tuple[tuple[str, str, Callable[[Held], bool]], ...] = (
    ("submitter", "accelerator and scale in the data", lambda held: held.model_seen and held.scale_seen),
    ("submitter", "all", lambda _: True),
    ("scale", "accelerator in the data", lambda held: held.model_seen),
    ("accelerator", "all", lambda _: True),
)
"""Kind of the held-out groups, title of the printed line, and a filter for the predictions that the line covers."""


def main(
    published: tyro.conf.FlagCreatePairsOff[bool] = False,
    measured: tyro.conf.FlagCreatePairsOff[bool] = False,
    cases: tuple[int, ...] = (),
    seconds: float = 20.0,
    out: Path | None = None,
) -> None:
    """Print the prediction errors.

    Args:
        published: Cross-validate on the published results, which takes half a minute.
        measured: Predict steps from a probe and run them, which takes about a minute a case. Needs root.
        cases: Numbers of the cases to measure, from 0; all by default.
        seconds: Approximate duration of a probe.
        out: JSON file for the figures; measured cases are added to the figures that it already contains.
    """
    if published == measured:
        raise SystemExit("error: expected either --published or --measured")
    if measured:
        from benchmarks import measured_steps  # imported here because it imports PyTorch

        measured_steps.measured(cases or range(len(measured_steps.CASES)), seconds, out)
        return
    calibration, validation = calibrate()
    figures: dict[str, dict[str, float]] = {}
    for name, title, counts in CASES:
        held = [each for each in validation[name] if counts(each)]
        inside = statistics.mean(each.is_inside(calibration) for each in held)
        figures[f"{name}: {title}"] = of_errors([each.deviation for each in held]) | {"in_interval": inside}
    figures["look-up of equal systems"] = of_errors(look_up_errors())
    print(f"{'left out: predicted':44}{'results':>8}{'median':>9}{'75 %':>8}{'90 %':>8}{'in interval':>13}")
    for title, figure in figures.items():
        inside = f"{figure['in_interval']:12.0%}" if "in_interval" in figure else f"{'-':>12}"
        errors = f"{figure['median']:9.1%}{figure['three_quarters']:8.1%}{figure['nine_tenths']:8.1%}"
        print(f"{title:44}{figure['results']:8.0f}{errors} {inside}")
    if out is not None:
        write_figures(out, {"errors": figures})


def of_errors(deviations: list[float]) -> dict[str, float]:
    """Return the number of log ratios, and the median, 75 % and 90 % quantiles of their absolute values."""
    ranked = statistics.quantiles(map(abs, deviations), n=20, method="inclusive")
    return {"results": len(deviations), "median": ranked[9], "three_quarters": ranked[14], "nine_tenths": ranked[17]}


def look_up_errors() -> list[float]:
    """Return log ratios of looked-up to observed time, for results whose system and recipe other submitters used too."""
    errors = []
    for result in results():
        alike = [other for other in results() if other.kind == result.kind and other.company != result.company]
        if alike:
            errors.append(math.log(statistics.median(other.seconds for other in alike) / result.seconds))
    return errors


if __name__ == "__main__":
    tyro.cli(main)
