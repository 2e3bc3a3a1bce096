"""The cost model with synthetic parameters, added up by hand. Most parameters are 1, whose logarithm is 0."""

from math import exp, log, log2

import pytest

from cluster.devices import describe_machine, device_named
from cluster.published.calibration import calibration
from cluster.published.cost_model import TimedRun, run_time, step_parts
from cluster.published.fitted import (
    REFERENCE_POINTS,
    link_rate,
    log_samples,
    network_rate,
    sequence_time,
    smooth_minimum,
)
from compliance.convergence.outlook import reference

ONES = dict.fromkeys(calibration().parameters, 0.0)
A100, H100 = device_named("A100-SXM"), device_named("H100-SXM")


def eighths(*values: float) -> float:
    """Return the smooth maximum: the root of a sum of eighth powers."""
    return sum(value**8 for value in values) ** 0.125


def test_sequence_time_adds_up_products_traffic_and_slowdown_by_the_power_limit() -> None:
    products = 500e9 / 312e12  # an A100 has 312 TFLOP/s
    seconds = sequence_time(ONES | {"traffic": log(1e9), "energy": log(1e-9)}, A100, False)
    assert seconds == pytest.approx((products, 1 / A100.memory_gb_s, 0), abs=1e-9)
    # Energy halves in two years, so H100s of 2022 need half of 2 J. In FP8, a share of 0.87 needs only a quarter of it.
    hot = ONES | {"traffic": log(1e9), "energy": log(2.0), "energy_halving": log(2.0), "fp8_energy": log(0.25)}
    in_fp8 = 500e9 * (0.87 / (2 * H100.fp8_tflops * 1e12) + 0.13 / (H100.bf16_tflops * 1e12))  # type: ignore[operator]
    for fp8, matrix, joules in ((False, 500e9 / (H100.bf16_tflops * 1e12), 1.0), (True, in_fp8, 0.87 / 4 + 0.13)):
        free = matrix + 1 / H100.memory_gb_s
        found = sequence_time(hot | {"fp8_efficiency": log(2.0)}, H100, fp8)
        assert sum(found[:2]) == pytest.approx(free)
        assert sum(found) == pytest.approx(eighths(free, joules / H100.tdp_w))
    # Each of these slows all parts of a sequence: old software, a device's first round, GDDR memory, its chip, a CPU.
    slow = {"old_software": 0.3, "first_round": 0.2, "graphics_memory": 0.1, "processor": log(0.5), "chip_GA100": -0.4}
    for name, round, speed in (
        ("A100-SXM", None, -0.4),
        ("A100-SXM", "v2.0", -0.4 - 0.3),
        ("H100-SXM", "v2.1", -0.2),
        ("H100-SXM", "v3.0", 0.0),
        ("L40S", None, -0.1),
        ("CPU", None, log(0.5)),
    ):
        usual, slowed = (sum(sequence_time(each, device_named(name), False, round)) for each in (ONES, ONES | slow))
        assert slowed / usual == pytest.approx(exp(-speed)), name


def test_link_and_network_rates_follow_from_data_sheets_and_efficiencies() -> None:
    p = ONES | {"fabric_efficiency": log(0.5), "pcie_efficiency": log(0.25), "network_efficiency": log(0.8)}
    node = describe_machine(A100, 4, 8, networking="8x IB HDR 200Gb/s")
    assert link_rate(p, node) == 0.5 * 300e9
    # One Gbit/s is an eighth of a GB/s.
    assert network_rate(p, node) == pytest.approx(0.8 * 8 * 200e9 / 8)
    a30 = device_named("A30")
    cards = ((2, "PCIe"), (2, "bridge"), (4, "bridge"))
    plain, bridged, four = (describe_machine(a30, 1, count, interconnect=text) for count, text in cards)
    assert a30.bridge_gb_s is not None
    rates = [link_rate(p, each) for each in (plain, bridged, four)]
    assert rates == pytest.approx([0.25e9 * a30.link_gb_s, 0.5e9 * a30.bridge_gb_s, 0.25e9 * a30.link_gb_s])
    # Four cards share two ports through the host's memory. Eight cards have a switch.
    p |= {"staging_efficiency": log(0.1)}
    shared = describe_machine(a30, 2, 4, networking="2x IB 100Gb/s")
    staged = eighths(8 / (0.8 * 100), 1 / (0.1 * a30.host_gb_s))
    assert network_rate(p, shared) == pytest.approx(2e9 / staged)
    for count, ports in ((4, 4), (8, 2)):
        switched = describe_machine(a30, 2, count, networking=f"{ports}x IB 100Gb/s")
        assert network_rate(p, switched) == pytest.approx(ports * 0.8 * 100e9 / 8)
    rack = describe_machine(device_named("GB200"), 36, 4)
    assert network_rate(p, rack) == pytest.approx(0.8 * 72 * 400e9 / 8), "a port for each device"
    assert [smooth_minimum(each, 1.0) for each in (1.0, 0.0)] == [pytest.approx(2 ** (-1 / 8)), 0.0]
    gaudi = describe_machine(device_named("Gaudi2"), 2, 8)
    assert network_rate(p, gaudi) == pytest.approx(0.8e9 * 8 * (gaudi.device.network_gb_s or 0))


