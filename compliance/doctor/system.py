"""The system description of a submission: the 33 fields, found out from this machine.

Every field is a string, because the official tools crash on numbers. What cannot be found out stays empty, which the
tools accept; what is found out can be overridden, and must be for a cluster: this describes the one node it runs on.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from compliance.doctor import gpus
from compliance.doctor.host import ExaminedHost
from compliance.log.rules import DIVISIONS, SYSTEM_FIELDS, SYSTEM_INTEGERS, SYSTEM_STATUSES

PYTORCH_TIMEOUT_S = 90.0

# cuDNN counts 8.9.7 as 8907, and 9.1.0 as 90100.
_ASK_PYTORCH = """
import json, torch
from console.cuda import lacks_of_triton
cudnn = torch.backends.cudnn.version()
nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
seen = torch.cuda.is_available()
print(json.dumps({
    "PyTorch": torch.__version__,
    "CUDA": torch.version.cuda,
    "cuDNN": cudnn and (f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn >= 90000 else
                        f"{cudnn // 1000}.{cudnn // 100 % 10}.{cudnn % 100}"),
    "NCCL": nccl and ".".join(map(str, nccl)),
    "gpus": torch.cuda.device_count() if seen else 0,
    "architectures": torch.cuda.get_arch_list() if seen else [],
    "capability": list(torch.cuda.get_device_capability()) if seen else None,
    "Triton lacks": [(lack.found, lack.remedy) for lack in lacks_of_triton()],
}))
"""

_HBM = (
    ("H200", "HBM3e"),
    ("B200", "HBM3e"),
    ("B300", "HBM3e"),
    ("H100 PCIe", "HBM2e"),
    ("H100", "HBM3"),
    ("A100-SXM4-40GB", "HBM2"),
    ("A100-PCIE-40GB", "HBM2"),
    ("A100", "HBM2e"),
    ("V100", "HBM2"),
)
"""Kind of memory by a part of the GPU's name, from the vendor's data sheets; the first match counts."""


def measure(host: ExaminedHost) -> dict[str, str]:
    """The fields that a tool or a file of the machine tells; a field that it might have told, and did not, is empty."""
    fields = processors(host.run("lscpu").answer, host)
    fields |= memory(host.read("/proc/meminfo"), host.run("dmidecode", "--type", "memory").answer)
    fields |= storage(host.run("lsblk", "--json", "--bytes", "--output", "NAME,TYPE,SIZE,ROTA,MODEL,TRAN").answer)
    # Without lsblk, what holds the current folder.
    fields["host_storage_capacity"] = fields["host_storage_capacity"] or f"1x {_bytes(shutil.disk_usage('.').total)}"
    fields |= {"host_networking": networking(host)}
    found = gpus.query(host)
    fields |= accelerators(found, host)
    return fields | software(ask_pytorch(host) if found.gpus else {}, found.driver, host)


def complete(measured: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Fill in all `SYSTEM_FIELDS`, in order: those given, else as measured, else what is true of most machines, or empty.

    Raises:
        ValueError: an unknown division, field or status, or a count that is no number.
    """
    fields = dict.fromkeys(SYSTEM_FIELDS, "")
    # The status is true of every system that nobody sells or rents out as such.
    fields |= {"division": "open", "status": SYSTEM_STATUSES["research"]}
    fields |= {"system_name": socket.gethostname(), "number_of_nodes": "1"}
    # In this order: what is given counts most, what is measured more than what is true of most machines.
    fields |= {**measured, **given}
    check_values(fields)
    return fields


