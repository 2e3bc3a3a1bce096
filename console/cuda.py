"""Software that a run on NVIDIA GPUs needs besides PyTorch: a driver for its CUDA version, and a compiler for Triton."""

import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from console import processes

DRIVER_FOR_CUDA = {11: 450, 12: 525, 13: 580}
"""Oldest driver branch for each major version of CUDA (CUDA release notes, minor version compatibility)."""

LIBCUDA = "libcuda.so.1"


@dataclass(frozen=True)
class Lack:
    """Something that a machine lacks, and its remedy."""

    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}: {self.remedy}"


def outdated_driver(driver: str, cuda: str) -> Lack | None:
    """Return what is wrong if a driver ("550.54.15") is too old for a CUDA version ("13.0"), otherwise None."""
    branch, major = re.match(r"\d+", driver), re.match(r"\d+", cuda)
    needed = DRIVER_FOR_CUDA.get(int(major[0])) if major else None
    if not branch or needed is None or int(branch[0]) >= needed:
        return None
    fitting = max((cuda for cuda, oldest in DRIVER_FOR_CUDA.items() if oldest <= int(branch[0])), default=None)
    other = f", or install a PyTorch for CUDA {fitting}" if fitting else ""
    return Lack(f"driver {driver} is too old for CUDA {cuda}", f"install driver {needed} or newer{other}")


def loaded_driver(root: Path = Path("/")) -> str:
    """Return the version of the loaded NVIDIA driver; "" without one."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")[:4096]
    except OSError:
        return ""
    version = re.search(r"^NVRM version:.*?\s(\d+\.\d[\d.]*)\s", text, re.MULTILINE)
    return version[1] if version else ""


def lacks_of_triton() -> list[Lack]:
    """List what Triton lacks. Before its first kernel it compiles a launcher in C against Python and the driver."""
    if find_spec("triton") is None:
        return []
    lacks = []
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        lacks.append(Lack(f"no C compiler ({' or '.join(compilers)}) for Triton", "install gcc, or set CC"))
    # Debian's own scheme names a folder without headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h")
    if not header.is_file():
        lacks.append(Lack(f"no {header} for Triton", "install Python's headers (Debian and Ubuntu: python3-dev)"))
    if not _libcuda_is_found():
        remedy = f"run ldconfig (root), or set TRITON_LIBCUDA_PATH to the folder of {LIBCUDA}"
        lacks.append(Lack(f"no {LIBCUDA} of NVIDIA's driver for Triton", remedy))
    return lacks


def _libcuda_is_found() -> bool:
    if given := os.environ.get("TRITON_LIBCUDA_PATH"):
        return Path(given, LIBCUDA).exists()
    known = processes.run(["/sbin/ldconfig", "-p"], timeout_s=60).answer
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return LIBCUDA in known or any(Path(folder, LIBCUDA).exists() for folder in folders if folder)
