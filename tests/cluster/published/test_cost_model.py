"""Reference points and runs of the cost model, and parsed descriptions of networks."""

import pytest

from cluster.devices import describe_machine, device_named
from cluster.published.cost_model import TimedRun
from cluster.published.fitted import REFERENCE_POINTS
from compliance.convergence.outlook import reference


def test_reference_points_equal_those_of_the_rulesets() -> None:
    for ruleset in ("2.1.0", "3.1.0", "5.0.0"):
        for batch, samples in REFERENCE_POINTS:
            found = reference(ruleset, batch)
            assert found is not None
            assert (found.origin, round(found.mean)) == ("exact", samples)


def test_impossible_batches_rounds_and_node_counts_are_refused() -> None:
    device = device_named("A100")
    for batch in (8, 8 * 16384):
        assert TimedRun(describe_machine(device, 1, 8), batch).batch == batch
    for batch in (7, 8 * 16384 + 1):
        with pytest.raises(ValueError, match=f"global batch size {batch:,} on 8 accelerators"):
            TimedRun(describe_machine(device, 1, 8), batch)
    with pytest.raises(ValueError, match=f"^round is '{'x' * 20}', expected one such as v3.1$"):
        TimedRun(describe_machine(device, 1, 8), 8, "x" * 21)
    assert describe_machine(device, 2**20, 1).accelerators == 2**20
    for nodes, per_node in ((0, 8), (-1, 8), (1, 0), (2**20 + 1, 1), (2**10, 2**10 + 1)):
        with pytest.raises(ValueError, match=r"expected 1 to 1,048,576"):
            describe_machine(device, nodes, per_node)


NETWORKS = {
    "Storage: 2x IB HDR 200Gb/sec, Management: 1x Ethernet 100Gb/Sec, Compute: 8x ConnectX-6 IB HDR 200Gb/Sec": "8 x 200",
    "Storage: 2x IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s Ethernet NIC": "8 x 400",
    "Compute: 4 x MT28908 Family [ConnectX-6] HDR 200 Gb/Sec + Management: 1 x [ConnectX-6] 100 GB/s Ethernet": "4 x 200",
    "Management: 1 x 25 Gb / Sec Ethernet, Compute: 1 x ConnectX - 6 IB HDR100 100 Gb / Sec": "1 x 100",
    "1x ConnectX-5 IB EDR": "1 x 100",
    "8x Quantum-X800 XDR": "8 x 800",
    "400 Gbps Infiniband (4x), 10GbE": "4 x 400",
    "NetXtreme BCM5719 Gigabit Ethernet PCIe 4x1Gb": "4 x 1",
    "1x 400Gb/s, 8x 100Gb/s": "8 x 100",
    "0x HDR, 999x 1Gb/s": "1 x 200",
    "65x 10Gb/s": "64 x 10",
}
"""Ports of a node and their Gbit/s by their description."""


def test_descriptions_of_networks_are_parsed_or_else_the_usual_network_is_assumed() -> None:
    unclear = ("", "Ethernet, Infiniband", "0Gb/s", "9" * 10**5 + "x", "NetXtreme BCM5719 Gigabit Ethernet PCIe")
    usual = dict.fromkeys((*unclear, "x" * 1000 + " 8x 100Gb/s"), "8 x 400")
    for text, expected in (NETWORKS | usual).items():
        network = describe_machine(device_named("H100"), 2, 8, networking=text).network
        assert (f"{network.ports} x {network.gbit_s:g}", network.is_assumed) == (expected, text in usual), text
