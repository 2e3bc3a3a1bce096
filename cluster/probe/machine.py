"""Facts about the machine of a rank: processors, memory, network cards, device, and the Slurm switches above it."""

import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from bert.parallel.environment import processor_name, scontrol_show, site
from bert.parallel.mesh import Mesh
from cluster.view import Host

_MOST_CARDS = 16
_MOST_SWITCHES = 8


@dataclass(frozen=True)
class Facts:
    """A rank's host and device. Hosts that share processors, such as containers, have the same ``machine``."""

    machine: str
    host: Host
    device: str
    device_memory: int
    card: str


def facts_of(mesh: Mesh) -> Facts:
    sys, host_memory = Path("/sys"), psutil.virtual_memory().total
    cards = network_cards(sys)
    if mesh.device.type == "cuda":
        properties = torch.cuda.get_device_properties(mesh.device)
        device, memory = properties.name, properties.total_memory
        # Write the PCI address as /sys does.
        bus, slot = properties.pci_bus_id, properties.pci_device_id
        card = nearest_card(sys, f"{properties.pci_domain_id:04x}:{bus:02x}:{slot:02x}.0", cards)
    else:
        device, memory = processor_name(), host_memory
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        card = interface if interface in cards else next(iter(cards), "")
    name = socket.gethostname()[:128]
    cores = psutil.cpu_count() or 1
    boot = Path("/proc/sys/kernel/random/boot_id")  # the id is the same in all containers of a machine
    return Facts(
        boot.read_text().strip() if boot.exists() else name,
        Host(name, cores, host_memory, tuple(cards), slurm_switches(), site()),
        device[:128],
        memory,
        card,
    )


def network_cards(sys: Path) -> list[str]:
    """Return the InfiniBand and RoCE cards with an active port, or else the network interfaces that are up."""
    cards = [
        card.name[:32]
        for card in sorted((sys / "class/infiniband").glob("*"))
        if any("ACTIVE" in state.read_text() for state in card.glob("ports/*/state"))
    ]
    up = [name[:32] for name, state in psutil.net_if_stats().items() if state.isup and name != "lo"]
    return (cards or sorted(up))[:_MOST_CARDS]


def nearest_card(sys: Path, address: str, cards: Sequence[str]) -> str:
    """Return the card whose path in the PCI tree shares the most levels with the device at a PCI address."""
    device = (sys / "bus/pci/devices" / address).resolve()

    def shared_levels(card: str) -> int:
        places = (sys / "class" / kind / card / "device" for kind in ("infiniband", "net"))
        place = next(filter(Path.exists, places), sys)
        return len(Path(os.path.commonpath([device, place.resolve()])).parts)

    return max(cards, key=shared_levels, default="")


def slurm_switches() -> tuple[str, ...]:
    """Return the switches above this host in Slurm's topology, from the top to the leaf, or () without a topology.

    With the tree topology plugin, Slurm passes the switches in environment variables. Otherwise this calls ``scontrol``.
    """
    address, pattern = os.environ.get("SLURM_TOPOLOGY_ADDR", ""), os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    if pattern.startswith("switch."):
        # The last field is the node itself, so omit it.
        return tuple(name[:64] for name in address.split(".")[:-1][-_MOST_SWITCHES:])
    return switches_of(scontrol_show("topology", os.environ.get("SLURMD_NODENAME", "")))


def switches_of(lines: Iterable[str]) -> tuple[str, ...]:
    """Parse the output of ``scontrol show topology NODE``. Its levels count upwards from the leaf, which has level 0."""
    found = [re.search(r"SwitchName=(\S+) Level=(\d+)", line) for line in lines]
    levels = {int(match[2]): match[1][:64] for match in found if match}
    return tuple(levels[level] for level in sorted(levels, reverse=True)[-_MOST_SWITCHES:])
