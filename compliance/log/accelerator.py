"""Parse names of accelerators: "NVIDIA H100 80GB HBM3" from a driver, "NVIDIA A100-SXM4-80GB (400W)" from a description."""

import re
from typing import Literal

MAX_NAME = 200
"""Maximum characters of a name that are parsed. Names are untrusted text from files and drivers."""

Form = Literal["SXM", "PCIe", "NVL"]


def form(name: str) -> Form | None:
    """Return the form factor in a name, if any. Drivers' names of some SXM devices contain HBM3 instead of SXM."""
    text = re.sub(r"[^A-Z0-9]+", " ", name[:MAX_NAME].upper())
    # Check for PCIe first, because the name of a PCIe card may also contain its memory type.
    if "PCIE" in text:
        return "PCIe"
    if re.search(r"\bNVL\b", text):
        return "NVL"
    return "SXM" if re.search(r"SXM|\bHBM3E?\b", text) else None
