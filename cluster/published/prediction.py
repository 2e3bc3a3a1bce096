"""Prediction of the time to train, with its parts, an interval, and the most similar published results."""

import math
import statistics
from dataclasses import dataclass, replace

from cluster.devices import Machine, Network, describe_machine, device_named
from cluster.published.calibration import INTERVAL, calibration
from cluster.published.cost_model import LAST_ROUND, RunTime, TimedRun, run_time
from cluster.published.results import SLOW_FRAMEWORK, nearest, results, usual_batches
from cluster.view import View
from console.text import counted

PARTS = {
    "matrix": "matrix products",
    "memory": "memory traffic",
    "power": "power limit",
    "launch": "launches and small kernels",
    "inside": "reduction in the node",
    "between": "reduction between nodes",
    "update": "LAMB",
    "evaluation": "evaluation",
    "start": "start",
}


@dataclass(frozen=True)
class Prediction:
    """A predicted time to train, with the bounds of its interval in minutes."""

    run: TimedRun
    time: RunTime
    low: float
    high: float

    @property
    def minutes(self) -> float:
        """Minutes from run_start to run_stop."""
        return self.time.total / 60


def predict(run: TimedRun) -> Prediction:
    time = run_time(calibration().parameters, run)
    low, high = calibration().interval(run)
    return Prediction(run, time, time.total / 60 * low, time.total / 60 * high)


def usual_run(machine: Machine, round: str = LAST_ROUND) -> TimedRun:
    """Return the machine's fastest run among the batch sizes that were published at the nearest scales."""
    runs = [TimedRun(machine, batch, round) for batch in usual_batches(machine.accelerators)]
    return min(runs, key=lambda run: run_time(calibration().parameters, run).total)


def machine_of(view: View) -> Machine:
    """Return the machine that a probe measured: its accelerators, and the median rate of paths between its hosts."""
    names = sorted({rank.device for rank in view.ranks})
    device = device_named(names[0])
    if len(names) > 1 or device.form == "CPU":
        raise ValueError(f"the probe measured {', '.join(names[:4])}, expected accelerators of one kind")
    machine = describe_machine(device, len(view.hosts), len(view.ranks) // len(view.hosts))
    links = view.links_of(between_hosts=True)
    if not links:
        return machine
    gbit_s = 8e-9 / statistics.median(link.seconds_per_byte for link in links)
    # The cost model multiplies nominal rates by the network's efficiency. A measured rate includes it, so divide by it here.
    nominal = gbit_s / math.exp(calibration().parameters["network_efficiency"])
    ports = len({(rank.host, rank.card) for rank in view.ranks}) // len(view.hosts)
    return replace(machine, network=Network(max(1, ports), nominal))


def extrapolations(run: TimedRun) -> list[str]:
    """Return a sentence for each respect in which a run lies outside all published results."""
    largest = max(result.run.machine.accelerators for result in results())
    largest_batch = max(result.run.batch for result in results())
    found = []
    if run.machine.device.model not in calibration().models:
        is_slow = any(result.run.machine.device.model == run.machine.device.model for result in results())
        software = " with its vendor's software" if is_slow else ""
        found.append(f"no published result of {run.machine.device.name}{software}: predicted from its data sheet alone")
    if run.machine.accelerators > largest:
        found.append(f"no published result of more than {largest:,} accelerators")
    if run.batch > largest_batch:
        found.append(f"no published result of a global batch size above {largest_batch:,}")
    return found


def as_document(prediction: Prediction) -> dict[str, object]:
    """Return a prediction as a JSON document. Times are in minutes."""
    run, time = prediction.run, prediction.time
    return {
        "accelerator": run.machine.device.name,
        "nodes": run.machine.nodes,
        "accelerators_per_node": run.machine.per_node,
        "global_batch_size": run.batch,
        "minutes": prediction.minutes,
        "low": prediction.low,
        "high": prediction.high,
        "parts": {name: seconds / 60 for name, seconds in time.parts.items()},
        "samples": time.samples,
        "extrapolates": extrapolations(run),
    }


def as_lines(prediction: Prediction) -> list[str]:
    run, machine, time = prediction.run, prediction.run.machine, prediction.time
    minutes, low, high = map(minutes_in_digits, (prediction.minutes, prediction.low, prediction.high))
    lines = [
        f"{machine.accelerators:,} x {machine.device.name}, {counted(machine.nodes, 'node')}, global batch size "
        f"{run.batch:,}, {'FP8' if run.uses_fp8 else 'bf16'}",
        f"{minutes} min to 0.720, {INTERVAL:.0%} between {low} and {high}",
        f"{time.samples / 1e6:.2f} million samples, {counted(round(time.steps), 'step')}, "
        f"{time.samples / time.total / machine.accelerators:,.0f} sequences/s on each accelerator",
        "",
    ]
    for name, seconds in sorted(time.parts.items(), key=lambda part: -part[1]):
        lines.append(f"{PARTS[name]:28}{minutes_in_digits(seconds / 60):>9} min{seconds / time.total:8.1%}")
    lines += ["", "published nearby:"]
    for result in nearest(run):
        there = result.run.machine
        lines.append(
            f"{minutes_in_digits(result.seconds / 60):>9} min  {there.nodes} x {there.per_node} {there.device.name}, "
            f"batch {result.run.batch:,}: {result.submitter} {result.system} ({result.run.round})"
            f"{'' if result.tells_device else f', with {SLOW_FRAMEWORK}, not used for predictions'}"
        )
    notes = extrapolations(run)
    network = machine.network
    if machine.groups > 1 and network.is_assumed and machine.device.network_gb_s is None:
        ports = counted(network.ports, "port")
        notes.append(f"the network is assumed: {ports} of {network.gbit_s:.0f} Gbit/s a node (set --networking)")
    return lines + ([""] if notes else []) + [f"note: {note}" for note in notes]


def minutes_in_digits(minutes: float) -> str:
    """Format minutes with three significant digits, and at most four decimals."""
    decimals = max(0, 2 - math.floor(math.log10(minutes))) if minutes > 0 else 2
    return f"{minutes:,.{min(decimals, 4)}f}"
