"""Parameters of the cost model from published results, and how far from published results its predictions lie.

Each result says two things: how long its samples took, and how many samples it took. Residuals count by a Cauchy loss, since
some systems were set up badly and some recipes chosen badly; priors count as they are. Results of the same system and recipe
count less each, so that thirteen nearly equal submissions are not thirteen witnesses.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from cluster.published.cost_model import TimedRun, log_samples_needed, run_time, step_time, time_of_steps
from cluster.published.parameters import CHIP, PRIORS, Parameters, chip_parameter, prior_of
from cluster.published.results import TABLE, Result, results

CALIBRATION = Path(__file__).with_name("calibration.json")

TIME_SCALE, SAMPLES_SCALE = 0.02, 0.025
"""Spread of the logarithms that counts as usual: of the time for given samples, and of the samples."""

INTERVAL = 0.8
"""Share of results that intervals are to hold."""


@dataclass(frozen=True)
class Calibration:
    """Parameters of the model from published results.

    Attributes:
        parameters: by name.
        covariance: of the parameters, in their order.
        models: of devices that it has seen.
        known, unknown: logarithms of observed over predicted between which `INTERVAL` of results lie, in units of what
            `spread` gives, for models that it has seen and for others.
        source: SHA-256 of the table of results.
    """

    parameters: dict[str, float]
    covariance: tuple[tuple[float, ...], ...]
    models: tuple[str, ...]
    known: tuple[float, float]
    unknown: tuple[float, float]
    source: str

    def interval(self, run: TimedRun) -> tuple[float, float]:
        """Factors on a predicted time between which a result lies in `INTERVAL` of cases."""
        # A model that the fit has seen has results of its own to be judged by.
        low, high = self.bounds(run.machine.device.model in self.models, spread(self, run))
        return math.exp(low), math.exp(high)

    def bounds(self, model_seen: bool, spread: float) -> tuple[float, float]:
        """Logarithms of those factors. Nobody knows more of a model by its data sheet than by its results."""
        usual = math.hypot(TIME_SCALE, SAMPLES_SCALE)
        if model_seen:
            return self.known[0] * spread, self.known[1] * spread
        # The wider of both on either side.
        return min(self.unknown[0] * spread, self.known[0] * usual), max(
            self.unknown[1] * spread, self.known[1] * usual
        )


Fit = tuple[dict[str, float], tuple[tuple[float, ...], ...]]
"""Parameters and their covariance."""


def fit(observed: Sequence[Result], start: Parameters | None = None, tolerance: float = 1e-7) -> Fit:
    """Return the parameters that results make most plausible, and their covariance.

    Args:
        start: where to begin; the priors if None.
        tolerance: relative change of the loss at which to stop.
    """
    # Imported here: a prediction by the shipped calibration needs neither NumPy nor SciPy.
    import numpy as np
    from scipy.optimize import least_squares

    # A chip parameter for each chip among the results; sorted, so that the covariance has the same order everywhere.
    names = [*PRIORS, *sorted({chip_parameter(result.run.machine.device.chip) for result in observed})]
    mean = np.array([prior_of(name).mean for name in names])
    deviation = np.array([prior_of(name).deviation for name in names])
    alike = Counter(result.kind for result in observed)

    # A numeric derivative moves one parameter, on which few results depend: others' misfits are looked up.
    asked = [_asked_for(result) for result in observed]
    picked = [itemgetter(*map(names.index, each)) for each in asked]

    @lru_cache(maxsize=4 * len(observed))  # most differences of a slope move no parameter of most results
    def misfits(number: int, values: tuple[float, ...]) -> list[float]:
        found = _misfits(dict(zip(asked[number], values, strict=True)), observed[number])
        # Squares are summed, so n alike results with n ** -0.25 each weigh as much as the root of n.
        return [_saturated(value) * alike[observed[number].kind] ** -0.25 for value in found]

    def residuals(x: np.ndarray) -> np.ndarray:
        values = x.tolist()
        found = [value for number, pick in enumerate(picked) for value in misfits(number, pick(values))]
        # Priors are residuals like the others, but without Cauchy's loss.
        return np.concatenate([found, (x - mean) / deviation])

    begin = mean if start is None else np.array([start.get(name, prior_of(name).mean) for name in names])
    solution = least_squares(residuals, begin, x_scale=deviation, diff_step=1e-4, ftol=tolerance, xtol=1e-8)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac)  # as Gauss and Newton take the curvature of the loss
    return dict(zip(names, solution.x.tolist(), strict=True)), tuple(map(tuple, covariance.tolist()))


class _Noting(dict[str, float]):
    """Parameters at their priors, which note those that a prediction asks for."""

    def __missing__(self, name: str) -> float:
        # Noted by asking: what a result depends on follows from the model's code, and no list can be stale.
        return self.setdefault(name, prior_of(name).mean)

    # `p.get(chip, 0.0)` of the cost model asks for a parameter that may be absent: here it counts as asked for.
    def get(self, name: str, _: object = None) -> float:
        return self[name]


@cache
def _asked_for(result: Result) -> tuple[str, ...]:
    """Names of the parameters on which a result depends, whatever their values are."""
    noting = _Noting()
    _misfits(noting, result)
    return tuple(noting)


def _misfits(parameters: Parameters, result: Result) -> list[float]:
    """Return how far a result is from the model, in usual spreads: in time for its samples, and in samples."""
    step = step_time(parameters, result.run)
    log_samples = log_samples_needed(parameters, result.run, step)
    # Of such results only the time is known, whose spread holds that of the samples as well.
    if result.samples is None:
        total = time_of_steps(parameters, result.run, step, math.exp(log_samples)).total
        return [math.log(result.seconds / total) / math.hypot(TIME_SCALE, SAMPLES_SCALE)]
    # The time for the samples that it took, so that both residuals say different things.
    total = time_of_steps(parameters, result.run, step, result.samples).total
    return [math.log(result.seconds / total) / TIME_SCALE, (math.log(result.samples) - log_samples) / SAMPLES_SCALE]


def _saturated(residual: float) -> float:
    """The residual whose square is Cauchy's loss of this one."""
    # Done here and not by the `loss` of least_squares, which would apply to the priors as well.
    return math.copysign(math.sqrt(2 * math.log1p(residual**2 / 2)), residual)


