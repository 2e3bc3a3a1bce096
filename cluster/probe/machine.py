"""Facts of the machine that a rank runs on: sockets, NUMA nodes, network cards, its device, NVLink, switches of Slurm.

Everything is read where the system states it, under /sys and /proc and from NVIDIA's management library when it is
installed; what is not stated is "", 0 or -1. A rank tells its own facts, and rank 0 puts all together.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.view import Card, Host, Rank

if TYPE_CHECKING:  # imports PyTorch, which naming a processor does without
    from bert.parallel.mesh import Mesh

# All-gathered over all ranks: fixed and small.
FACTS_BYTES = 4096
"""Of the facts of one rank, as they travel."""
_MOST_CARDS = 16
_MOST_SWITCHES = 8
_SCONTROL_SECONDS = 5.0


@dataclass(frozen=True)
class Facts:
    """A rank's host and device. ``machine`` is the same for all ranks that share its ``cores``."""

    host: str
    machine: str
    sockets: int
    numa_nodes: int
    cores: int
    host_memory: int
    cards: tuple[Card, ...]
    switches: tuple[str, ...]
    device: str
    device_memory: int
    numa: int
    card: str
    clique: str

    def encoded(self) -> bytes:
        """Write the facts as JSON, filled up with spaces to ``FACTS_BYTES``: ranks send one another as many bytes each."""
        content = json.dumps(asdict(self)).encode()
        assert len(content) <= FACTS_BYTES, f"{len(content)} bytes of facts"
        return content.ljust(FACTS_BYTES)

    @classmethod
    def decoded(cls, content: bytes) -> Facts:
        """Read what another rank has encoded."""
        fields = json.loads(content)
        cards = tuple(Card(**card) for card in fields.pop("cards"))
        return cls(cards=cards, switches=tuple(fields.pop("switches")), **fields)

    def as_host(self) -> Host:
        """The host's part of the view."""
        return Host(
            self.host, self.sockets, self.numa_nodes, self.cores, self.host_memory, self.cards, self.switches
        )  # fmt: skip

    def as_rank(self, host: int, place: int) -> Rank:
        """The device's part of the view, without what was measured."""
        return Rank(host, place, self.device, self.device_memory, self.numa, self.card, self.clique, ())


def facts_of(mesh: Mesh) -> Facts:
    """Gather this rank's facts."""
    sys = Path("/sys")
    cards = network_cards(sys)
    if mesh.device.type == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(mesh.device)
        address = pci_address(properties)
        name, memory = properties.name, properties.total_memory
        numa = number(sys / f"bus/pci/devices/{address}/numa_node")
        card, clique = nearest_card(sys, address, cards), nvlink_clique(address)
    else:
        name, memory, numa = processor_name(), host_memory(), _own_numa(sys)
        usual = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]  # where gloo is told to talk
        card = usual if usual in [each.name for each in cards] else next((each.name for each in cards), "")
        clique = ""
    host = socket.gethostname()[:128]
    return Facts(
        host,
        # Hosts that are containers or namespaces of one machine share its boot.
        _text(Path("/proc/sys/kernel/random/boot_id")).strip() or host,
        # At least 1: virtual machines may state neither sockets nor NUMA nodes.
        max(1, len({*map(number, sys.glob("devices/system/cpu/cpu[0-9]*/topology/physical_package_id"))})),
        max(1, len([*sys.glob("devices/system/node/node[0-9]*")])),
        # Of the machine, which all its ranks share, not of this process' affinity.
        os.cpu_count() or 1,
        host_memory(),
        tuple(cards),
        slurm_switches(),
        name[:128],
        memory,
        numa,
        card,
        clique,
    )


def number(path: Path) -> int:
    """The whole number in a file of /sys; -1 where there is none, as the kernel has it for an unknown NUMA node."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def processor_name() -> str:
    """The processor's name as the kernel has it."""
    # Other architectures have no such line.
    found = re.search(r"^model name\s*: (.*)$", _text(Path("/proc/cpuinfo")), re.M)
    return found[1].strip() if found else "CPU"


