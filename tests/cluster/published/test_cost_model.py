"""The fitted cost model: physically plausible predictions, and parsed descriptions of networks."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.devices import Device, Machine, describe_machine, device_named, devices
from cluster.published.cost_model import TimedRun, run_time, step_parts
from cluster.published.fitted import BATCH_KNOTS, REFERENCE_POINTS, SEQUENCE_FLOPS, fitted_parameters
from compliance.convergence.outlook import reference

P = fitted_parameters()
FAST = "8x ConnectX-7 IB NDR 400Gb/s"
BATCHES = sorted({*BATCH_KNOTS, 4096, 6144, 12288})
KNOWN = st.sampled_from(devices())
NODES = st.sampled_from([1, 2, 3, 8, 18, 64, 434])


def seconds(device: Device, nodes: int, batch: int, per_node: int = 8, networking: str = FAST) -> float:
    return run_time(P, TimedRun(describe_machine(device, nodes, per_node, networking=networking), batch)).total


def changed(device: Device, field: str, factor: float) -> Device:
    value = getattr(device, field)
    return device if value is None else dataclasses.replace(device, **{field: value * factor})


@given(KNOWN, NODES, st.sampled_from(BATCHES))
def test_parts_sum_to_the_whole_and_none_is_negative(device: Device, nodes: int, batch: int) -> None:
    run = TimedRun(describe_machine(device, nodes, 8), max(batch, 8 * nodes))
    time = run_time(P, run)
    assert all(part >= 0 for part in time.parts.values())
    assert sum(time.parts.values()) == pytest.approx(time.total)
    assert time.steps * run.batch == pytest.approx(time.samples)
    step = sum(step_parts(P, run).values())
    assert step * time.steps + time.parts["evaluation"] + time.parts["start"] == pytest.approx(time.total)


@pytest.mark.parametrize(
    "field", ["bf16_tflops", "fp8_tflops", "memory_gb_s", "memory_gb", "link_gb_s", "host_gb_s", "tdp_w"]
)
@given(KNOWN, NODES, st.sampled_from(BATCHES))
def test_a_better_device_is_never_slower(field: str, device: Device, nodes: int, batch: int) -> None:
    batch = max(batch, 8 * nodes)
    assert seconds(changed(device, field, 2), nodes, batch) <= seconds(device, nodes, batch) * (1 + 1e-9)


@given(KNOWN, NODES, st.sampled_from(BATCHES))
def test_a_faster_network_is_never_slower(device: Device, nodes: int, batch: int) -> None:
    batch = max(batch, 8 * nodes)
    times = [seconds(device, nodes, batch, networking=f"8x IB {rate}Gb/s") for rate in (100, 200, 400, 800)]
    assert times == sorted(times, reverse=True)
    ports = [seconds(device, nodes, batch, networking=f"{count}x IB 200Gb/s") for count in (1, 2, 4, 8)]
    assert ports == sorted(ports, reverse=True)


@pytest.mark.parametrize("name", ["A100-SXM", "H100-SXM", "H200", "B200", "MI300X"])
@pytest.mark.parametrize("share", [4, 16, 48])
def test_more_nodes_at_the_same_batch_on_each_accelerator_are_never_slower(name: str, share: int) -> None:
    device = device_named(name)
    nodes = [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if 448 <= 8 * count * share <= 16384]
    times = [seconds(device, count, 8 * count * share) for count in nodes]
    assert len(times) > 3
    assert times == sorted(times, reverse=True)


@given(KNOWN)
def test_no_device_runs_faster_than_its_peak_rate(device: Device) -> None:
    step = step_parts(P, TimedRun(describe_machine(device, 1, 8), 768))
    peak = max(device.bf16_tflops, device.fp8_tflops or 0) * 1e12
    assert (step["matrix"] + step["memory"] + step["power"]) / 96 > SEQUENCE_FLOPS / peak


def test_rounds_software_racks_and_bridges_count() -> None:
    hopper, ampere = (describe_machine(device_named(name), 1, 8) for name in ("H100-SXM", "A100-SXM"))

    def total(machine: Machine, batch: int, round: str = "v5.0") -> float:
        return run_time(P, TimedRun(machine, batch, round)).total

    assert total(hopper, 768, "v2.1") > total(hopper, 768, "v3.0"), "the first round of a device"
    assert total(ampere, 448, "v2.0") > total(ampere, 448, "v2.1")
    assert total(ampere, 448, "v5.0") == total(ampere, 448)
    rack, racks = (
        step_parts(P, TimedRun(describe_machine(device_named("GB200"), nodes, 4), 256 * nodes))["between"]
        for nodes in (18, 36)
    )
    assert rack == 0.0 < racks
    plain, bridged = (
        step_parts(P, TimedRun(describe_machine(device_named("A30"), 1, 2, interconnect=links), 448))["inside"]
        for links in ("PCIe", "NVLINK BRIDGE")
    )
    assert bridged < plain


def test_the_reference_points_are_those_that_count_in_review() -> None:
    for ruleset in ("2.1.0", "3.1.0", "5.0.0"):
        for batch, samples in REFERENCE_POINTS:
            found = reference(ruleset, batch)
            assert found is not None
            assert (found.origin, round(found.mean)) == ("exact", samples)


def test_runs_and_machines_that_nobody_has_are_refused() -> None:
    for batch in (0, 7, 10**9):
        with pytest.raises(ValueError, match="global batch size"):
            TimedRun(describe_machine(device_named("A100"), 1, 8), batch)
    for nodes, per_node in ((0, 8), (-1, 8), (1, 0), (10**9, 1), (10**6, 10**6)):
        with pytest.raises(ValueError, match="expected"):
            describe_machine(device_named("A100"), nodes, per_node)


@pytest.mark.parametrize(
    ("text", "ports", "gbit_s"),
    [
        ("Storage: 2x IB HDR 200Gb/sec, Management: 1x Ethernet 100Gb/Sec, Compute: 8x ConnectX-6 IB HDR 200Gb/Sec", 8, 200),
        ("Storage: 2x IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s Ethernet NIC", 8, 400),
        ("Compute: 4 x MT28908 Family [ConnectX-6] HDR 200 Gb/Sec + Management: 1 x [ConnectX-6] 100 GB/s Ethernet", 4, 200),
        ("Management: 1 x 25 Gb / Sec Ethernet, Compute: 1 x ConnectX - 6 IB HDR100 100 Gb / Sec", 1, 100),
        ("1x ConnectX-5 IB EDR", 1, 100),
        ("8x Quantum-X800 XDR", 8, 800),
        ("400 Gbps Infiniband (4x), 10GbE", 4, 400),
        ("NetXtreme BCM5719 Gigabit Ethernet PCIe 4x1Gb", 4, 1),
    ],
)  # fmt: skip
def test_descriptions_of_networks_are_understood(text: str, ports: int, gbit_s: float) -> None:
    network = describe_machine(device_named("H100"), 2, 8, networking=text).network
    assert (network.ports, network.gbit_s, network.is_assumed) == (ports, gbit_s, False)


@pytest.mark.parametrize(
    "text", ["", "Ethernet, Infiniband", "0Gb/s", "9" * 10**5 + "x", "NetXtreme BCM5719 Gigabit Ethernet PCIe"]
)
def test_a_network_that_is_not_described_is_assumed(text: str) -> None:
    assert describe_machine(device_named("H100"), 2, 8, networking=text).network.is_assumed
