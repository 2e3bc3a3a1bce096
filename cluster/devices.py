"""Facts of devices, and the device that a name means.

Names come from drivers ("NVIDIA H100 80GB HBM3"), from system descriptions ("NVIDIA A100-SXM4-80GB (400W)") and from people
("h100-sxm"): the model is the word that tells, form and memory choose among its devices.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

TABLE = Path(__file__).with_name("devices.toml")

# Names come from files and drivers; a longer one is no name, and is cut before any expression looks at it.
_LONGEST_NAME = 200


@dataclass(frozen=True)
class Device:
    """Device by the figures of its vendor. Rates are of dense operations; bandwidths go one way.

    Attributes:
        vendor: who makes it.
        model: word by which names tell the model.
        chip: on it; models that share one differ in memory, power, and how much of it is used.
        form: how it is built in: SXM, PCIe, NVL, OAM, superchip or CPU.
        bf16_tflops, fp8_tflops: 10^12 operations a second of matrix products; None where there is no such type.
        memory, memory_gb, memory_gb_s: kind, size in 10^9 bytes, and bandwidth.
        link: what joins the devices of a node.
        link_gb_s: of one device, to all others of its node together.
        host_gb_s: between device and host.
        tdp_w: power in watts.
        year: of the architecture.
        bridge_gb_s: between the two of a pair that a bridge joins; None where there is no bridge.
        network_gb_s: to other nodes, of a device with ports of its own.
        link_domain: devices that the link joins, where these are more than a node's.
        first_round: MLPerf Training round of its first BERT results, if it has any in the table of published ones.
        multiprocessors, clock_ghz: of a GPU, and the clock that its rates are given at; None where nothing asks for it.
        source: where the figures stand.
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
    first_round: str | None = None
    multiprocessors: int | None = None
    clock_ghz: float | None = None


@lru_cache
def devices() -> tuple[Device, ...]:
    """Return all devices of the facts file, in its order."""
    with TABLE.open("rb") as file:
        return tuple(Device(**entry) for entry in tomllib.load(file)["device"])


def device_named(name: str) -> Device:
    """Return the device that a name means: of its model the one of the form, and nearest in memory, that the name tells.

    Raises:
        ValueError: no model of the facts file is in the name; the message names the nearest.
    """
    # Vendors put hyphens, slashes and brackets anywhere, so only letters, digits and "+" tell words apart.
    words = re.sub(r"[^A-Z0-9+]+", " ", name[:_LONGEST_NAME].upper()).replace("GAUDI 2", "GAUDI2")
    # Whole words: "A100" must not be found in "A1000", nor "H100" in "GH100".
    alike = [device for device in devices() if re.search(rf"\b{device.model.upper()}\b", words)]
    if not alike:
        alike = [device for device in devices() if device.name.upper() in name.upper()]
    if not alike:
        raise ValueError(
            f"accelerator {name[:_LONGEST_NAME]!r} is unknown; nearest: {', '.join(_nearest(words))}; "
            "`python -m cluster devices` lists all"
        )
    form = _form(words)
    # Without a form in the name, all forms of the model stay, and memory or the order of the file decides.
    alike = [device for device in alike if device.form == form] or alike
    memory = re.search(r"(\d{2,3}) ?GB\b", words)
    # The nearest, not the equal one: names round a device's memory in different ways.
    return min(alike, key=lambda device: abs(device.memory_gb - int(memory[1]))) if memory else alike[0]


def _form(words: str) -> str | None:
    """Read the form off a name; the driver's name of an SXM device has the kind of its memory in it instead."""
    # PCIe first: the kind of memory in the name of a card must not make an SXM device of it.
    for pattern, form in ((r"PCIE", "PCIe"), (r"\bNVL\b", "NVL"), (r"SXM|\bHBM3E?\b", "SXM")):
        if re.search(pattern, words):
            return form
    return None


def _nearest(words: str) -> list[str]:
    names = {device.name.upper(): device.name for device in devices()}
    # cutoff=0.0: the nearest are named however far they are; an empty list would help nobody.
    close = difflib.get_close_matches(words.removeprefix("NVIDIA "), names, n=3, cutoff=0.0)
    return [names[name] for name in close]
