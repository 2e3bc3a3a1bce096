"""What produced a result: configuration, commit, versions, machine. The head of every result file."""

import importlib.metadata
import os
import platform
from dataclasses import fields, is_dataclass
from pathlib import Path

import torch

from bert.config import Config
from bert.parallel.mesh import Mesh
from console.version import commit

PACKAGES = ("torch", "numpy", "h5py", "tokenizers", "mlperf-logging", "nvidia-dali-cuda130", "triton")
REPOSITORY = Path(__file__).resolve().parents[2]


def provenance(config: Config, mesh: Mesh, seed: int) -> dict[str, object]:
    """Field names and values for the head of a result file."""
    head: dict[str, object] = {
        "note": "not an MLPerf result: unverified, not reviewed by MLCommons",
        "recipe": config.recipe,
        "commit": commit(),
        "python": platform.python_version(),
    }
    head |= {package: _version(package) for package in PACKAGES}
    head |= {
        "host": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": f"{_cpu_model()}, {os.cpu_count()} logical cores",
        "processes": f"{mesh.world_size} x {torch.get_num_threads()} threads",
        "accelerator": torch.cuda.get_device_name() if mesh.device.type == "cuda" else "none",
        "seed": seed,
    }
    return head | dict(flattened("config", config))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def flattened(prefix: str, section: object) -> list[tuple[str, object]]:
    """Names and values of a section and of those in it; paths in the repository start at its root."""
    assert is_dataclass(section)
    rows: list[tuple[str, object]] = []
    for field in fields(section):
        value = getattr(section, field.name)
        name = f"{prefix}.{field.name}"
        if isinstance(value, Path) and value.is_relative_to(REPOSITORY):
            value = value.relative_to(REPOSITORY)
        rows += flattened(name, value) if is_dataclass(value) else [(name, value)]
    return rows