def host_memory() -> int:
    """Bytes of memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _own_numa(sys: Path) -> int:
    """The NUMA node of the cores that this process may use, or -1 where they are on several."""
    allowed = os.sched_getaffinity(0)
    nodes = [
        # Listed, not counted: the numbers of NUMA nodes may have gaps.
        int(node.name[4:])
        for node in sys.glob("devices/system/node/node[0-9]*")
        if allowed & {int(cpu.name[3:]) for cpu in node.glob("cpu[0-9]*")}
    ]
    return nodes[0] if len(nodes) == 1 else -1


def network_cards(sys: Path) -> list[Card]:
    """InfiniBand and RoCE cards with an active port; without any, interfaces that are up. At most ``_MOST_CARDS``."""
    cards = []
    for card in sorted((sys / "class/infiniband").glob("*")):
        # A card without a cable is listed as well, and carries nothing.
        ports = [port for port in card.glob("ports/*") if "ACTIVE" in _text(port / "state")]
        if ports:
            speed = re.match(r"\s*([\d.]+) Gb/sec", _text(ports[0] / "rate"))
            cards.append(
                # Names are cut, so that the facts of a rank fit into FACTS_BYTES.
                Card(card.name[:32], number(card / "device/numa_node"), float(speed[1]) if speed else 0.0)
            )  # fmt: skip
    if not cards:
        for index, name in sorted(socket.if_nameindex()):
            place = sys / "class/net" / name
            # Virtual interfaces state "unknown" although they carry traffic.
            if name != "lo" and index and _text(place / "operstate").strip() in ("up", "unknown"):
                # /sys states Mbit/s, and -1 where it does not know.
                cards.append(Card(name[:32], number(place / "device/numa_node"), max(0, number(place / "speed")) / 1e3))
    return cards[:_MOST_CARDS]


def nearest_card(sys: Path, address: str, cards: Sequence[Card]) -> str:
    """The card whose path below the root complex has most in common with that of the device at a PCI address."""
    device = (sys / "bus/pci/devices" / address).resolve().parts

    def closeness(card: Card) -> int:
        for kind in ("infiniband", "net"):
            place = sys / "class" / kind / card.name / "device"
            # The link in /sys leads to the device's place in the PCI tree.
            if place.exists():
                pairs = zip(device, place.resolve().parts, strict=False)
                # Levels that both paths have in common: the more, the nearer the switch that they share.
                return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return 0

    return max(cards, key=closeness).name if cards else ""


def pci_address(properties: Any) -> str:
    """The address of a CUDA device, as /sys writes it; "" with a PyTorch that does not tell."""
    fields = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in fields:
        return ""
    domain, bus, device = fields
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def nvlink_clique(address: str) -> str:
    """A name that devices share which NVLink joins: of the fabric, else of the lowest address among neighbours and itself.

    Needs nvidia-ml-py; "" without it, or without NVLink.
    """
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        # By PCI address: NVML numbers devices otherwise than CUDA_VISIBLE_DEVICES does.
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
        return _fabric(pynvml, handle) or _neighbours(pynvml, handle, address)
    except pynvml.NVMLError:
        return ""


def _fabric(pynvml: Any, handle: Any) -> str:
    """The clique that the fabric manager of a multi-node NVLink domain has put a device into."""
    try:
        info = pynvml.c_nvmlGpuFabricInfo_v2_t()  # what asks without a version is to be removed in CUDA 14
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(info))
    except (pynvml.NVMLError, AttributeError):  # an older driver or package
        return ""
    identity = bytes(info.clusterUuid)
    done = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == pynvml.NVML_SUCCESS
    # A clique's number alone repeats between clusters.
    return f"{identity.hex()}/{info.cliqueId}" if done and any(identity) else ""


def _neighbours(pynvml: Any, handle: Any, address: str) -> str:
    """Name the clique of a host's devices: all of them over an NVSwitch, else those that are joined directly."""
    joined = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) != pynvml.NVML_FEATURE_ENABLED:
                continue
            kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                return f"{socket.gethostname()}/nvswitch"[:128]
            # NVML writes eight digits of the domain; /sys writes four.
            joined.append(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId.lower()[-12:])
        except pynvml.NVMLError:
            continue
    # The lowest address of the joined ones is the same on all of them.
    return f"{socket.gethostname()}/{min([*joined, address])}"[:128] if joined else ""


def slurm_switches() -> tuple[str, ...]:
    """The switches above this host, from the top to its leaf, as Slurm's topology has them; () where it has none.

    A task finds them in its environment; else ``scontrol`` is asked for those that this node is under.
    """
    address, pattern = os.environ.get("SLURM_TOPOLOGY_ADDR", ""), os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    if pattern.startswith("switch."):
        # The last field is the node itself.
        return tuple(name[:64] for name in address.split(".")[:-1][-_MOST_SWITCHES:])
    return switches_of(scontrol_show("topology", os.environ.get("SLURMD_NODENAME", "")))


def scontrol_show(entity: str, names: str) -> list[str]:
    """Return the lines that ``scontrol show`` prints about nodes; none without Slurm, or where these are no names of any."""
    # The names go to a program's command line: nothing that could be an option, nothing but host lists.
    if not re.fullmatch(r"[\w.,\[\]-]{1,65536}", names, re.ASCII) or names.startswith("-"):
        return []
    try:
        done = subprocess.run(
            ["scontrol", "show", entity, names], capture_output=True, text=True, check=True, timeout=_SCONTROL_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def switches_of(lines: Iterable[str]) -> tuple[str, ...]:
    """The switches that ``scontrol show topology NODE`` prints, from the top to the leaf."""
    found = [re.search(r"SwitchName=(\S+) Level=(\d+)", line) for line in lines]
    levels = {int(match[2]): match[1][:64] for match in found if match}
    # Levels count from the leaf, 0, upwards.
    return tuple(levels[level] for level in sorted(levels, reverse=True)[-_MOST_SWITCHES:])
