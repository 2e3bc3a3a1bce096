"""Header of a result file: the configuration, commit, package versions and machine of the run."""

import contextlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

from bert.configuration.config import Config, flattened
from bert.parallel.mesh import Mesh
from console.version import commit

PACKAGES = ("torch", "numpy", "h5py", "tokenizers", "mlperf-logging", "nvidia-dali-cuda130", "triton")


def provenance(config: Config, mesh: Mesh, seed: int) -> dict[str, object]:
    head: dict[str, object] = {
        # This note is required for results that MLCommons has not reviewed (docs/compliance.md).
        "note": "not an MLPerf result: unverified, not reviewed by MLCommons",
        "recipe": config.recipe,
        "commit": commit(),
        "python": platform.python_version(),
    }
    head |= {package: _version(package) for package in PACKAGES}
    head |= {
        "host": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": f"{_cpu_model()}, {os.cpu_count()} logical cores",
        "processes": f"{mesh.world_size} x {torch.get_num_threads()} threads, {mesh}",
        "accelerator": torch.cuda.get_device_name() if mesh.device.type == "cuda" else "none",
        "seed": seed,
    }
    nccl = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    if nccl and mesh.device.type == "cuda":
        head["nccl"] = " ".join(nccl)
    return head | dict(flattened("config", config))


def _version(package: str) -> str:
    try:
        # Read the package metadata, which avoids importing the package.
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*:\s*(.*)$", text, re.M):
            return found[1]
    return platform.machine()
