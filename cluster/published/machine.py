"""A machine that may train: devices, nodes, and the links between them as system descriptions put them in words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from cluster.devices import Device

MOST_ACCELERATORS = 1 << 20
"""More than any cluster has; what is above is a slip of the hand."""

_BITS = {"XDR": 800, "NDR": 400, "HDR100": 100, "HDR": 200, "EDR": 100, "E810": 100}
"""Gbit/s of a port, by the word that stands for it."""

_MOST_PORTS = 64


@dataclass(frozen=True)
class Network:
    """The ports of a node that lead to others.

    Attributes:
        ports: number of them.
        gbit_s: rate of each, one way.
        is_assumed: nothing was said, so this is what such machines usually have.
    """

    ports: int
    gbit_s: float
    is_assumed: bool = False


@dataclass(frozen=True)
class Machine:
    """Devices in nodes.

    Attributes:
        nodes, per_node: how many nodes, and devices in each.
        is_bridged: pairs of cards are joined by a bridge.
        network: what leads from a node to others.
    """

    device: Device
    nodes: int
    per_node: int
    is_bridged: bool
    network: Network

    @cached_property
    def accelerators(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.per_node

    @cached_property
    def group(self) -> int:
        """Devices that the fast link joins: a node's, or a rack's where it reaches further."""
        # A link of a rack joins more than a node, but never more devices than there are.
        return min(self.accelerators, max(self.per_node, self.device.link_domain or 0))

    @cached_property
    def groups(self) -> int:
        """Number of groups that only the network joins."""
        # The last group may be smaller.
        return -(-self.accelerators // self.group)

    @property
    def has_fabric(self) -> bool:
        """Tell whether all devices of a group reach each other by more than PCIe."""
        return self.device.form != "PCIe" and self.device.form != "NVL"


def describe_machine(
    device: Device, nodes: int, per_node: int, interconnect: str = "", networking: str = ""
) -> Machine:
    """Make a machine of numbers and of two descriptions in free text, as MLPerf's system descriptions have them.

    Args:
        interconnect: of the devices in a node, "NVLINK BRIDGE" say.
        networking: of the nodes, "Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: ..." say.

    Raises:
        ValueError: a number is not positive, or there are more devices than any cluster has.
    """
    for name, value in (("nodes", nodes), ("GPUs per node", per_node)):
        if not 0 < value <= MOST_ACCELERATORS:
            raise ValueError(f"{name}: {value}, expected 1 to {MOST_ACCELERATORS:,}")
    if nodes * per_node > MOST_ACCELERATORS:
        raise ValueError(f"{nodes:,} nodes of {per_node:,} GPUs: expected at most {MOST_ACCELERATORS:,} GPUs in all")
    is_bridged = device.bridge_gb_s is not None and re.search(r"nvlink|bridge", interconnect, re.I) is not None
    return Machine(device, nodes, per_node, is_bridged, _network(networking) or _usual_network(device, per_node))


def _network(text: str) -> Network | None:
    """The ports that carry the training: those labelled Compute, or else the fastest that are named."""
    # Free text from elsewhere: what is far longer is no description.
    text = text[:1000]
    # Some describe storage and management networks as well, which carry no gradients.
    if compute := re.search(r"Compute\s*:?(.*?)(?:Management|Storage|$)", text, re.S):
        text = compute[1]
    parts = [part for part in re.split(r"[,;+]", text) if not re.search("Management|Storage", part)]
    found = [network for part in parts if (network := _ports(part))]
    # By the sum of the ports: eight slow ones may carry more than one fast.
    return max(found, key=lambda network: network.ports * network.gbit_s, default=None)


def _ports(part: str) -> Network | None:
    """Ports of one kind: "8x ConnectX-6 IB HDR 200Gb/Sec", "1x ConnectX-5 IB EDR"."""
    # No letter may follow the "x".
    count = re.search(r"\b(\d{1,3}) ?x(?![a-z])", part)
    ports = min(max(int(count[1]), 1), _MOST_PORTS) if count else 1
    if rate := re.search(r"(?<!\d)(\d{1,4}) ?G(?:b|B|igabit|\b)", part):
        # A rate of 0 is a slip, by which times would be divided.
        return Network(ports, float(rate[1])) if int(rate[1]) else None
    named = next((bits for word, bits in _BITS.items() if re.search(rf"\b{word}\b", part)), None)
    return Network(ports, named) if named else None


def _usual_network(device: Device, per_node: int) -> Network:
    """Assume a port for each device of a training module, as fast as its generation has them; of 100 Gbit/s for cards."""
    if device.form in ("PCIe", "NVL", "CPU"):
        return Network(1, 100, is_assumed=True)
    return Network(per_node, 200 if device.year <= 2020 else 400, is_assumed=True)