def spread(calibration: Calibration, run: TimedRun) -> float:
    """Standard deviation of the logarithm of a run's time: of results about the model, and of the model's parameters."""
    names = list(calibration.parameters)
    base = math.log(run_time(calibration.parameters, run).total)
    # To first order, what the covariance of the parameters makes of the logarithm of the time.
    slopes = []
    for name in names:
        step = 1e-3
        moved = calibration.parameters | {name: calibration.parameters[name] + step}
        slopes.append((math.log(run_time(moved, run).total) - base) / step)
    variance = sum(
        a * b * c
        for a, row in zip(slopes, calibration.covariance, strict=True)
        for b, c in zip(slopes, row, strict=True)
    )
    # Of an unknown chip only the prior is known.
    if run.machine.device.model not in calibration.models:
        variance += CHIP.deviation**2
    return math.sqrt(variance + TIME_SCALE**2 + SAMPLES_SCALE**2)


@dataclass(frozen=True)
class Held:
    """A result, and what the model that has not seen it says.

    Attributes:
        seconds: predicted.
        spread: standard deviation of its logarithm.
        model_seen, scale_seen: whether the model had results of that model of devices, and at that number of them.
    """

    result: Result
    seconds: float
    spread: float
    model_seen: bool
    scale_seen: bool

    @property
    def deviation(self) -> float:
        """Logarithm of observed over predicted."""
        return math.log(self.result.seconds / self.seconds)

    def is_inside(self, calibration: Calibration) -> bool:
        """Tell whether the result lies in the interval about the prediction."""
        low, high = calibration.bounds(self.model_seen, self.spread)
        return low <= self.deviation <= high


