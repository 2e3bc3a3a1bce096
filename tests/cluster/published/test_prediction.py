"""Predictions on the command line and as JSON."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.devices import describe_machine, device_named, devices
from cluster.published.cost_model import TimedRun
from cluster.published.prediction import PARTS, Prediction, machine_of, predict, usual_run
from cluster.published.results import results
from cluster.view import Link, Rank, View, write_view
from tests.cluster.conftest import Command
from tests.cluster.test_view import made_up


@given(
    st.sampled_from(devices()),
    st.sampled_from([1, 2, 8, 64, 434, 1024]),
    st.sampled_from([1, 2, 4, 8, 72]),
    st.sampled_from(["v2.0", "v3.1", "v5.0"]),
)
def test_an_interval_holds_its_prediction(device, nodes, per_node, round) -> None:
    prediction = predict(usual_run(describe_machine(device, nodes, per_node), round))
    assert 0 < prediction.low < prediction.minutes < prediction.high < math.inf
    assert prediction.run.batch >= nodes * per_node


def predicted(name: str, nodes: int = 1, batch: int = 768) -> Prediction:
    return predict(TimedRun(describe_machine(device_named(name), nodes, 8), batch))


def test_what_is_extrapolated_is_said_and_has_a_wider_interval() -> None:
    runs = {name: predicted(name) for name in ("H100-SXM", "A100-SXM", "H200", "B200", "GB200", "MI300X")}
    assert [name for name, run in runs.items() if run.extrapolates] == ["MI300X"]
    widths = [run.high / run.low for run in runs.values()]
    assert max(widths[:-1]) < widths[-1]
    sibling = predicted("GH200")
    assert sibling.extrapolates
    assert sibling.high / sibling.low < widths[-1], "its chip is known from H100"
    assert {result.run.machine.device.chip for result in sibling.near} == {"GH100"}
    assert "MI300X" in runs["MI300X"].extrapolates[0]
    assert "16,384" in predicted("H100", 1, 32768).extrapolates[0]
    assert "4,096" in predicted("H100", 1024, 16384).extrapolates[0]


def test_a_result_that_tells_little_about_its_device_is_marked(cluster: Command) -> None:
    lines = cluster("predict", "--accelerator", "MI300X", "--batch", "1024").stdout.splitlines()
    assert [line for line in lines if "tinybox" in line and "tinygrad" in line]
    assert [line for line in lines if "data sheet" in line and "vendor's software" in line]
    assert "vendor's software" not in predicted("MI325X").extrapolates[0]


def test_the_nearest_result_of_a_published_system_is_one_of_its_kind() -> None:
    for result in results():
        near = predict(TimedRun(result.run.machine, result.run.batch, result.run.round)).near[0]
        assert near.run.machine.device.model == result.run.machine.device.model
        assert near.run.machine.accelerators == result.run.machine.accelerators


def test_json_has_the_prediction_and_its_parts(cluster: Command) -> None:
    arguments = ("predict", "--accelerator", "A100-SXM", "--nodes", "8", "--batch", "3072")
    document = json.loads(cluster(*arguments, "--json").stdout)
    assert document["low"] < document["minutes"] < document["high"]
    assert set(document["parts"]) == set(PARTS)
    assert sum(document["parts"].values()) == pytest.approx(document["minutes"])
    assert document["minutes"] == predicted("A100-SXM", 8, 3072).minutes


def probed(device: str, hosts: int = 4, gbit_s: float = 300.0) -> View:
    """Return a probe's view of hosts with eight ranks each and one network card per rank."""
    ranks = [Rank(h, r, device, 80 << 30, f"mlx5_{r}", ()) for h in range(hosts) for r in range(8)]
    pairs = [(8 * a, 8 * b) for a in range(hosts) for b in range(hosts) if a != b]
    links = [Link(a, b, 1e-5, 8e-9 / gbit_s) for a, b in pairs] + [Link(0, 1, 1e-6, 1e-12)]
    changes = {"ranks": tuple(ranks), "links": tuple(links), "collectives": (), "outliers": ()}
    return dataclasses.replace(made_up(hosts, 1), **changes)


def test_a_probed_machine_has_its_devices_and_its_measured_network(
    tmp_path: Path, cluster: Command, refused: Callable[..., str]
) -> None:
    name = "NVIDIA H100 80GB HBM3"
    machine = machine_of(probed(name))
    assert (machine.device.name, machine.nodes, machine.per_node) == ("H100-SXM-80GB", 4, 8)
    assert (machine.network.ports, machine.network.is_assumed) == (8, False)
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
