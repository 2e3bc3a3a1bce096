"""Conditions that a figure depends on besides the code under test. Every file of results contains them."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch

from console.version import commit

_PACKAGES = ("torch", "triton", "numpy", "scipy", "transformers", "accelerate", "flash-attn")


def conditions() -> dict[str, object]:
    """Return the commit, date, machine, load, and the versions of Python and of the relevant packages."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        # Figures are comparable only if the instruction set and the number of cores are the same.
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} logical cores",
        # A high load shows that other programs may have slowed the measurement.
        "load_average": os.getloadavg(),
        "versions": versions,
    }


def write_figures(path: Path, figures: Mapping[str, object]) -> None:
    """Write ``figures`` and the present conditions as JSON. Makes the folder if it is absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**figures, **conditions()}, indent=1) + "\n", encoding="utf-8")
