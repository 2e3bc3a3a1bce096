"""Facts of a machine from trees of files as under /sys, from Slurm's lines, and who has not come."""

from pathlib import Path

import pytest

from bert.parallel.launch import Launch
from cluster.__main__ import main
from cluster.probe.arrival import describe_absent, slurm_hosts
from cluster.probe.machine import Facts, nearest_card, network_cards, slurm_switches, switches_of
from cluster.view import Card
from tests.e2e.test_launchers import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Two switches of PCI, a GPU and an InfiniBand card below each, and a card whose port is down."""
    machine = Machine(tmp_path)
    for bus in ("07", "47"):
        machine.gpu(f"pci0000:{bus}/0000:{bus}:00.0/0000:{bus}:01.0", numa=int(bus[0]) // 4)
        machine.hca(f"mlx5_{bus}", f"pci0000:{bus}/0000:{bus}:00.0/0000:{bus}:02.0")
        machine.write(
            f"devices/pci0000:{bus}/0000:{bus}:00.0/0000:{bus}:02.0/infiniband/mlx5_{bus}/ports/1/rate",
            "400 Gb/sec (4X NDR)",
        )
    machine.hca("mlx5_down", "pci0000:80/0000:80:00.0", state="1: DOWN")
    return machine


def test_cards_are_those_with_an_active_port(machine: Machine) -> None:
    assert network_cards(machine.sys) == [Card("mlx5_07", 0, 400.0), Card("mlx5_47", 0, 400.0)]


def test_a_gpu_is_near_the_card_under_its_switch(machine: Machine) -> None:
    cards = network_cards(machine.sys)
    assert nearest_card(machine.sys, "0000:07:01.0", cards) == "mlx5_07"
    assert nearest_card(machine.sys, "0000:47:01.0", cards) == "mlx5_47"
    assert nearest_card(machine.sys, "0000:47:01.0", []) == ""


def test_facts_travel(machine: Machine) -> None:
    cards = tuple(network_cards(machine.sys) * 8)
    facts = Facts(
        "h" * 128, "boot", 2, 8, 256, 1 << 41, cards, ("s" * 64,) * 8, "d" * 128, 1 << 37, 3, "mlx5_07", "c" * 128
    )
    assert Facts.decoded(facts.encoded().ljust(4096)) == facts


def test_switches_come_from_the_environment_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "core.leaf3.node7")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    assert slurm_switches() == ("core", "leaf3")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "node")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert slurm_switches() == ()
    monkeypatch.setenv("SLURMD_NODENAME", "-o/etc/passwd")
    assert slurm_switches() == ()


def test_switches_come_from_what_scontrol_prints() -> None:
    lines = [
        "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]",
        "SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]",
    ]
    assert switches_of(lines) == ("core", "leaf1")
    assert switches_of(["No topology information available"]) == ()


ABSENT = [
    ([4, 5], {}, ["a", "b", "c"], "host c (rank 4, 5) have not come"),
    ([1], {0: "a"}, [], "host a (rank 1) has not come (a came)"),
    ([2, 3, 5], {0: "a", 1: "a", 4: "c"}, [], "node 1 of 3 (rank 2, 3), host c (rank 5) have not come (a, c came)"),
]


@pytest.mark.parametrize(("absent", "present", "hosts", "said"), ABSENT)
def test_who_is_absent_is_named_by_host(
    absent: list[int], present: dict[int, str], hosts: list[str], said: str
) -> None:
    assert describe_absent(absent, present, Launch(0, 6, 0, 2), hosts) == said


def test_without_a_size_of_hosts_ranks_are_named_and_not_without_end() -> None:
    absent = list(range(1, 100))
    said = describe_absent(absent, {0: "a"}, Launch(0, 100), [])
    assert said == "rank 1, 2, 3, 4, 5, 6, 7, 8, ... have not come (a came)"


def test_a_list_of_nodes_that_is_none_is_not_given_to_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "--help")
    assert slurm_hosts() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "no/such/cluster.json"], "--out is no/such/cluster.json: there is no folder"),
        (["--out", "cluster.json", "--seconds", "0"], "--seconds is 0 and --limit 60, expected at least 1 of each"),
        (["--out", "cluster.json", "--data", "no/such"], "--data is no/such: no such folder"),
        (["--out", "cluster.json", "--seconds", "long"], "--seconds"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["cluster", "probe", *arguments])
    assert main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert list(tmp_path.iterdir()) == []
