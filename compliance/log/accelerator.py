"""Parse names of accelerators: "NVIDIA H100 80GB HBM3" from a driver, "NVIDIA A100-SXM4-80GB (400W)" from a description."""

import re
from typing import Literal

MAX_NAME = 200
"""Maximum characters of a name that are parsed. Names are untrusted text from files and drivers."""

Form = Literal["SXM", "PCIe", "NVL"]


def family(name: str) -> str | None:
    """Return the model in a name: "H100", or "GAUDI 2" for "Habana Gaudi2"; None if the name contains no model."""
    text = name[:MAX_NAME].upper()
    if match := re.search(r"\b(GAUDI|TPU)[ -]?V?(\d*)", text):
        return " ".join(filter(None, match.groups()))
    for word in re.findall(r"[A-Z]+\d*[A-Z]?", text):
        # Exclude words for form, memory type and generation, which look like a model.
        if word == "BOW" or re.fullmatch(r"(?!SXM|HBM|OAM|GEN)[A-Z]{1,3}\d{1,4}[A-Z]?", word):
            return word
    return None


def form(name: str) -> Form | None:
    """Return the form factor in a name, if any. The driver's name for an SXM device contains only its memory type, HBM3."""
    text = re.sub(r"[^A-Z0-9]+", " ", name[:MAX_NAME].upper())
    # Check for PCIe first, because the name of a PCIe card may also contain its memory type.
    if "PCIE" in text:
        return "PCIe"
    if re.search(r"\bNVL\b", text):
        return "NVL"
    return "SXM" if re.search(r"SXM|\bHBM3E?\b", text) else None
