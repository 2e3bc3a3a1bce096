"""Data-sheet figures of accelerators, and recognition of accelerators and networks by their descriptions."""

import json
import re

import pytest

from cluster.devices import describe_machine, device_named, devices, form
from cluster.published.prediction import PARTS
from tests.cluster.conftest import Command
from tests.programs import REPOSITORY


def test_device_facts_are_plausible_and_their_names_unique() -> None:
    for device in devices():
        if device.fp8_tflops is not None and device.name != "Gaudi3":  # as fast in bf16 as in FP8
            assert 1.9 < device.fp8_tflops / device.bf16_tflops < 2.1, device.name
        assert 0 < device.bf16_tflops < 2600
        assert 0 < device.link_gb_s <= 900
        assert 0.5 < device.memory_gb_s / 1000 < 10 or device.form in ("PCIe", "CPU"), device.name
        assert device.source.strip()
        assert device_named(device.name) is device


def test_the_form_factor_is_parsed_from_names_of_accelerators() -> None:
    forms = {"NVIDIA H100 80GB HBM3": "SXM", "NVIDIA A100-SXM4-80GB": "SXM", "NVIDIA H100 NVL": "NVL"}
    forms |= {"NVIDIA H100 PCIe": "PCIe", "NVIDIA A100 - PCIe - 80 GB": "PCIe", "NVIDIA GH200 480GB": None, "N/A": None}
    assert {name: form(name) for name in forms} == forms


NAMES = """
NVIDIA H100 80GB HBM3: H100-SXM-80GB | NVIDIA H100 PCIe: H100-PCIe-80GB | NVIDIA A100-SXM4-80GB (400W): A100-SXM-80GB
NVIDIA A100-SXM4-40GB: A100-SXM-40GB | NVIDIA A100 - PCIe - 80 GB: A100-PCIe-80GB | NVIDIA GB200: GB200-186GB
gb200 nvl72: GB200-186GB | NVIDIA Blackwell GPU (GB200): GB200-186GB | NVIDIA GH200 480GB: GH200-96GB
Intel® Gaudi® 2 AI accelerator: Gaudi2 | NVIDIA B200-SXM-192GB: B200-SXM-180GB | NVIDIA B200: B200-SXM-180GB
CPU: Xeon-8480+ | NVIDIA H800: H800-SXM-80GB | NVIDIA H20: H20-SXM-96GB | h20: H20-SXM-96GB
NVIDIA H200: H200-SXM-141GB | NVIDIA A800-SXM4-80GB: A800-SXM-80GB | NVIDIA A40: A40 | NVIDIA L4: L4 | NVIDIA L40: L40
NVIDIA L40S: L40S | NVIDIA RTX A5000: RTX A5000 | NVIDIA RTX 6000 Ada Generation: RTX 6000 Ada
rtx6000-ada: RTX 6000 Ada | NVIDIA GeForce RTX 4090: RTX 4090 | rtx4090: RTX 4090 | 4090: RTX 4090
AMD Radeon RX 7900 XTX: RX 7900 XTX | 7900xtx: RX 7900 XTX | rx7900xtx: RX 7900 XTX
NVIDIA B300 SXM6 AC: B300-SXM-270GB | NVIDIA GB300: GB300-279GB | AMD Instinct MI350X: MI350X
AMD Instinct MI355X 288GB HBM3e: MI355X | Intel Gaudi 3: Gaudi3
"""
"""Names as drivers, system descriptions and people write them, each with its device."""


def test_names_in_use_are_recognised() -> None:
    pairs = [pair.strip().split(": ") for line in NAMES.strip().splitlines() for pair in line.split("|")]
    assert [(name, device_named(name).name) for name, _ in pairs] == [(name, device) for name, device in pairs]


def test_the_table_of_cluster_md_equals_the_device_facts() -> None:
    page = (REPOSITORY / "docs/cluster.md").read_text(encoding="utf-8")
    for name in ("H200-SXM-141GB", "B200-SXM-180GB", "GB200-186GB"):
        device = device_named(name)
        rates = f"{device.bf16_tflops:,.0f}, {device.fp8_tflops:,.0f}"
        memory = f"{device.memory_gb} GB, {device.memory_gb_s:,} GB/s"
        joined = device.link_domain or device.per_node
        facts = f"| {rates} | {memory} | {device.link_gb_s} GB/s | {device.per_node} | {joined} |"
        assert re.search(rf"^\| {name}\b[^|]* {re.escape(facts)}$", page, re.MULTILINE), name