def held_out(group: Callable[[Result], Hashable], start: Parameters) -> list[Held]:
    """Predict every result by a model that has seen no result of its group, for each group in turn."""
    found = []
    # str as key: groups are texts or numbers, and the order only has to be the same in each run.
    for left_out in sorted({group(result) for result in results()}, key=str):
        seen = [result for result in results() if group(result) != left_out]
        # A fit that leaves one group out begins where that of all results ended, and needs fewer digits.
        parameters, covariance = fit(seen, start, tolerance=1e-4)
        models = tuple(sorted({result.run.machine.device.model for result in seen}))
        scales = {(r.run.machine.device.model, r.run.machine.accelerators) for r in seen}
        # Its bounds are not asked for: they come from what is held out.
        calibration = Calibration(parameters, covariance, models, (0, 0), (0, 0), "")
        for result in results():
            if group(result) == left_out:
                machine = result.run.machine
                seconds = run_time(parameters, result.run).total
                is_seen = (machine.device.model, machine.accelerators) in scales
                found.append(
                    Held(result, seconds, spread(calibration, result.run), machine.device.model in models, is_seen)
                )
    return found


GROUPS: dict[str, Callable[[Result], Hashable]] = {
    "submitter": lambda result: result.company,
    "scale": lambda result: result.run.machine.accelerators,
    "accelerator": lambda result: result.run.machine.device.model,
}
"""What is left out at a time."""


def calibrate() -> tuple[Calibration, dict[str, list[Held]]]:
    """Fit the model to all results, and set its intervals by what cross-validation finds: half a minute of a processor."""
    parameters, covariance = fit(results())
    validation = {name: held_out(group, parameters) for name, group in GROUPS.items()}
    # Both leave models that have seen the device, which is what `known` is about.
    seen = [held for name in ("submitter", "scale") for held in validation[name] if held.model_seen]
    known, unknown = _quantiles(seen), _quantiles(validation["accelerator"])
    models = tuple(sorted({result.run.machine.device.model for result in results()}))
    # The table's digest, by which a test sees when the fit is older than its data.
    source = hashlib.sha256(TABLE.read_bytes()).hexdigest()
    return Calibration(parameters, covariance, models, known, unknown, source), validation


def _quantiles(held: Iterable[Held]) -> tuple[float, float]:
    """Bounds of the middle `INTERVAL` of deviations over their spread."""
    ranked = sorted(each.deviation / each.spread for each in held)
    outside = round((1 - INTERVAL) / 2 * len(ranked))
    return ranked[outside], ranked[-1 - outside]


def to_json(calibration: Calibration) -> str:
    """Return the text of `calibration.json`; six digits, of which fits on other machines share most."""

    def short(value: float) -> float:
        return float(f"{value:.6g}")

    document: dict[str, Any] = {
        "made by": "python -m cluster calibrate",
        "source": calibration.source,
        "models": calibration.models,
        "parameters": {
            name: {"value": short(value), "meaning": prior_of(name).meaning}
            for name, value in calibration.parameters.items()
        },
        "known": [short(value) for value in calibration.known],
        "unknown": [short(value) for value in calibration.unknown],
        "covariance": [[short(value) for value in row] for row in calibration.covariance],
    }
    # A row of the matrix a line: json.dumps with an indent would give each number its own.
    head, _, _ = json.dumps(document, indent=1).partition('"covariance": ')
    lines = ",\n  ".join(map(json.dumps, document["covariance"]))
    return f'{head}"covariance": [\n  {lines}\n ]\n}}\n'


@lru_cache
def calibration() -> Calibration:
    """The calibration that is shipped."""
    document = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    return Calibration(
        parameters={name: entry["value"] for name, entry in document["parameters"].items()},
        covariance=tuple(map(tuple, document["covariance"])),
        models=tuple(document["models"]),
        known=tuple(document["known"]),
        unknown=tuple(document["unknown"]),
        source=document["source"],
    )
