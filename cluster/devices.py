"""Data-sheet facts of accelerators, a lookup that finds the accelerator by any of its names, and machines of accelerators.

Names come from drivers ("NVIDIA H100 80GB HBM3"), from system descriptions ("NVIDIA A100-SXM4-80GB (400W)") and from people
("h100-sxm"). The model name selects the candidates; form factor and memory size choose among them. A machine's links and
network are parsed from the free text of a system description.
"""

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

TABLE = Path(__file__).with_name("devices.toml")

MOST_ACCELERATORS = 1 << 20
"""Largest accepted number of accelerators or nodes. No cluster has this many, so a larger number is a typing error."""

_GBIT_S = {"XDR": 800, "NDR": 400, "HDR100": 100, "HDR": 200, "EDR": 100, "E810": 100}
"""Rate of a port in Gbit/s, by the product name that implies the rate."""

_MOST_PORTS = 64

MAX_NAME = 200
"""Maximum characters of a name that are parsed. Names are untrusted text from files and drivers."""


@dataclass(frozen=True)
class Device:
    """Data-sheet facts of an accelerator: one entry of ``devices.toml``, which describes the fields and their units.

    Rates count dense operations, and bandwidths are one-way. Optional fields are None if the device lacks the feature.
    """

    name: str
    vendor: str
    model: str
    chip: str
    form: str
    bf16_tflops: float
    memory: str
    memory_gb: float
    memory_gb_s: float
    link: str
    link_gb_s: float
    host_gb_s: float
    tdp_w: float
    year: int
    source: str
    fp8_tflops: float | None = None
    bridge_gb_s: float | None = None
    network_gb_s: float | None = None
    link_domain: int | None = None
    per_node: int = 8
    first_round: str | None = None


@lru_cache
def devices() -> tuple[Device, ...]:
    with TABLE.open("rb") as file:
        return tuple(Device(**entry) for entry in tomllib.load(file)["device"])


def device_named(name: str) -> Device:
    """Return the device that a name refers to. Raises ``ValueError`` with the nearest names if it is unknown."""
    # Vendors put hyphens, slashes and brackets anywhere, so only letters, digits and "+" separate words.
    words = re.sub(r"[^A-Z0-9+]+", " ", name[:MAX_NAME].upper()).replace("GAUDI ", "GAUDI")
    alike = [device for device in devices() if _names_model(words, device.model.upper())]
    alike = alike or [device for device in devices() if device.name.upper() == name.upper()]
    of_form = [device for device in alike if device.form == form(name)]
    # A PCIe card is slower than the module of the same model, so it must not get the module's facts.
    if not alike or (form(name) == "PCIe" and not of_form):
        names = {device.name.upper(): device.name for device in alike or devices()}
        product = words.removeprefix("NVIDIA ").removeprefix("GEFORCE ")
        nearest = difflib.get_close_matches(product, names, n=3, cutoff=0.0)
        raise ValueError(
            f"accelerator {name[:MAX_NAME]!r} is unknown; nearest: {', '.join(names[each] for each in nearest)}; "
            "`python -m cluster devices` lists all"
        )
    alike = of_form or alike
    memory = re.search(r"(\d{2,3}) ?GB\b", words)
    # Choose the nearest memory size because names round it in different ways.
    return min(alike, key=lambda device: abs(device.memory_gb - int(memory[1]))) if memory else alike[0]


def form(name: str) -> str | None:
    """Return the form factor in a name, if any. Drivers' names of some SXM devices contain HBM3 instead of SXM."""
    text = re.sub(r"[^A-Z0-9]+", " ", name[:MAX_NAME].upper())
    # Check for PCIe first, because the name of a PCIe card may also contain its memory type.
    if "PCIE" in text:
        return "PCIe"
    if re.search(r"\bNVL\b", text):
        return "NVL"
    return "SXM" if re.search(r"SXM|\bHBM3E?\b", text) else None


