"""Fit of the cost model to published results, and the accuracy of its predictions.

Each result yields two observations: the time for its samples, and the number of samples. A Cauchy loss limits the influence
of badly configured systems and badly chosen recipes. Several results of one system and recipe each get less weight.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from cluster.published.cost_model import TimedRun, log_samples_needed, run_time, step_parts
from cluster.published.fitted import BATCH_KNOTS, Parameters, chip_parameter
from cluster.published.results import TABLE, Result, results_of_devices

CALIBRATION = Path(__file__).with_name("calibration.json")

TIME_SCALE, SAMPLES_SCALE = 0.03, 0.03
"""Typical standard deviations of two logarithms: of the time for a given number of training samples, and of the number of
samples to the target."""

INTERVAL = 0.8
"""Share of results that prediction intervals should contain."""


@dataclass(frozen=True)
class Prior:
    """Normal distribution of a parameter before any result is seen, and the meaning of the parameter."""

    mean: float
    deviation: float
    meaning: str


PRIORS = {
    "matrix_efficiency": Prior(math.log(0.65), 0.2, "share of the peak rate that 16-bit matrix products reach"),
    "fp8_efficiency": Prior(math.log(0.75), 0.25, "share of `matrix_efficiency` that 8-bit products reach"),
    "traffic": Prior(math.log(1.2e9), 0.4, "bytes of memory traffic of a sequence that no product hides"),
    "energy": Prior(math.log(1.1), 0.3, "joules of a sequence in 16 bits on an architecture of 2020"),
    "fp8_energy": Prior(math.log(0.65), 0.2, "energy of an 8-bit product over that of a 16-bit product"),
    "energy_halving": Prior(math.log(6.0), 0.4, "years in which the energy of a sequence halves"),
    "graphics_memory": Prior(0.2, 0.2, "slowdown of devices with GDDR memory"),
    "processor": Prior(math.log(0.2), 0.5, "speed of a CPU relative to an accelerator with the same data sheet"),
    "half_batch": Prior(math.log(1.5), 0.7, "sequences of a micro-batch that keep the device half busy"),
    "launch": Prior(math.log(5e-3), 0.6, "seconds of a micro-batch that do not depend on its size"),
    "fabric_efficiency": Prior(math.log(0.6), 0.3, "share of its bandwidth that NVLink or a similar fabric reaches"),
    "pcie_efficiency": Prior(math.log(0.4), 0.4, "share of its bandwidth that PCIe between devices reaches"),
    "overlap": Prior(math.log(0.5), 0.3, "share of the backward pass during which the reduction in the node runs"),
    "tail": Prior(math.log(0.3), 0.3, "share of the reduction in the node that nothing hides"),
    "network_efficiency": Prior(math.log(0.7), 0.25, "share of its bandwidth that a network port reaches"),
    "staging_efficiency": Prior(math.log(0.35), 0.25, "share of PCIe's bandwidth to a port that several devices share"),
    "network_latency": Prior(math.log(2e-4), 1.0, "seconds that each doubling of the nodes adds to a step"),
    "start": Prior(math.log(0.7), 0.7, "seconds from the start of the clock to the first full step"),
    "old_software": Prior(0.03, 0.03, "slowdown of the software of rounds up to v2.0"),
    "first_round": Prior(0.12, 0.05, "slowdown of a device in its first round"),
    "old_recipe": Prior(0.08, 0.04, "extra samples of the recipes of rounds up to v2.0"),
    "old_recipe_growth": Prior(0.03, 0.03, "further such samples for each doubling of the batch above 448"),
    "accumulation": Prior(0.08, 0.05, "extra samples for each doubling of the batch beyond what memory holds"),
    "tuning": Prior(0.05, 0.03, "extra samples for each doubling of the run time above 17 minutes, for few trials"),
} | {
    f"practice_{batch}": Prior(0.0, 0.05, f"samples of published runs over the reference at a batch size of {batch}")
    for batch in BATCH_KNOTS
}

CHIP = Prior(0.0, 0.12, "speed of a chip relative to what the other parameters predict")
"""Prior of the parameter ``chip_NAME`` for each chip in the published results. For other chips the parameter is 0."""


def prior_of(name: str) -> Prior:
    return PRIORS.get(name, CHIP)


@dataclass(frozen=True)
class Calibration:
    """Parameters of the cost model, fitted to published results.

    Attributes:
        covariance: Covariance of the parameters, in their order.
        models: Accelerator models among the results.
        known, unknown: Bounds of log(observed / predicted time), in units of `spread`. They contain `INTERVAL` of the
            results. ``known`` is for accelerators among the results, and ``unknown`` for all others.
        source: SHA-256 of the table of results.
    """

    parameters: dict[str, float]
    covariance: tuple[tuple[float, ...], ...]
    models: tuple[str, ...]
    known: tuple[float, float]
    unknown: tuple[float, float]
    source: str

    def interval(self, run: TimedRun) -> tuple[float, float]:
        """Return the interval's bounds divided by the predicted time. A share `INTERVAL` of results lies between them."""
        low, high = self.bounds(run.machine.device.model in self.models, spread(self.parameters, self.covariance, run))
        return math.exp(low), math.exp(high)

    def bounds(self, model_seen: bool, spread: float) -> tuple[float, float]:
        """Return the logarithms of the interval's factors."""
        known = self.known[0] * spread, self.known[1] * spread
        if model_seen:
            return known
        # An accelerator known only by its data sheet gets the wider interval.
        usual = math.hypot(TIME_SCALE, SAMPLES_SCALE)
        low, high = self.unknown
        return min(low * spread, self.known[0] * usual), max(high * spread, self.known[1] * usual)