NEAREST = {
    "NVIDIA H1000": "H100-SXM-80GB, H100-PCIe-80GB, H800-SXM-80GB",
    "NVIDIA H800 PCIe": "H800-SXM-80GB",
    "NVIDIA A800 80GB PCIe": "A800-SXM-80GB",
    "HABANA GAUDI": "Gaudi3, Gaudi2, RTX 6000 Ada",
}
ALIKE = ("4090 D", "4090 Laptop GPU", "A4000", "A6000", "PRO 6000 Blackwell Server Edition")
"""Ends of RTX card names that resemble a known card but must not match it."""


def test_an_unknown_name_is_refused_with_the_nearest_names() -> None:
    for name, nearest in NEAREST.items():
        said = f"accelerator {name!r} is unknown; nearest: {nearest}; `python -m cluster devices` lists all"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            device_named(name)
    for name in ("", "A100X", "Quadro RTX 6000", "AMD Radeon RX 7900 XT", *(f"NVIDIA RTX {end}" for end in ALIKE)):
        with pytest.raises(ValueError, match=f"^accelerator '{name}' is unknown"):
            device_named(name)
    with pytest.raises(ValueError, match=f"'{'x' * 200}' is unknown"):
        device_named("x" * 201)


MACHINES = {
    ("A100-SXM", 1, 8): (8, 200, 8, 1),
    ("H100-SXM", 2, 8): (8, 400, 8, 2),
    ("A30", 3, 4): (1, 100, 4, 3),
    ("CPU", 3, 2): (1, 100, 2, 3),
    ("GB200", 2, 4): (4, 400, 8, 1),
    ("GB200", 19, 4): (4, 400, 72, 2),
}
"""(Ports per node, Gbit/s per port, devices per group, groups) by (accelerator, nodes, devices per node)."""


def test_a_machine_without_a_description_has_the_usual_network_and_groups() -> None:
    for (name, nodes, per_node), expected in MACHINES.items():
        machine = describe_machine(device_named(name), nodes, per_node)
        assert (machine.network.ports, machine.network.gbit_s, machine.group, machine.groups) == expected
        assert (machine.network.is_assumed, machine.accelerators) == (True, nodes * per_node)
        bridged = [describe_machine(machine.device, 1, 2, text).is_bridged for text in ("PCIe", "NVLink", "bridge")]
        assert bridged == [False, name == "A30", name == "A30"]


def test_the_default_node_has_the_vendors_number_of_devices(cluster: Command) -> None:
    for name, per_node in {"GB200": 4, "GB300 NVL72": 4, "GH200": 1, "B200": 8, "CPU": 2}.items():
        for options, expected in (((), per_node), (("--gpus-per-node", 2), 2)):
            done = cluster("predict", "--accelerator", name, "--nodes", 18, *options, "--json")
            document = json.loads(done.stdout)
            assert (document["nodes"], document["accelerators_per_node"]) == (18, expected)
            minutes = document["minutes"]
            assert document["low"] < minutes < document["high"]
            assert (sum(document["parts"].values()), {*document["parts"]}) == (pytest.approx(minutes), {*PARTS})


def test_the_command_lists_the_figures_of_each_device(cluster: Command) -> None:
    lines = [line.split(";")[0].split() for line in cluster("devices").stdout.splitlines()]
    assert len(lines) == 1 + len(devices())
    for figures in ("A100-SXM-80GB 312 - 80 2039 300 32 400 8", "GB200-186GB 2500 5000 186 8000 900 450 1200 4"):
        assert figures.split() in [line[:9] for line in lines]


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
"""Ports per node and Gbit/s per port, by the description of the network."""


def test_descriptions_of_networks_are_parsed_or_else_the_usual_network_is_assumed() -> None:
    unclear = ("", "Ethernet, Infiniband", "0Gb/s", "9" * 10**5 + "x", "NetXtreme BCM5719 Gigabit Ethernet PCIe")
    usual = dict.fromkeys((*unclear, "x" * 1000 + " 8x 100Gb/s"), "8 x 400")
    for text, expected in (NETWORKS | usual).items():
        network = describe_machine(device_named("H100"), 2, 8, networking=text).network
        assert (f"{network.ports} x {network.gbit_s:g}", network.is_assumed) == (expected, text in usual), text
