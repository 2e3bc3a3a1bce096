"""Time to train as a function of the number of accelerators: the best plan for each number, and where the time goes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2, log10
from pathlib import Path

from markupsafe import Markup

from bert.configuration.config import Config
from cluster.devices import Device, describe_machine, devices
from cluster.model.rates import device_of, target_of_devices
from cluster.model.work import wikipedia_work
from cluster.plan.search import Candidate, search
from cluster.published.calibration import calibration
from cluster.published.cost_model import TimedRun, run_time
from cluster.published.prediction import minutes_in_digits
from cluster.published.results import Result, results_of_devices
from console.files import write_atomically
from console.html.charts import Axes, Line, line_chart
from console.html.page import render_page
from console.program import say

LARGEST = 16_384


@dataclass(frozen=True)
class ScalingPoint:
    """A number of accelerators with its best plan.

    Attributes:
        seconds: seconds of the run by cause. The devices' work includes waiting for data, because data loads while the
            devices compute.
        low, high: 80 % interval of the minutes, derived from the spread of published results.
        efficiency: sequences per second per accelerator, relative to a single node.
    """

    accelerators: int
    plan: Candidate
    seconds: dict[str, float]
    low: float
    high: float
    efficiency: float

    @property
    def minutes(self) -> float:
        return self.plan.seconds / 60

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the time to train that each cause takes."""
        return {cause: seconds / self.plan.seconds for cause, seconds in self.seconds.items()}


def draw_scale(
    config: Config, accelerator: str | None, gpus_per_node: int | None, networking: str, out: Path | None
) -> None:
    """Print the best plan for each number of accelerators, and write a page if ``out`` is given."""
    device = device_of(config.recipe, accelerator)
    points = []
    for point in scale(config, device, device.per_node if gpus_per_node is None else gpus_per_node, networking):
        if not points:
            causes = "".join(f"{cause.split()[0]:>11}" for cause in point.shares)
            say(
                f"{device.name:>14}{'batch':>8}  {'precision':<10}{'reduction':<14}{'minutes':>8}{'efficiency':>12}{causes}"
            )
        strategy = point.plan.strategy
        shares = "".join(f" {share:10.1%}" for share in point.shares.values())
        say(
            f"{point.accelerators:14,} {strategy.global_batch_size:7,}  {strategy.precision:<9} {strategy.reduction:<13}"
            f" {point.minutes:8.3g} {point.efficiency:11.0%}{shares}"
        )
        points.append(point)
    if out is not None:
        write_page(config.recipe, device, points, out)
        say(out)


def scale(config: Config, device: Device, per_node: int, networking: str = "") -> Iterator[ScalingPoint]:
    """Plan a recipe for whole nodes in powers of two, from one node to `LARGEST` accelerators.

    Raises ``ValueError`` if a node has more accelerators, the recipe is not of the closed division, or nothing is feasible.
    """
    if not 1 <= per_node <= LARGEST:
        raise ValueError(f"--gpus-per-node is {per_node:,}, expected 1 to {LARGEST:,}")
    if config.log.division != "closed":
        raise ValueError(f"{config.recipe} is not a recipe of the closed division. Use one, such as h100_8x8")
    work = wikipedia_work(config.model)
    first: Candidate | None = None
    nodes = 1
    while nodes * per_node <= LARGEST:
        machine = describe_machine(device, nodes, per_node, networking=networking)
        target = target_of_devices(device, nodes * per_node, per_node, networking)
        plan = search(config, work, target).best[0]
        low, high = calibration().interval(TimedRun(machine, plan.strategy.global_batch_size))
        # A step's records count launches as part of forward and backward. Here launches are a separate cause.
        launches = target.rates[plan.strategy.precision].micro_batch_s * plan.strategy.gradient_accumulation_steps
        parts = plan.run.parts
        seconds = {
            "devices at work": parts["forward_backward"] + parts["data_wait"] - plan.run.steps * launches,
            "launches and small kernels": plan.run.steps * launches,
            "reduction": parts["reduce"],
        } | {cause: parts[cause] for cause in ("update", "evaluation", "start")}
        first = first or plan
        efficiency = plan.run.samples / plan.seconds / nodes / (first.run.samples / first.seconds)
        minutes = plan.seconds / 60
        yield ScalingPoint(nodes * per_node, plan, seconds, low * minutes, high * minutes, efficiency)
        nodes *= 2


def fastest_published(device: Device) -> list[Result]:
    """Return a device's fastest published result for each number of accelerators, in ascending order."""
    # Results with equal numbers of accelerators overwrite one another, and the fastest comes last.
    slowest_first = sorted(results_of_devices(), key=lambda each: each.seconds, reverse=True)
    fastest = {
        each.run.machine.accelerators: each for each in slowest_first if each.run.machine.device.name == device.name
    }
    return [fastest[count] for count in sorted(fastest)]


def write_page(recipe: str, device: Device, points: Sequence[ScalingPoint], path: Path) -> None:
    """Write a page with the curve, the plans, the shares of the time, and every device's published results.

    A failure leaves no partial file.
    """
    p, published = calibration().parameters, {each.name: fastest_published(each) for each in devices()}
    compared = {
        name: [(each.run.machine.accelerators, each.seconds / 60, run_time(p, each.run).total / 60) for each in found]
        for name, found in published.items()
        if found
    }
    known = [(count, minutes) for count, minutes, _ in compared.get(device.name, ()) if count >= points[0].accelerators]
    curve = _chart(
        recipe,
        Line("predicted", [(each.accelerators, each.minutes) for each in points]),
        Line("lower end of the interval", [(each.accelerators, each.low) for each in points], "aborted"),
        Line("upper end of the interval", [(each.accelerators, each.high) for each in points], "aborted"),
        Line("fastest published results", known, "invalid"),
    )
    charts = {
        name: _chart(
            name,
            Line("predicted", [(count, predicted) for count, _, predicted in found]),
            Line("fastest published results", [(count, minutes) for count, minutes, _ in found], "invalid"),
        )
        for name, found in compared.items()
        if len(found) > 1
    }
    page = render_page(
        Path(__file__).with_name("scaling.html"),
        title=f"{recipe} on up to {points[-1].accelerators:,} {device.name}",
        points=points,
        fastest=min(points, key=lambda each: each.minutes),
        published=known,
        curve=curve,
        charts=charts,
        compared=compared,
        minutes=minutes_in_digits,
    )
    write_atomically(path, page.encode())


def _chart(what: str, *lines: Line) -> Markup:
    """Draw lines with points (accelerators, minutes) over logarithmic axes."""
    axes = Axes(
        f"{what}: minutes to train against the number of accelerators",
        "accelerators",
        lambda power: f"{10**power:.3g}",
        x_format=lambda power: f"{2**power:,.0f}",
    )
    logarithms = [replace(line, points=[(log2(x), log10(y)) for x, y in line.points]) for line in lines if line.points]
    return line_chart(logarithms, axes, dots=True)
