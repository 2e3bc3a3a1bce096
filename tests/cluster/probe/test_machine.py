"""Facts of a machine from trees of files as under /sys, from Slurm's lines, from NVIDIA's library, and who has not come."""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bert.parallel.launch import Launch
from cluster.probe.arrival import describe_absent, slurm_hosts
from cluster.probe.machine import Facts, nearest_card, network_cards, nvlink_clique, slurm_switches, switches_of
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
    assert Facts.decoded(facts.encoded()) == facts


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
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused("probe", *arguments)
    assert list(tmp_path.iterdir()) == []


class Driver:
    """NVIDIA's driver behind the real package: C functions by name, which fill what they are handed a pointer to."""

    def __init__(self, pynvml: Any, links: Mapping[int, tuple[int, str]], cluster: bytes = b"") -> None:
        self._pynvml, self._links, self._cluster = pynvml, links, cluster

    def __call__(self, name: str) -> Callable[..., int]:
        found = getattr(self, name, None)
        if found is None:
            raise self._pynvml.NVMLError(self._pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return found

    def nvmlInitWithFlags(self, _flags: int) -> int:  # noqa: N802 - the name is NVIDIA's
        return self._pynvml.NVML_SUCCESS

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: Any, _device: Any) -> int:  # noqa: N802 - the name is NVIDIA's
        return self._pynvml.NVML_SUCCESS if address.value == b"0000:07:00.0" else self._pynvml.NVML_ERROR_NOT_FOUND

    def nvmlDeviceGetGpuFabricInfoV(self, _device: Any, info: Any) -> int:  # noqa: N802 - the name is NVIDIA's
        if not self._cluster:
            return self._pynvml.NVML_ERROR_NOT_SUPPORTED
        assert info._obj.version == self._pynvml.nvmlGpuFabricInfo_v2
        info._obj.clusterUuid[:] = self._cluster
        info._obj.cliqueId, info._obj.state = 5, self._pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
        return self._pynvml.NVML_SUCCESS

    def nvmlDeviceGetNvLinkState(self, _device: Any, link: int, active: Any) -> int:  # noqa: N802 - the name is NVIDIA's
        active._obj.value = link in self._links
        return self._pynvml.NVML_SUCCESS if link < 18 else self._pynvml.NVML_ERROR_INVALID_ARGUMENT

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, _device: Any, link: int, kind: Any) -> int:  # noqa: N802 - the name is NVIDIA's
        kind._obj.value = self._links[link][0]
        return self._pynvml.NVML_SUCCESS

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, _device: Any, link: int, info: Any) -> int:  # noqa: N802 - the name is NVIDIA's
        info._obj.busId = self._links[link][1]
        return self._pynvml.NVML_SUCCESS


@pytest.mark.parametrize(
    ("address", "links", "cluster", "clique"),
    [
        ("0000:07:00.0", {0: (0, "00000000:0A:00.0"), 3: (0, "00000000:0F:00.0")}, b"", "0000:07:00.0"),
        ("0000:07:00.0", {0: (0, "00000000:03:00.0")}, b"", "0000:03:00.0"),
        ("0000:07:00.0", {0: (2, "00000000:C1:00.0")}, b"", "nvswitch"),
        ("0000:07:00.0", {0: (2, "00000000:C1:00.0")}, bytes(range(16)), f"{bytes(range(16)).hex()}/5"),
        ("0000:07:00.0", {0: (2, "00000000:C1:00.0")}, bytes(16), "nvswitch"),
        ("0000:07:00.0", {}, b"", ""),
        ("0000:08:00.0", {0: (2, "00000000:C1:00.0")}, b"", ""),
        ("", {0: (2, "00000000:C1:00.0")}, b"", ""),
    ],
)
def test_nvlink_is_asked_for_through_nvidia_s_package(
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    links: dict[int, tuple[int, str]],
    cluster: bytes,
    clique: str,
) -> None:
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", Driver(pynvml, links, cluster))
    found = nvlink_clique(address)
    assert found.removeprefix(f"{socket.gethostname()}/") == clique