def _names_model(words: str, model: str) -> bool:
    """Tell whether ``words`` contain a model's name, with or without its spaces, such as "RTX4090" or "7900XTX".

    Only whole words count: "A100" must not match "A1000", nor "H100" match "GH100". Names of laptop chips and of China's
    RTX 4090 D do not match, because these chips are slower.
    """
    return re.search(rf"(?:\b|RTX|RX){model.replace(' ', ' ?')}\b(?! (?:LAPTOP|D)\b)", words) is not None


@dataclass(frozen=True)
class Network:
    """Network ports of a node, with the one-way rate of each. ``is_assumed`` is set if the description names no ports."""

    ports: int
    gbit_s: float
    is_assumed: bool = False


@dataclass(frozen=True)
class Machine:
    """A machine of equal nodes with equal devices. ``is_bridged`` is set if bridges join pairs of cards."""

    device: Device
    nodes: int
    per_node: int
    is_bridged: bool
    network: Network

    @cached_property
    def accelerators(self) -> int:
        return self.nodes * self.per_node

    @cached_property
    def group(self) -> int:
        """Number of devices joined by the fast link: the devices of a node, or of a rack if the link reaches that far."""
        return min(self.accelerators, max(self.per_node, self.device.link_domain or 0))

    @cached_property
    def groups(self) -> int:
        """Number of groups. Only the network connects groups, and the last group may be smaller."""
        return -(-self.accelerators // self.group)


def describe_machine(
    device: Device, nodes: int, per_node: int, interconnect: str = "", networking: str = ""
) -> Machine:
    """Return a machine, given its numbers of nodes and devices, and two texts as in MLPerf's system descriptions.

    ``interconnect`` describes the links within a node, such as "NVLINK BRIDGE". ``networking`` describes the network between
    nodes, such as "Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: ...".

    Raises ``ValueError`` if a number is out of range.
    """
    counts = {"nodes": nodes, "accelerators per node": per_node, "accelerators": nodes * per_node}
    for name, value in counts.items():
        if not 0 < value <= MOST_ACCELERATORS:
            raise ValueError(f"the number of {name} is {value:,}, expected 1 to {MOST_ACCELERATORS:,}")
    is_bridged = device.bridge_gb_s is not None and re.search(r"nvlink|bridge", interconnect, re.I) is not None
    return Machine(device, nodes, per_node, is_bridged, _network(networking) or _usual_network(device, per_node))


def _network(text: str) -> Network | None:
    """Parse the ports that carry training traffic: the ports labelled Compute, or else the fastest ports."""
    text = text[:1000]  # limits the work on untrusted text, and no real description is longer
    if compute := re.search(r"Compute\s*:?(.*?)(?:Management|Storage|$)", text, re.S):
        text = compute[1]
    parts = [part for part in re.split(r"[,;+]", text) if not re.search("Management|Storage", part)]
    found = [network for part in parts if (network := _ports(part))]
    # Compare total rates, because eight slow ports may carry more than one fast port.
    return max(found, key=lambda network: network.ports * network.gbit_s, default=None)


def _ports(part: str) -> Network | None:
    """Parse ports of one kind, such as "8x ConnectX-6 IB HDR 200Gb/Sec" or "1x ConnectX-5 IB EDR"."""
    count = re.search(r"\b(\d{1,3}) ?x(?![a-z])", part)
    ports = min(max(int(count[1]), 1), _MOST_PORTS) if count else 1
    # A rate stands alone or after a count, as in "4x1Gb". "BCM5719 Gigabit" has no rate, because 5719 is part of a name.
    if rate := re.search(r"(?:\b|(?<=\dx))(\d{1,4}) ?G(?:b|B|igabit|\b)", part):
        return Network(ports, float(rate[1])) if int(rate[1]) else None
    named = next((rate for word, rate in _GBIT_S.items() if re.search(rf"\b{word}\b", part)), None)
    return Network(ports, named) if named else None


def _usual_network(device: Device, per_node: int) -> Network:
    """Assume one port per module, with a rate that depends on the year. For cards and CPUs, assume one of 100 Gbit/s."""
    if device.form in ("PCIe", "NVL", "CPU"):
        return Network(1, 100, is_assumed=True)
    return Network(per_node, 200 if device.year <= 2020 else 400, is_assumed=True)