def test_samples_grow_with_batch_size_and_accumulation_and_duration_and_old_recipes() -> None:
    reference = 2_414_421

    def samples(batch: int, accelerators: int = 8, rate: float = 1e9, old: bool = False, **p: float) -> float:
        return exp(log_samples(ONES | p, batch, accelerators, 80.0, rate, old))

    expected = [reference, reference, (reference + 2_798_080) / 2, 5_505_422 + 16384 * 860_089 / 3328]
    assert [samples(each) for each in (100, 448, 2528, 32768)] == pytest.approx(expected)
    # ``practice_N`` is interpolated in the logarithm of the batch, and constant beyond the largest N.
    halfway = round((448 * 768) ** 0.5)
    assert samples(halfway, practice_768=0.2) / samples(halfway) == pytest.approx(exp(0.1), rel=1e-3)
    assert samples(32768, practice_16384=0.2) / samples(32768) == pytest.approx(exp(0.2))
    # A device holds 96 sequences. Runs longer than 17 minutes take extra samples.
    for batch, share in ((8 * 96, 0.0), (8 * 192, 0.3)):
        assert samples(batch, accumulation=0.3) / samples(batch) == pytest.approx(exp(share))
    for minutes, doublings in ((16.9, 0.0), (34.0, 1.0)):
        found = samples(448, rate=reference / (60 * minutes), tuning=0.1)
        assert found / reference == pytest.approx(exp(0.1 * doublings))
    for accelerators, decay in ((256, exp(-1)), (512, exp(-2))):
        found = samples(1792, accelerators, old=True, old_recipe=0.1, old_recipe_growth=0.05) / samples(1792)
        assert found == pytest.approx(exp((0.1 + 0.05 * 2) * decay))
        assert samples(1792, accelerators, old_recipe=0.1) == samples(1792)


def evaluation_samples(batch: int) -> float:
    """Return the interval of the rules: 0.05 x (230.23 x batch + 3,000,000) samples, rounded down to 25,000."""
    return 0.05 * (230.23 * batch + 3e6) // 25_000 * 25_000


@pytest.mark.parametrize(("nodes", "batch", "micro_batches"), [(1, 768, 1), (4, 768, 1), (1, 4096, 2)])
def test_parts_of_a_step_and_of_a_run_equal_a_calculation_by_hand(nodes: int, batch: int, micro_batches: int) -> None:
    """An H100 holds 256 sequences in FP8. The reduction sends 2 bytes for each of 336.2 million parameters."""
    p = ONES | {"traffic": log(1e9), "energy": log(1e-9), "launch": log(0.005), "half_batch": log(1.5)}
    p |= {"overlap": log(0.5), "tail": log(0.3), "network_latency": log(2e-4), "start": log(0.7)}
    run = TimedRun(describe_machine(H100, nodes, 8, networking="8x IB NDR 400Gb/s"), batch)
    matrix, memory, power = sequence_time(p, H100, True)
    sequences, sequence = batch / (8 * nodes), matrix + memory + power
    inside = 2 * 2 * 336.2e6 * 7 / 8 / (H100.link_gb_s * 1e9)
    inside -= smooth_minimum(0.7 * inside, 0.5 * 2 / 3 * sequence * sequences / micro_batches)
    between = 2 * 2 * 336.2e6 * (1 - 1 / 32) / (8 * 50e9) + 2e-4 * log2(nodes) if nodes > 1 else 0.0
    together = eighths(inside, between) / (inside + between)
    launch = micro_batches * (0.005 + 1.5 * sequence)
    update = 30 * 336.2e6 / (0.8e9 * H100.memory_gb_s) / 8
    parts = (matrix * sequences, memory * sequences, power * sequences, launch, together * inside, together * between)
    step = step_parts(p, run)
    assert tuple(step.values()) == pytest.approx((*parts, update))
    found = run_time(p, run, samples=1e6)
    evaluations = 1e6 / evaluation_samples(batch)
    once = (evaluations * (-(-10_000 // (8 * nodes)) * sequence + launch) / 3, 0.7)
    assert tuple(found.parts.values()) == pytest.approx((*(1e6 / batch * part for part in (*parts, update)), *once))
    assert found.steps == 1e6 / batch


def test_reference_points_equal_those_of_the_rulesets() -> None:
    for ruleset in ("2.1.0", "3.1.0", "5.0.0"):
        for batch, samples in REFERENCE_POINTS:
            found = reference(ruleset, batch)
            assert found is not None
            assert (found.origin, round(found.mean)) == ("exact", samples)


def test_impossible_batch_sizes_rounds_and_node_counts_are_refused() -> None:
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
