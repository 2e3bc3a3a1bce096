"""The system description of a submission: the 33 fields, found out from this machine.

Every field is a string, because the official tools crash on numbers. What cannot be found out stays empty, which the
tools accept; what is found out can be overridden, and must be for a cluster: this describes the one node it runs on.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from compliance.artefact import write_whole
from compliance.rules import DIVISIONS, SYSTEM_FIELDS, SYSTEM_INTEGERS, SYSTEM_STATUSES, Division

RESEARCH = "Research, Development, or Internal (RDI)"
"""The status that is true of every system nobody sells or rents out as such."""

COMMAND_TIMEOUT_S = 20


def describe(division: Division, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """The system description of this machine, in the order of `SYSTEM_FIELDS`.

    Args:
        division: "closed" or "open"; lower case, as in the log.
        overrides: fields to set instead of what was found out.

    Raises:
        ValueError: an unknown division, field or status, or a count that is no number.
    """
    fields = dict.fromkeys(SYSTEM_FIELDS, "")
    fields |= {"division": division, "status": RESEARCH, "system_name": socket.gethostname(), "number_of_nodes": "1"}
    fields |= _processors() | _memory() | _storage() | _network() | _accelerators() | _software()
    overrides = overrides or {}
    for name in overrides:
        if name not in fields:
            raise ValueError(f"system field {name!r} does not exist, expected one of {', '.join(SYSTEM_FIELDS)}")
    fields |= overrides
    _check(fields)
    return fields


def write(path: Path, fields: Mapping[str, str]) -> None:
    """Write a description as JSON; the file appears whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    text = json.dumps(dict(fields), indent=2, ensure_ascii=False) + "\n"
    write_whole(path, text)


def _check(fields: Mapping[str, str]) -> None:
    if fields["division"] not in DIVISIONS:
        raise ValueError(f"division is {fields['division']!r}, expected 'closed' or 'open' in lower case")
    if fields["status"] not in SYSTEM_STATUSES:
        raise ValueError(f"status is {fields['status']!r}, expected one of {', '.join(map(repr, SYSTEM_STATUSES))}")
    for name in SYSTEM_INTEGERS:
        if not re.fullmatch(r"\d+", fields[name]):
            raise ValueError(f"{name} is {fields[name]!r}, expected a number such as '8'")


def _processors() -> dict[str, str]:
    cpu = _colon_table(_output("lscpu"))
    sockets = _leading_integer(cpu.get("Socket(s)", "")) or 1
    cores = _leading_integer(cpu.get("Core(s) per socket", "")) or 0
    threads = _leading_integer(cpu.get("CPU(s)", "")) or os.cpu_count() or 0
    megahertz = cpu.get("CPU max MHz", "")
    caches = [f"{name}: {cpu[name]}" for name in ("L1d cache", "L1i cache", "L2 cache", "L3 cache") if name in cpu]
    return {
        "host_processors_per_node": str(sockets),
        "host_processor_model_name": cpu.get("Model name", "") or _cpuinfo_model() or platform.machine(),
        "host_processor_core_count": str(cores or threads // sockets),
        "host_processor_vcpu_count": str(threads),
        "host_processor_frequency": f"{float(megahertz) / 1000:.2f} GHz" if _is_decimal(megahertz) else "",
        "host_processor_caches": ", ".join(caches),
    }


def _memory() -> dict[str, str]:
    total = _colon_table(_read("/proc/meminfo")).get("MemTotal", "")
    kibibytes = _leading_integer(total)
    return {"host_memory_capacity": f"{kibibytes / 2**20:.0f} GiB" if kibibytes else ""}


def _storage() -> dict[str, str]:
    """The file system of the working folder: that is where the data are."""
    return {"host_storage_capacity": f"{shutil.disk_usage('.').total / 1e9:.0f} GB", "host_storage_type": _disk_type()}


def _disk_type() -> str:
    kinds = set()
    for flag in Path("/sys/block").glob("*/queue/rotational"):
        name = flag.parent.parent.name
        if name.startswith(("vd", "xvd")):
            kinds.add("virtual disk")
        elif name.startswith("nvme"):
            kinds.add("NVMe SSD")
        elif name.startswith("sd"):
            kinds.add("HDD" if _read(str(flag)).strip() == "1" else "SSD")
    return ", ".join(sorted(kinds))


def _network() -> dict[str, str]:
    adapters = [path.name for path in sorted(Path("/sys/class/infiniband").glob("*"))]
    wired = [path.parent.name for path in sorted(Path("/sys/class/net").glob("*/device"))]
    if adapters:
        return {"host_networking": f"InfiniBand or RoCE: {', '.join(adapters)}"}
    return {"host_networking": f"Ethernet: {', '.join(wired)}" if wired else ""}


def _accelerators() -> dict[str, str]:
    query = "name,memory.total,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max"
    rows = list(csv.reader(_output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").splitlines()))
    rows = [[cell.strip() for cell in row] for row in rows if len(row) == 5]
    if not rows:
        return {"accelerators_per_node": "0", "accelerator_model_name": "N/A"}
    name, memory, clock, generation, width = rows[0]
    links = len(re.findall(r"Link \d+: [\d.]+ GB/s", _output("nvidia-smi", "nvlink", "--status", "--id=0")))
    return {
        "accelerators_per_node": str(len(rows)),
        "accelerator_model_name": name,
        "accelerator_memory_capacity": memory,
        "accelerator_frequency": clock,
        "accelerator_host_interconnect": f"PCIe Gen{generation} x{width}",
        "accelerator_interconnect": f"{links} NVLinks" if links else "",
    }


def _software() -> dict[str, str]:
    versions = {
        name: _version(name) for name in ("numpy", "triton", "nvidia-dali", "nvidia-nccl-cu12", "mlperf-logging")
    }
    stack = [f"{name} {version}" for name, version in versions.items() if version]
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0].strip()
    stack += [f"NVIDIA driver {driver}"] if driver else []
    stack += [f"Python {platform.python_version()}"]
    release = dict(re.findall(r'^(\w+)="?(.*?)"?$', _read("/etc/os-release"), re.MULTILINE))
    return {
        "framework": f"PyTorch {_version('torch')}".strip(),
        "other_software_stack": ", ".join(stack),
        "operating_system": release.get("PRETTY_NAME", platform.platform()),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _cpuinfo_model() -> str:
    return _colon_table(_read("/proc/cpuinfo")).get("model name", "")


def _colon_table(text: str) -> dict[str, str]:
    """The lines "name: value" of a text; of a repeated name the first."""
    table: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            table.setdefault(name.strip(), value.strip())
    return table


def _leading_integer(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


def _is_decimal(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output(*command: str) -> str:
    """What a command prints, in the C locale; "" when it is not there or fails."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""