def spread(parameters: Parameters, covariance: Sequence[Sequence[float]], run: TimedRun) -> float:
    """Return the standard deviation of log(run time), from the scatter of results and the uncertainty of the parameters."""

    def log_time(parameters: Parameters) -> float:
        return math.log(run_time(parameters, run).total)

    base, step = log_time(parameters), 1e-3
    moved = ({**parameters, name: value + step} for name, value in parameters.items())
    slopes = np.array([(log_time(each) - base) / step for each in moved])
    variance = float(slopes @ np.array(covariance) @ slopes)
    # If no result has this chip, its parameter has the uncertainty of its prior.
    if chip_parameter(run.machine.device.chip) not in parameters:
        variance += CHIP.deviation**2
    return math.sqrt(variance + TIME_SCALE**2 + SAMPLES_SCALE**2)


def fit(
    observed: Sequence[Result], start: Parameters | None = None, tolerance: float = 1e-7
) -> tuple[dict[str, float], tuple[tuple[float, ...], ...]]:
    """Return the most plausible parameters given the results, and their covariance.

    The search begins at ``start``, or at the priors if None. It stops when the relative change of the loss is below
    ``tolerance``.
    """
    from scipy.optimize import least_squares  # slow to import, and predictions do not need it

    names = [*PRIORS, *sorted({chip_parameter(result.run.machine.device.chip) for result in observed})]
    mean = np.array([prior_of(name).mean for name in names])
    deviation = np.array([prior_of(name).deviation for name in names])
    alike = Counter(result.kind for result in observed)
    by_run: dict[TimedRun, list[Result]] = defaultdict(list)
    for result in observed:
        by_run[result.run].append(result)
    # The loss squares residuals, so a factor of n ** -0.25 on each of n equal results gives them a total weight of n ** 0.5.
    weights = {run: alike[results[0].kind] ** -0.25 for run, results in by_run.items()}

    def residuals(x: np.ndarray) -> np.ndarray:
        parameters = dict(zip(names, x.tolist(), strict=True))
        misfits = ((run, misfit) for run, results in by_run.items() for misfit in _misfits(parameters, run, results))
        return np.concatenate([[_cauchy(misfit) * weights[run] for run, misfit in misfits], (x - mean) / deviation])

    begin = mean if start is None else np.array([start.get(name, prior_of(name).mean) for name in names])
    solution = least_squares(residuals, begin, x_scale=deviation, diff_step=1e-4, ftol=tolerance, xtol=1e-8)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac)
    return dict(zip(names, solution.x.tolist(), strict=True)), tuple(map(tuple, covariance.tolist()))


