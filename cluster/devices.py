"""Data-sheet facts of accelerators, and a lookup that finds the accelerator by any of its names.

Names come from drivers ("NVIDIA H100 80GB HBM3"), from system descriptions ("NVIDIA A100-SXM4-80GB (400W)") and from people
("h100-sxm"). The model name selects the candidates; form factor and memory size choose among them.
"""

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from compliance.log.accelerator import MAX_NAME, form

TABLE = Path(__file__).with_name("devices.toml")


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
    first_round: str | None = None


@lru_cache
def devices() -> tuple[Device, ...]:
    with TABLE.open("rb") as file:
        return tuple(Device(**entry) for entry in tomllib.load(file)["device"])


def device_named(name: str) -> Device:
    """Return the device that a name refers to. Raises ``ValueError`` with the nearest names if it is unknown."""
    # Vendors put hyphens, slashes and brackets anywhere, so only letters, digits and "+" separate words.
    words = re.sub(r"[^A-Z0-9+]+", " ", name[:MAX_NAME].upper()).replace("GAUDI 2", "GAUDI2")
    # Match whole words: "A100" must not match "A1000", nor "H100" match "GH100".
    alike = [device for device in devices() if re.search(rf"\b{device.model.upper()}\b", words)]
    alike = alike or [device for device in devices() if device.name.upper() in name.upper()]
    if not alike:
        names = {device.name.upper(): device.name for device in devices()}
        nearest = difflib.get_close_matches(words.removeprefix("NVIDIA "), names, n=3, cutoff=0.0)
        raise ValueError(
            f"accelerator {name[:MAX_NAME]!r} is unknown; nearest: {', '.join(names[each] for each in nearest)}; "
            "`python -m cluster devices` lists all"
        )
    alike = [device for device in alike if device.form == form(name)] or alike
    memory = re.search(r"(\d{2,3}) ?GB\b", words)
    # Choose the nearest memory size because names round it in different ways.
    return min(alike, key=lambda device: abs(device.memory_gb - int(memory[1]))) if memory else alike[0]
