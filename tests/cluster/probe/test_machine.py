"""Facts about a machine from synthetic /sys trees and Slurm's output, load by other processes, and timing."""

import os
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bert.parallel.mesh import Mesh
from cluster.probe import computations, computing
from cluster.probe.command import gather_facts
from cluster.probe.computing import busy_machines, processor_seconds
from cluster.probe.machine import Facts, facts_of, nearest_card, network_cards, slurm_switches, switches_of
from cluster.view import Host
from tests.cluster.probe.clocks import clock
from tests.sysfs import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with two PCI switches, each with a GPU and an InfiniBand card, and a card whose port is down."""
    machine = Machine(tmp_path)
    for bus in ("07", "47"):
        machine.gpu(f"pci0000:{bus}/0000:{bus}:00.0/0000:{bus}:01.0", numa=0)
        machine.hca(f"mlx5_{bus}", f"pci0000:{bus}/0000:{bus}:00.0/0000:{bus}:02.0")
    machine.hca("mlx5_down", "pci0000:80/0000:80:00.0", state="1: DOWN")
    return machine


def test_a_gpu_gets_the_active_card_under_its_switch(machine: Machine) -> None:
    cards = network_cards(machine.sys)
    assert cards == ["mlx5_07", "mlx5_47"]
    assert nearest_card(machine.sys, "0000:07:01.0", cards) == "mlx5_07"
    assert nearest_card(machine.sys, "0000:47:01.0", cards) == "mlx5_47"
    assert nearest_card(machine.sys, "0000:47:01.0", []) == ""


def test_facts_of_maximum_length_survive_the_gather() -> None:
    host = Host("h" * 128, 256, 1 << 41, ("m" * 32,) * 16, ("s" * 64,) * 8, "a" * 32)
    facts = Facts("boot", host, "d" * 128, 1 << 37, "mlx5_07")
    assert gather_facts(facts, Mesh(0, 1, 0, torch.device("cpu"))) == [facts]
    assert len(msgspec.json.encode(facts)) <= 4096, "all ranks send as many bytes"


def test_switches_come_from_the_environment_of_a_task_or_from_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "core.leaf3.node7")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    assert slurm_switches() == ("core", "leaf3")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "node")
    monkeypatch.setenv("SLURMD_NODENAME", "-o/etc/passwd")
    assert slurm_switches() == ()
    leaf = "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]"
    core = "SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]"
    assert switches_of([leaf, core]) == ("core", "leaf1")
    assert switches_of(["No topology information available"]) == ()


def test_a_machine_is_busy_if_other_programs_take_more_than_a_tenth_of_it() -> None:
    """Host "a" has two ranks. On host "b", only its own rank takes processor time. The counters of "c" do not move."""
    every = [Facts(host, Host(host, 4, 2**30, (), ()), "cpu", 0, "") for host in "aabc"]
    for busy, own, share in ((40.0, 12.0, 0.16), (40.0, 15.0, None), (40.0, 14.0, 0.12), (0.0, 19.0, None)):
        spent_R3 = np.array([[busy, 100.0, own]] * 2 + [[20.0, 100.0, 19.5], [0.0, 0.0, 0.0]])
        assert busy_machines(spent_R3, every) == ({} if share is None else {"a": pytest.approx(share)})


def test_processor_seconds_exclude_idle_iowait_and_guests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field is a different power of two. User time includes guests' time, and waiting for a disk counts as idle."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    times = psutil.cpu_times()._replace(**{name: 2.0**place for place, name in enumerate(names)})
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    before = time.process_time()
    busy, whole, own = processor_seconds()
    assert (busy, whole) == (255 - 8 - 16, 255)
    assert before <= own <= time.process_time()


@pytest.mark.slow
def test_gpu_operations_have_the_expected_sizes_and_repetitions() -> None:
    with FakeTensorMode():
        cells = computing.cells_of(torch.device("cuda"))
    expected = [("product", "bf16", 8192, 1), ("copy", "fp32", 2**28, 1), ("launch", "fp32", 1, 1000)]
    expected += [(f"{way} device", "fp32", 2**26, 1) for way in ("to", "from")]
    assert [(cell.quantity, cell.dtype, cell.size, cell.times) for cell in cells] == expected


def test_computations_are_timed_in_up_to_three_turns_within_the_given_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls take 0.5 s. The remaining seconds hold up to three turns, with windows of at least 15 ms."""
    windows: list[float] = []

    def time_in_window(_action: object, seconds: float, _device: object) -> float:
        windows.append(seconds)
        return 6.0 * len(windows)

    trials = [
        computations.ComputationTrial("a", (1.0,), int, times=1),
        computations.ComputationTrial("b", (2.0,), int, times=4),
    ]
    monkeypatch.setattr(computations, "trials_of", lambda _: trials)
    monkeypatch.setattr(computations, "time_in_window", time_in_window)
    for seconds, turns, window in ((600.5, 3, 100), (0.57, 2, 0.015), (0.5, 1, 0.015)):
        windows.clear()
        time = clock(0.5)
        time.perf_counter()  # so that the clock does not start at 0
        monkeypatch.setattr(computations, "time", time)
        found = computations.measure_computations(Mesh(0, 1, 0, torch.device("cpu")), 1, seconds)
        # The trials take turns, so each has the median of every other call's time.
        expected = [("a", (1.0,), 6.0 * turns), ("b", (2.0,), 1.5 * (turns + 1))]
        assert [(each.kind, each.counts, each.seconds) for each in found] == expected
        assert windows == [pytest.approx(window, rel=1e-9)] * 2 * turns


def test_a_window_has_whole_actions_and_lasts_at_least_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, actions in ((0.0, 1), (1.0, 1), (1.5, 2), (2.0, 2)):
        done: list[int] = []
        monkeypatch.setattr(computing, "time", clock(1.0))
        assert computing.time_in_window(lambda done=done: done.append(1), seconds, torch.device("cpu")) == 1.0
        assert len(done) == actions
    for group in (0, 2):  # the number of the group does not change the result
        cells = [computing.Cell("copy", "fp32", 1, int, times=4), computing.Cell("launch", "fp32", 1, int)]
        found = computing.measure_rates(Mesh(0, 1, 0, torch.device("cpu")), cells, group, turns=2, seconds=1.0)
        assert found.tolist() == [[0.25, 1.0]] * 2


def test_facts_of_a_cpu_rank_have_its_interface_and_truncated_names(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(0, 1, 0, torch.device("cpu"))
    monkeypatch.setattr("socket.gethostname", lambda: "n" * 200)
    monkeypatch.setattr("cluster.probe.machine.processor_name", lambda: "d" * 200)
    for cards, stated, expected in ((["a", "b"], "b,c", "b"), (["a", "b"], "c", "a"), ([], "b", "")):
        monkeypatch.setattr("cluster.probe.machine.network_cards", lambda _, cards=cards: cards)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", stated)
        facts = facts_of(mesh)
        assert (facts.card, facts.host.cards) == (expected, tuple(cards))
        assert (facts.host.name, facts.device) == ("n" * 128, "d" * 128)
    assert (facts.host.cores, facts.device_memory) == (os.cpu_count(), facts.host.memory_bytes)
    assert facts.device_memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "bytes"
