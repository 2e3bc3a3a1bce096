"""Predictions on the command line and as JSON."""

import dataclasses
import math
from pathlib import Path

import pytest

from cluster.devices import describe_machine, device_named
from cluster.published.calibration import calibration
from cluster.published.cost_model import TimedRun
from cluster.published.prediction import Prediction, extrapolations, machine_of, minutes_in_digits, predict
from cluster.published.results import nearest
from cluster.view import Link, Rank, View, write_view
from tests.cluster.conftest import Command, Refused
from tests.cluster.test_view import made_up


def predicted(name: str, nodes: int = 1, batch: int = 768) -> Prediction:
    return predict(TimedRun(describe_machine(device_named(name), nodes, 8), batch))


def test_extrapolations_have_a_note_and_a_wider_interval(cluster: Command) -> None:
    unknown = "predicted from its data sheet alone"
    slow = f"no published result of MI300X with its vendor's software: {unknown}"
    notes = {
        "MI300X": [slow],
        "GH200": [f"no published result of GH200-96GB: {unknown}"],
        "MI325X": [f"no published result of MI325X: {unknown}"],
    } | {name: [] for name in ("H100-SXM", "A100-SXM", "H200", "B200", "GB200")}
    runs = {name: predicted(name) for name in notes}
    assert {name: extrapolations(found.run) for name, found in runs.items()} == notes
    widths = {name: run.high / run.low for name, run in runs.items()}
    assert max(width for name, width in widths.items() if name[:2] != "MI") < widths["MI300X"], "GH200 has a known chip"
    assert {result.run.machine.device.chip for result in nearest(runs["GH200"].run)} == {"GH100"}
    assert extrapolations(predicted("H100", 512, 16384).run) == []
    assert extrapolations(predicted("H100", 513, 16385).run) == [
        "no published result of more than 4,096 accelerators",
        "no published result of a global batch size above 16,384",
    ]
    lines = cluster("predict", "--accelerator", "B200", "--nodes", 9).stdout.splitlines()
    assert lines[-1] == "note: the network is assumed: 8 ports of 400 Gbit/s a node (set --networking)"
    lines = cluster("predict", "--accelerator", "MI300X", "--batch", "1024").stdout.splitlines()
    assert lines[-2:] == ["", f"note: {slow}"]
    assert lines[-5].endswith("tinycorp tinybox_8xMI300X (v5.0), with tinygrad, not used for predictions")
    assert not any("tinygrad" in line for line in lines[-4:])


def probed(device: str, hosts: int = 4, gbit_s: float = 300.0) -> View:
    """Return a probe's view of hosts with eight ranks each and one network card per rank."""
    ranks = [Rank(h, r, device, 80 << 30, f"mlx5_{r}", ()) for h in range(hosts) for r in range(8)]
    pairs = [(8 * a, 8 * b) for a in range(hosts) for b in range(hosts) if a != b]
    links = [Link(a, b, 1e-5, 8e-9 / gbit_s) for a, b in pairs] + [Link(0, 1, 1e-6, 1e-12)]
    changes = {"ranks": tuple(ranks), "links": tuple(links), "collectives": (), "outliers": ()}
    return dataclasses.replace(made_up(hosts, 1), **changes)


def test_a_machine_from_a_probe_has_the_measured_devices_and_network(
    tmp_path: Path, cluster: Command, refused: Refused
) -> None:
    name = "NVIDIA H100 80GB HBM3"
    machine = machine_of(probed(name))
    assert (machine.device.name, machine.nodes, machine.per_node) == ("H100-SXM-80GB", 4, 8)
    nominal = 300 / math.exp(calibration().parameters["network_efficiency"])
    network = machine.network
    assert (network.ports, network.gbit_s, network.is_assumed) == (8, pytest.approx(nominal), False)
    assert machine_of(probed(name, hosts=1)).network.is_assumed
    described = describe_machine(machine.device, 4, 8, networking="8x IB NDR 400Gb/s")
    machines = (machine_of(probed(name, gbit_s=390)), described, machine_of(probed(name, gbit_s=20)))
    fast, usual, slow = (predict(TimedRun(each, 3072)).minutes for each in machines)
    assert fast < usual * 1.02 < 1.2 * usual < slow
    file = tmp_path / "cluster.json"
    write_view(probed(name), file)
    assert "--accelerator" in refused("predict", "--cluster", file, "--accelerator", "H100")
    assert cluster("predict", "--cluster", file).stdout.startswith("32 x H100-SXM-80GB, 4 nodes")
    for unknown in ("CPU", "AMD EPYC"):
        with pytest.raises(ValueError, match=unknown):
            machine_of(probed(unknown))
    for count, shown in ((2, "0, H100 1"), (8, "0, H100 1, H100 2, H100 3")):
        mixed = (dataclasses.replace(rank, device=f"H100 {rank.place % count}") for rank in probed(name).ranks)
        with pytest.raises(ValueError, match=f"^the probe measured H100 {shown}, expected accelerators of one kind$"):
            machine_of(dataclasses.replace(probed(name), ranks=tuple(mixed)))


def test_minutes_have_three_digits_and_at_most_four_decimals() -> None:
    shown = {0.0: "0.00", 1.2e-4: "0.0001", 0.01234: "0.0123", 0.1234: "0.123", 1.234: "1.23", 123.4: "123"}
    assert {minutes: minutes_in_digits(minutes) for minutes in [*shown, 1234.5]} == shown | {1234.5: "1,234"}