def _misfits(parameters: Parameters, run: TimedRun, results: Iterable[Result]) -> Iterator[float]:
    """Yield the deviations of a run's results from the model: times and samples, in units of their typical scatter."""
    step = step_parts(parameters, run)
    log_samples = log_samples_needed(parameters, run, step)
    for result in results:
        # Predict the time for the samples that the result actually took, so that the two residuals are independent.
        total = run_time(parameters, run, result.samples, step).total
        if result.samples is None:
            yield math.log(result.seconds / total) / math.hypot(TIME_SCALE, SAMPLES_SCALE)
        else:
            yield math.log(result.seconds / total) / TIME_SCALE
            yield (math.log(result.samples) - log_samples) / SAMPLES_SCALE


def _cauchy(residual: float) -> float:
    """Return the residual whose square is the Cauchy loss of ``residual``. Priors keep a quadratic loss."""
    return math.copysign(math.sqrt(2 * math.log1p(residual**2 / 2)), residual)


@dataclass(frozen=True)
class Held:
    """A result, and its prediction by a fit that left the result out.

    Attributes:
        seconds: Predicted time.
        spread: Standard deviation of the logarithm of the predicted time.
        model_seen, scale_seen: Whether the fit had results with this accelerator, and with this number of accelerators.
    """

    result: Result
    seconds: float
    spread: float
    model_seen: bool
    scale_seen: bool

    @property
    def deviation(self) -> float:
        """Logarithm of observed time over predicted time."""
        return math.log(self.result.seconds / self.seconds)

    def is_inside(self, calibration: Calibration) -> bool:
        low, high = calibration.bounds(self.model_seen, self.spread)
        return low <= self.deviation <= high


GROUPS: dict[str, Callable[[Result], Hashable]] = {
    "submitter": lambda result: result.company,
    "round": lambda result: result.run.round,
    "scale": lambda result: result.run.machine.accelerators,
    "accelerator": lambda result: result.run.machine.device.model,
}
"""Keys that group the results. Cross-validation leaves out one group at a time."""


def held_out(group: Callable[[Result], Hashable], start: Parameters) -> list[Held]:
    """Predict every result by a fit that leaves out all results of the same group."""
    found = []
    for left_out in sorted({group(result) for result in results_of_devices()}, key=str):
        seen = [result for result in results_of_devices() if group(result) != left_out]
        parameters, covariance = fit(seen, start, tolerance=1e-4)
        models, scales = _models(seen), {(r.run.machine.device.model, r.run.machine.accelerators) for r in seen}
        for result in results_of_devices():
            if group(result) == left_out:
                model, scale = result.run.machine.device.model, result.run.machine.accelerators
                seconds, deviation = run_time(parameters, result.run).total, spread(parameters, covariance, result.run)
                found.append(Held(result, seconds, deviation, model in models, (model, scale) in scales))
    return found


def calibrate() -> tuple[Calibration, dict[str, list[Held]]]:
    """Fit the model to all results and set its intervals by cross-validation. This takes half a minute."""
    parameters, covariance = fit(results_of_devices())
    validation = {name: held_out(group, parameters) for name, group in GROUPS.items()}
    seen = [held for name in ("submitter", "scale") for held in validation[name] if held.model_seen]
    known, unknown = _quantiles(seen), _quantiles(validation["accelerator"])
    # Comparing this digest with the table's detects a fit that is older than its data.
    source = hashlib.sha256(TABLE.read_bytes()).hexdigest()
    return Calibration(parameters, covariance, _models(results_of_devices()), known, unknown, source), validation


def _models(observed: Iterable[Result]) -> tuple[str, ...]:
    return tuple(sorted({result.run.machine.device.model for result in observed}))


def _quantiles(held: Iterable[Held]) -> tuple[float, float]:
    """Return the bounds of the middle `INTERVAL` of the deviations, in units of their spread."""
    ranked = sorted(each.deviation / each.spread for each in held)
    outside = round((1 - INTERVAL) / 2 * len(ranked))
    return ranked[outside], ranked[-1 - outside]


@lru_cache
def calibration() -> Calibration:
    return msgspec.json.decode(CALIBRATION.read_bytes(), type=Calibration)