def check_values(fields: Mapping[str, str]) -> None:
    """Refuse an unknown field, division or status, or a count that is no number.

    Raises:
        ValueError: which field is wrong, and what was expected.
    """
    statuses = SYSTEM_STATUSES.values()
    for name, value in fields.items():
        if name not in SYSTEM_FIELDS:
            raise ValueError(f"system field {name!r} does not exist, expected one of {', '.join(SYSTEM_FIELDS)}")
        if name == "division" and value not in DIVISIONS:
            raise ValueError(f"division is {value!r}, expected 'closed' or 'open' in lower case")
        if name == "status" and value not in statuses:
            raise ValueError(f"status is {value!r}, expected one of {', '.join(map(repr, statuses))}")
        if name in SYSTEM_INTEGERS and not re.fullmatch(r"\d+", value, re.ASCII):
            raise ValueError(f"{name} is {value!r}, expected a number such as '8'")


def processors(lscpu: str, host: ExaminedHost) -> dict[str, str]:
    """The fields of the host's processors, from lscpu's output where there is one and /proc/cpuinfo elsewhere."""
    cpu = _colon_table(lscpu)
    # Of its blocks, one a core, the first counts.
    info = _colon_table(host.read("/proc/cpuinfo"))
    sockets = _leading_integer(cpu.get("Socket(s)", "")) or 1
    # lscpu of some ARM machines counts cores by cluster.
    cores = _leading_integer(cpu.get("Core(s) per socket", "")) or _leading_integer(cpu.get("Core(s) per cluster", ""))
    threads = _leading_integer(cpu.get("CPU(s)", "")) or os.cpu_count() or 1
    sizes = {level: cpu.get(f"{level} cache", cpu.get(level)) for level in ("L1d", "L1i", "L2", "L3")}
    caches = [f"{level} cache: {size}" for level, size in sizes.items() if size]
    return {
        "host_processors_per_node": str(sockets),
        "host_processor_model_name": cpu.get("Model name") or info.get("model name") or platform.machine(),
        "host_processor_core_count": str(cores or max(1, threads // sockets)),
        "host_processor_vcpu_count": str(threads),
        "host_processor_frequency": _gigahertz(cpu, info),
        "host_processor_caches": ", ".join(caches),
        "host_processor_interconnect": _between_sockets(cpu) if sockets > 1 else "",
    }


def _gigahertz(cpu: Mapping[str, str], info: Mapping[str, str]) -> str:
    """The highest frequency that is known; a virtual machine tells none but that of the moment."""
    for megahertz in (cpu.get("CPU max MHz", ""), cpu.get("CPU MHz", ""), info.get("cpu MHz", "")):
        if re.fullmatch(r"\d+(\.\d+)?", megahertz):
            return f"{float(megahertz) / 1000:.2f} GHz"
    return ""


def _between_sockets(cpu: Mapping[str, str]) -> str:
    vendor, flags = cpu.get("Vendor ID", ""), cpu.get("Flags", "").split()
    if vendor == "GenuineIntel":
        # Server processors got UPI in place of QPI in the generation that brought AVX-512.
        return "UPI" if "avx512f" in flags else "QPI"
    return "Infinity Fabric (xGMI)" if vendor == "AuthenticAMD" else ""


def memory(meminfo: str, dmidecode: str) -> dict[str, str]:
    """Capacity from /proc/meminfo, and the modules from `dmidecode --type memory`, which only root may ask."""
    kibibytes = _leading_integer(_colon_table(meminfo).get("MemTotal", ""))
    modules: Counter[str] = Counter()
    for block in re.split(r"\n(?=Handle )", dmidecode):
        module = _colon_table(block)
        # An empty slot has a size in words, "No Module Installed".
        if "Memory Device" in block.splitlines()[1:2] and _leading_integer(module.get("Size", "")):
            speed = module.get("Configured Memory Speed") or module.get("Speed", "")
            words = (module["Size"], module.get("Type", ""), speed)
            modules[" ".join(word for word in words if word and word != "Unknown")] += 1
    return {
        "host_memory_capacity": f"{kibibytes / 2**20:.0f} GiB" if kibibytes else "",
        "host_memory_configuration": ", ".join(f"{count}x {module}" for module, count in sorted(modules.items())),
    }


def storage(lsblk: str) -> dict[str, str]:
    """Kind and size of the disks, from `lsblk --json --bytes --output NAME,TYPE,SIZE,ROTA,MODEL,TRAN`."""
    kinds: Counter[str] = Counter()
    for disk in _disks(lsblk):
        size = _leading_integer(str(disk.get("size"))) or 0
        name = str(disk.get("name"))
        # lsblk lists compressed memory and drives of removable media as disks, too.
        if disk.get("type") == "disk" and size and not name.startswith(("zram", "ram", "loop", "fd", "sr")):
            kinds[f"{_bytes(size)} {_disk_kind(disk, name)}"] += 1
    sizes = [f"{count}x {kind}" for kind, count in sorted(kinds.items())]
    return {
        # "1.92 TB NVMe SSD": size and unit first, the kind behind them.
        "host_storage_type": ", ".join(sorted({kind.split(" ", 2)[2] for kind in kinds})),
        "host_storage_capacity": ", ".join(" ".join(size.split(" ", 3)[:3]) for size in sizes),
    }


def _disks(lsblk: str) -> list[dict[str, Any]]:
    try:
        listed = json.loads(lsblk or "{}")
    except (ValueError, RecursionError):
        return []
    disks = listed.get("blockdevices") if isinstance(listed, dict) else None
    return [disk for disk in disks if isinstance(disk, dict)] if isinstance(disks, list) else []


def _disk_kind(disk: Mapping[str, Any], name: str) -> str:
    if name.startswith(("vd", "xvd")):
        return "virtual disk"
    if name.startswith("nvme") or disk.get("tran") == "nvme":
        return "NVMe SSD"
    rotating = disk.get("rota") in (True, "1", 1)  # text in old versions of lsblk
    return "HDD" if rotating else "SSD"


def _bytes(count: int) -> str:  # decimal, as disks are sold
    return f"{count / 1e12:.2f} TB" if count >= 10**12 else f"{count / 1e9:.0f} GB"


def networking(host: ExaminedHost) -> str:
    """The network adapters: ports of /sys/class/infiniband by kind and rate, and wired devices of /sys/class/net."""
    kinds: Counter[str] = Counter()
    for port in adapter_ports(host):
        # "200 Gb/sec (4X HDR)" in /sys.
        speed = re.sub(r"Gb/sec.*", "Gb/s", port.rate)
        kinds[f"{'RoCE' if port.link_layer == 'Ethernet' else 'InfiniBand'} {speed}".strip()] += 1
    for name in host.names("/sys/class/net"):
        # Bridges and loopback have no device behind them; InfiniBand was counted above.
        if host.path(f"/sys/class/net/{name}/device").exists() and not name.startswith("ib"):
            megabits = _leading_integer(host.read(f"/sys/class/net/{name}/speed"))
            kinds["Ethernet" + (f" {megabits / 1000:g} Gb/s" if megabits else "")] += 1
    return ", ".join(f"{count}x {kind}" for kind, count in sorted(kinds.items()))


class AdapterPort:
    """A port of a network adapter with RDMA; the state is such as "ACTIVE" or "DOWN", and "" where it is not known."""

    def __init__(self, host: ExaminedHost, adapter: str, number: str) -> None:
        folder = f"/sys/class/infiniband/{adapter}/ports/{number}"
        self.name = f"{adapter} port {number}"
        self.state = host.read(f"{folder}/state").partition(":")[2].strip()  # "4: ACTIVE" in /sys
        self.rate = host.read(f"{folder}/rate")
        self.link_layer = host.read(f"{folder}/link_layer")


def adapter_ports(host: ExaminedHost) -> list[AdapterPort]:
    """The ports of all adapters with RDMA: InfiniBand and RoCE."""
    folder = "/sys/class/infiniband"
    adapters = [(adapter, host.names(f"{folder}/{adapter}/ports")) for adapter in host.names(folder)]
    return [AdapterPort(host, adapter, number) for adapter, numbers in adapters for number in numbers]


def accelerators(found: gpus.Gpus, host: ExaminedHost) -> dict[str, str]:
    """The fields of the accelerators, from nvidia-smi's answers."""
    if not found.gpus:
        return {"accelerators_per_node": "0", "accelerator_model_name": "N/A"}
    first = found.gpus[0]
    name = first.text("name")
    links, rate = gpus.parse_links(host.run("nvidia-smi", "nvlink", "--status", "--id=0").answer)
    topology = gpus.parse_topology(host.run("nvidia-smi", "topo", "-m").answer)
    generation, width = first.text("pcie.link.gen.max"), first.text("pcie.link.width.max")
    return {
        "accelerators_per_node": str(len(found.gpus)),
        "accelerator_model_name": name,
        "accelerator_memory_capacity": first.text("memory.total"),
        "accelerator_memory_configuration": next((kind for part, kind in _HBM if part in name), ""),
        "accelerator_frequency": first.text("clocks.max.sm"),
        "accelerator_host_interconnect": f"PCIe Gen{generation} x{width}" if generation else "",
        "accelerator_interconnect": f"{links} NVLinks, {rate:.0f} GB/s a direction" if links else "",
        "accelerator_interconnect_topology": gpus.describe_topology(topology),
    }


def ask_pytorch(host: ExaminedHost) -> dict[str, Any]:
    """Ask what PyTorch was built with and the GPUs it sees, in a process of its own; empty when it cannot be imported."""
    try:
        answer = json.loads(host.python("-c", _ASK_PYTORCH, timeout_s=PYTORCH_TIMEOUT_S).answer or "{}")
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def software(pytorch: Mapping[str, Any], driver: str, host: ExaminedHost) -> dict[str, str]:
    """The fields of the software: what PyTorch says of itself, installed packages, the container, the system."""
    stack = [f"{name} {pytorch[name]}" for name in ("CUDA", "cuDNN", "NCCL") if pytorch.get(name)]
    stack += [f"NVIDIA driver {driver}"] if driver else []
    packages = ("numpy", "triton", "nvidia-dali-cuda130", "transformer-engine", "flash-attn", "mlperf-logging")
    stack += [f"{name} {number}" for name in packages if (number := version(name))]
    stack += [f"Python {platform.python_version()}"]
    stack += [kind] if (kind := container(host)) else []
    # Values stand in quotes or without.
    release = dict(re.findall(r'^(\w+)="?(.*?)"?$', host.read("/etc/os-release"), re.MULTILINE))
    ngc = host.environment.get("NVIDIA_PYTORCH_VERSION")
    return {
        "framework": f"PyTorch {pytorch.get('PyTorch') or version('torch')}".strip()
        + (f" (NVIDIA Release {ngc})" if ngc else ""),
        "other_software_stack": ", ".join(stack),
        "operating_system": release.get("PRETTY_NAME", platform.platform()),
    }


def container(host: ExaminedHost) -> str:
    """The kind of container this runs in and its image, as far as they can be known; "" outside."""
    environment = host.environment
    ngc = environment.get("NVIDIA_PRODUCT_NAME", "")
    image = f", image NVIDIA {ngc} {environment.get('NVIDIA_PYTORCH_VERSION', '')}".rstrip() if ngc else ""
    # Each runtime leaves a sign of its own.
    for name in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        if path := environment.get(name):
            return f"Apptainer container {Path(path).name}{image}"
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return f"Kubernetes pod{image}"
    if host.path("/run/.containerenv").exists():
        name = re.search(r'^image="(.+)"$', host.read("/run/.containerenv"), re.MULTILINE)
        return "Podman container" + (f" {name[1]}" if name else image)
    if host.path("/.dockerenv").exists():
        return f"Docker container{image}"
    return f"container{image}" if environment.get("container") or ngc else ""


def version(distribution: str) -> str:
    """The version of an installed package, "" when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


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
